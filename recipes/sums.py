"""How far sums in float32 are from float64: losses, gradients, ratios, margins, weights and perplexities.

    python recipes/sums.py

Each row is a quantity of one sequence (dpo: of a pair) of so many tokens, computed from the same float32 numbers in
float32 and in float64; printed is the relative difference, of gradients that of the vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.metrics import importance_sampling_metrics

LENGTHS = (4096, 131072, 1048576)
Numbers = dict[str, torch.Tensor]


def of_loss(rows: int = 1, offset: float = 0.1, **settings: object) -> Callable[[int, torch.dtype], Numbers]:
    """Loss, gradient and metrics of a configuration; every log-ratio is about ``offset``."""

    def compute(length: int, dtype: torch.dtype) -> Numbers:
        generator = torch.Generator().manual_seed(0)
        old = -torch.rand(rows, length, generator=generator)
        new = old + offset + 0.01 * torch.rand(rows, length, generator=generator)
        values = {"old_log_probs": old, "ref_log_prob": old, "advantages": torch.full_like(old, 0.1)}
        data = {name: tensor.to(dtype) for name, tensor in values.items()} | {"response_mask": torch.ones_like(old)}
        data |= {"batch_num_tokens": old.numel(), "global_batch_size": rows, "dp_size": 1}
        log_probs = new.to(dtype).requires_grad_()
        loss, metrics = EnginePolicyLoss(LossConfig(**settings))(model_output={"log_probs": log_probs}, data=data)
        loss.backward()
        assert log_probs.grad is not None
        found = {"loss": loss.detach(), "gradient": log_probs.grad}
        names = ("actor/ratio_mean", "actor/ppo_kl", "actor/chosen_reward", "kl_loss")
        return found | {
            name: torch.tensor(float(metrics[name].aggregate()), dtype=torch.float64)
            for name in names
            if name in metrics
        }

    return compute


def of_weights(level: str) -> Callable[[int, torch.dtype], Numbers]:
    """Importance weights and perplexities."""

    def compute(length: int, dtype: torch.dtype) -> Numbers:
        generator = torch.Generator().manual_seed(0)
        rollout = -torch.rand(1, length, generator=generator)
        spread = 1.0 if level == "geometric" else 5.0 / length
        old = rollout + spread * 0.1 * (1 + torch.rand(1, length, generator=generator))
        mask = torch.ones_like(old)
        found = importance_sampling_metrics(old.to(dtype), rollout.to(dtype), mask, level=level, upper=10.0, lower=0.1)
        names = ("rollout_is_mean", "training_ppl", "ppl_ratio", "log_ppl_diff", "kl")
        return {name: torch.tensor(found[name], dtype=torch.float64) for name in names}

    return compute


CASES = {
    "ppo, token-mean": of_loss(use_kl_loss=True, kl_loss_type="k1"),
    "ppo, seq-mean-token-mean": of_loss(loss_agg_mode="seq-mean-token-mean"),
    "gspo": of_loss(loss_mode="gspo", loss_agg_mode="seq-mean-token-mean"),
    "gmpo": of_loss(loss_mode="gmpo", loss_agg_mode="seq-mean-token-mean"),
    "dpo": of_loss(2, 1e-3, loss_mode="dpo"),
    "weights, geometric": of_weights("geometric"),
    "weights, sequence": of_weights("sequence"),
}


def table() -> dict[str, list[float]]:
    """Relative differences of every quantity by length."""
    rows: dict[str, list[float]] = {}
    for name, compute in CASES.items():
        for length in LENGTHS:
            narrow, wide = compute(length, torch.float32), compute(length, torch.float64)
            for key, exact in wide.items():
                off = (narrow[key].double() - exact.double()).norm() / exact.double().norm()
                rows.setdefault(f"{name}: {key.removeprefix('actor/')}", []).append(float(off))
    return rows


if __name__ == "__main__":
    print("| quantity | " + " | ".join(f"{length:,} tokens" for length in LENGTHS) + " |")
    print("|---|" + "---|" * len(LENGTHS))
    for quantity, errors in table().items():
        print(f"| {quantity} | " + " | ".join(f"{error:.0e}" for error in errors) + " |")
