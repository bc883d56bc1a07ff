"""How other frameworks call a loss, and what their engines make of what it returns.

A loss that was written for one of them is played as a loss of verl's engine contract: called in its own way on each
micro-batch, and weighted as its engine weights the pieces. What depends on the cut after that depends on it there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError
from trinity_loss.invariance.cuts import ENGINE_LAYOUTS, Engine, Layout
from trinity_loss.invariance.pieces import LABEL, Piece

_OF_VERL: tuple[Engine, ...] = ("megatron", "megatron per token")
#: What each finding asks for, in whatever framework.
_CHANGES = {
    "padded width as the norm": "divide by a constant of the run, for instance the longest response allowed",
    "selection inside the micro-batch": "choose or normalise over the mini-batch before it is cut, or by a threshold",
    "statistic of the micro-batch as a factor": "take that number from the mini-batch, or from the last step",
    "prompt group inside the micro-batch": "compute it before the batch is cut, or keep the groups together",
    "rows counted in one place and not in the other": "count fully masked sequences in both places or in neither",
    "counts in low precision": "count in int64",
    "empty micro-batch": "return 0 that depends on the log-probs where no token counts",
    "masked NaN": "select by the mask (torch.where) before the first exponential",
    "random numbers": "draw as a function of the token: seed, step, sequence and place",
    "state between calls": "keep nothing between calls; what a step needs is handed in",
    "inputs changed in place": "copy what is changed",
    "rank identity": "do not ask for the rank",
    "order of the sequences": "treat every sequence by itself",
    "layout": "read the sequences, not the rows of the tensor",
    "reported loss": "return the very number that the gradient belongs to",
    "totals that do not describe this mini-batch": "count the mask that is trained on",
}


@dataclass(frozen=True)
class Contract:
    """How a framework calls a loss.

    Attributes:
        name: As ``--contract`` takes it.
        takes: The call, for a reader.
        adds: What the engine makes of the pieces, for a reader.
        call: Calls what ``bind`` made on a piece; returns the scalar and its metrics.
        weight: What the engine multiplies the scalar by, given the piece, its count and the sum of all counts, where
            gradients are added over a rank's pieces and averaged over ranks.
        count: What the engine counts of a piece before it runs any, given the weight function; None: nothing.
        bind: What ``--loss`` names, made a callable.
        layouts: Layouts in which pieces come.
        engines: Other engines than FSDP that it runs on.
        equal_rows: Whether every piece has as many sequences.
        summed_metrics: Whether metrics are added over pieces and ranks instead of averaged.
        dtype: What it is computed in where the user does not say.
        changes: What a finding asks for here, by its name.
    """

    name: str
    takes: str
    adds: str
    call: Callable[[Callable[..., Any], Piece], tuple[Any, Any]] = lambda loss_fn, piece: loss_fn(piece)
    weight: Callable[[Piece, float, float], float] = lambda piece, count, total: 1.0
    count: Callable[[Callable[..., Any], Piece], float] | None = None
    bind: Callable[[Any], Callable[..., Any]] = lambda loss_fn: loss_fn
    layouts: tuple[Layout, ...] = ENGINE_LAYOUTS
    engines: tuple[Engine, ...] = ()
    equal_rows: bool = False
    summed_metrics: bool = False
    dtype: str = "float64"
    changes: Mapping[str, str] = field(default_factory=dict)

    def change(self, finding: str) -> str | None:
        """What to change in a loss where that was found; None where there is no general answer."""
        return self.changes.get(finding, _CHANGES.get(finding))

    def __reduce__(self) -> tuple[Callable[[str], Contract], tuple[str]]:
        # A report goes from one process to another, and these functions have no names.
        return contract_of, (self.name,)


class Played:
    """A loss of another framework as one of verl's engine contract.

    Args:
        contract: Its framework's.
        loss_fn: The loss.
        weight_fn: AReaL's ``loss_weight_fn``.
    """

    def __init__(self, contract: Contract, loss_fn: Any, weight_fn: Callable[..., Any] | None = None) -> None:
        self.contract, self.loss_fn, self.weight_fn = contract, contract.bind(loss_fn), weight_fn

    def before(self, ranks: Sequence[Sequence[tuple[Any, Any]]]) -> dict[str, float]:
        """What the engine counts before it runs the first of these pieces, each a model output and its data."""
        known: dict[str, float] = {"pieces_per_rank": len(ranks[0])}
        if self.contract.count is None:
            return known
        return known | {"sum_of_counts": sum(self._count(Piece(*piece)) for rank in ranks for piece in rank)}

    def _count(self, piece: Piece) -> float:
        assert self.contract.count is not None
        return float(self.contract.count(self.weight_fn or _valid_tokens, piece))

    def __call__(self, *, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, Any]:
        """The loss of one micro-batch, as its share of the step."""
        piece = Piece(model_output, data)
        count = 0.0
        if self.contract.count is not None:
            count = self._count(piece)
            if count == 0:
                return piece.nothing, {}
        loss, metrics = self.contract.call(self.loss_fn, piece)
        if not isinstance(loss, Tensor) or not isinstance(metrics, Mapping):
            return loss, metrics  # Whoever calls says what it should have been.
        weight = self.contract.weight(piece, count, piece.totals.get("sum_of_counts", count))
        if self.contract.summed_metrics:
            metrics = {key: value if "max" in key or "min" in key else Summed(value) for key, value in metrics.items()}
        return loss * weight, metrics


class Summed:
    """A metric that is added over micro-batches and ranks."""

    def __init__(self, *values: Any) -> None:
        self.values = [float(value) for value in values]

    def init_list(self) -> Summed:
        """An empty one."""
        return Summed()

    def append(self, other: Summed) -> None:
        """Adds the values of another one."""
        self.values += other.values

    @classmethod
    def aggregate_dp(cls, ranks: Sequence[Summed]) -> float:
        """The sum over all ranks."""
        return sum(sum(rank.values) for rank in ranks)


def _accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a function takes by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    return {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}


# Trinity-RFT

_OF_TRINITY = {
    "logprob": "log_probs",
    "old_logprob": "old_log_probs",
    "ref_logprob": "ref_log_prob",
    "rollout_logprob": "rollout_log_probs",
    "advantages": "advantages",
    "entropy": "entropy",
}


def _trinity(loss_fn: Callable[..., Any], piece: Piece) -> tuple[Any, Any]:
    offered = {theirs: piece.rectangle(name) for theirs, name in _OF_TRINITY.items() if piece.has(name)}
    offered["action_mask"] = piece.rectangle("response_mask").bool()
    return loss_fn(**_accepted(loss_fn, offered))


# AReaL


def _areal_input(piece: Piece) -> dict[str, Any]:
    data = {name: piece.packed(name) for name in piece.names if name not in ("log_probs", "entropy")}
    starts = torch.nn.functional.pad(piece.sizes.cumsum(0), (1, 0))
    return data | {
        "logprobs": data["rollout_log_probs"],
        "prox_logp": data["old_log_probs"],
        "ref_logp": data["ref_log_prob"],
        "loss_mask": data["response_mask"],
        "input_ids": torch.full((int(starts[-1]),), LABEL),
        "cu_seqlens": starts.to(torch.int32),
        "max_seqlen": int(piece.sizes.max()),
    }


def _areal(loss_fn: Callable[..., Any], piece: Piece) -> tuple[Any, Any]:
    log_probs, entropy = piece.packed("log_probs"), piece.packed("entropy")
    limits = {f"vocab_{which}_logits": torch.zeros_like(log_probs).detach() for which in ("min", "max")}
    result = loss_fn(log_probs, entropy, _areal_input(piece), **_accepted(loss_fn, limits))
    return (result, {}) if isinstance(result, Tensor) else result


def _valid_tokens(data: Mapping[str, Any]) -> Any:
    """The weight function of AReaL's own actor."""
    return data["loss_mask"].count_nonzero()


# NeMo-RL


_OF_NEMO = {
    "advantages": "advantages",
    "prev_logprobs": "old_log_probs",
    "generation_logprobs": "rollout_log_probs",
    "reference_policy_logprobs": "ref_log_prob",
    "token_mask": "response_mask",
}


def _nemo(loss_fn: Callable[..., Any], piece: Piece) -> tuple[Any, Any]:
    width, rows = max(piece.prompts) + piece.width, len(piece.lengths)
    data = {theirs: piece.rectangle(name, lambda prompt: prompt, width) for theirs, name in _OF_NEMO.items()}
    data["token_mask"] = data["token_mask"].to(data["advantages"].dtype)
    data |= {"sample_mask": torch.ones(rows, dtype=data["advantages"].dtype), "input_lengths": piece.sizes}
    data["input_ids"] = torch.full((rows, width), LABEL)
    return loss_fn(
        next_token_logprobs=piece.rectangle("log_probs", lambda prompt: prompt - 1, width - 1),
        data=data,
        global_valid_seqs=torch.tensor(float(piece.totals["global_batch_size"])),
        global_valid_toks=torch.tensor(float(piece.totals["batch_num_tokens"])),
    )


# slime and Miles

_OF_SLIME = {
    "loss_masks": "response_mask",
    "log_probs": "old_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_prob",
    "advantages": "advantages",
}


def _slime(per_token: bool) -> Callable[[Callable[..., Any], Piece], tuple[Any, Any]]:
    def call(loss_fn: Callable[..., Any], piece: Piece) -> tuple[Any, Any]:
        masks = piece.rows("response_mask")
        lengths = piece.sizes.tolist()
        tokens = [torch.full((length,), LABEL) for length in lengths]
        batch: dict[str, Any] = {theirs: piece.rows(name) for theirs, name in _OF_SLIME.items()}
        batch |= {"unconcat_tokens": tokens, "tokens": torch.cat(tokens)[None], "returns": batch["advantages"]}
        batch |= {"total_lengths": lengths, "response_lengths": piece.lengths}

        def reduce(values: Tensor) -> Tensor:
            means = [
                (row * mask).sum() / (1 if per_token else mask.sum().clamp(min=1))
                for row, mask in zip(values.split(piece.lengths), masks, strict=True)
            ]
            return torch.stack(means).sum()

        steps, size = piece.totals["pieces_per_rank"], piece.totals["global_batch_size"]
        args = SimpleNamespace(
            calculate_per_token_loss=per_token, global_batch_size=size, num_microbatches=steps, qkv_format="thd",
            rollout_temperature=1.0, loss_type="custom_loss",
        )  # fmt: skip
        loss, log = loss_fn(args, batch, piece.logits[None], reduce)
        count = piece.totals["sum_of_counts"] if per_token else size
        return loss, {key: value / count for key, value in log.items()}

    return call


def _counted_as_megatron(_: Callable[..., Any], piece: Piece) -> float:
    """A sample without a token counts as one."""
    return float(sum(max(int(mask.sum()), 1) for mask in piece.rows("response_mask")))


# TRL


def _bind_trl(loss_fn: Any) -> Callable[[Piece], tuple[Any, Any]]:
    """A function that ``compute_loss_func`` takes, or a trainer with a ``_compute_loss`` of its own."""
    if isinstance(loss_fn, type) or isinstance(getattr(loss_fn, "func", None), type):
        from trinity_loss.invariance.trl_trainer import play

        return play(loss_fn)
    if "num_items_in_batch" not in inspect.signature(loss_fn).parameters:
        raise ConfigError(
            "--contract trl takes a subclass of GRPOTrainer, or a function of (outputs, labels, num_items_in_batch)"
        )
    return partial(_compute_loss_func, loss_fn)


def _compute_loss_func(loss_fn: Callable[..., Any], piece: Piece) -> tuple[Any, Any]:
    """``compute_loss_func`` of a transformers trainer, which multiplies by the processes afterwards."""
    width = max(piece.prompts) + piece.width
    labels = torch.where(piece.rectangle("response_mask", lambda prompt: prompt, width) > 0, LABEL, -100)
    rows = piece.logits.split(piece.sizes.tolist())
    logits = torch.nn.utils.rnn.pad_sequence([*rows, rows[0].new_zeros(width, 2)], batch_first=True)[:-1]
    items = torch.tensor(piece.totals["batch_num_tokens"])
    loss = loss_fn(SimpleNamespace(logits=logits), labels, num_items_in_batch=items)
    return (loss * piece.totals["dp_size"] if isinstance(loss, Tensor) else loss), {}


# prime-rl


def _prime_rl(loss_fn: Callable[..., Any], piece: Piece) -> tuple[Any, Any]:
    total, metrics = piece.nothing, dict[str, list[float]]()
    rows = {name: piece.rows(name) for name in piece.names}
    for i in range(len(piece.lengths)):
        row = {name: values[i] for name, values in rows.items()}
        inputs = SimpleNamespace(
            trainer_logprobs=row["log_probs"], inference_logprobs=row["rollout_log_probs"],
            ref_logprobs=row["ref_log_prob"], teacher_logprobs=row["ref_log_prob"], advantages=row["advantages"],
            loss_mask=row["response_mask"].bool(), loss_weights=None,
        )  # fmt: skip
        result = loss_fn(inputs)
        total = total + result.loss
        for key, value in result.metrics.items():
            metrics.setdefault(key, []).extend(torch.as_tensor(value).reshape(-1).tolist())
    return total, metrics


_OUTSIDE = "the engine divides: return a sum"

#: One declaration per framework.
CONTRACTS = {
    contract.name: contract
    for contract in (
        Contract(
            "verl",
            "loss(model_output=, data=, dp_group=) → scalar, metrics",
            "added over micro-batches, averaged over ranks; the loss divides by batch_num_tokens or global_batch_size "
            "and multiplies by dp_size",
            layouts=("nested", "padded", "packed"),
            engines=_OF_VERL,
            changes={
                "local mean": "multiply the sum by dp_size / batch_num_tokens, or by dp_size / global_batch_size",
                "missing dp_size": 'multiply by data["dp_size"], once',
                "number of micro-batches": "leave it out: the engine takes care of it",
                "mean and share count different things": "a mean over tokens takes the share of tokens, one over "
                "sequences that of sequences",
                "local count as a factor": "divide by what the mini-batch holds, and by nothing of the micro-batch",
                "metric depends on the cut": 'emit Metric("sum", numerator * dp_size / count_of_the_mini_batch)',
            },
        ),
        Contract(
            "trinity",
            "loss(logprob=, old_logprob=, action_mask=, advantages=, …) → scalar, metrics",
            "added over micro-batches, averaged over ranks, without a weight (Trinity-RFT 0.6.0 with verl's engine)",
            _trinity,
            engines=_OF_VERL,
            changes={
                "local mean": "nothing in the loss: Trinity-RFT hands it no count of the mini-batch; "
                "trinity_loss.trinity_rft weights each piece by its share (docs/trinity-rft.md)",
                "missing dp_size": "nothing in the loss, as for a local mean: docs/trinity-rft.md",
                "metric depends on the cut": "docs/trinity-rft.md: metrics travel as numerator and count there",
            },
        ),
        Contract(
            "areal",
            "loss(logprobs, entropy, input_data) → scalar, and loss_weight_fn(input_data) → count",
            "each mean times its weight over the sum of all weights",
            _areal,
            lambda piece, count, total: count / total * piece.totals["dp_size"],
            count=lambda weight_fn, piece: weight_fn(_areal_input(piece)),
            layouts=("nested",),
            changes={
                "local mean": "let loss_weight_fn count what the loss averages over",
                "mean and share count different things": "let loss_weight_fn count what the loss averages over",
                "local count as a factor": "return a mean over what loss_weight_fn counts: the engine multiplies by it",
                "rows counted in one place and not in the other": "let loss_weight_fn count the sequences that the "
                "mean counts",
            },
        ),
        Contract(
            "nemo-rl",
            "loss(next_token_logprobs=, data=, global_valid_seqs=, global_valid_toks=) → scalar, metrics",
            "added over micro-batches and ranks; the loss divides by global_valid_toks or global_valid_seqs",
            _nemo,
            lambda piece, count, total: piece.totals["dp_size"],
            summed_metrics=True,
            changes={
                "local mean": "divide by global_valid_toks or global_valid_seqs (masked_mean with "
                "global_normalization_factor)",
                "missing dp_size": "leave the ranks out: the engine multiplies by them",
                "mean and share count different things": "divide a sum over tokens by global_valid_toks, one over "
                "sequences by global_valid_seqs",
                "local count as a factor": "divide by the global counts alone",
                "metric depends on the cut": "divide by the global counts: NeMo-RL adds metrics up",
            },
        ),
        *(
            Contract(
                name,
                "loss(args, batch, logits, sum_of_sample_mean) → scalar, metrics",
                "added over micro-batches and ranks, divided by "
                + ("the tokens of all samples" if per_token else "the global batch size"),
                _slime(per_token),
                (lambda piece, count, total: piece.totals["dp_size"] / total)
                if per_token
                else (lambda piece, count, total: piece.totals["dp_size"] / piece.totals["global_batch_size"]),
                count=_counted_as_megatron if per_token else None,
                layouts=("nested",),
                summed_metrics=True,
                dtype="float32",
                changes={
                    "local mean": f"return sum_of_sample_mean(values), which adds up over samples: {_OUTSIDE}",
                    "local count as a factor": f"return sum_of_sample_mean(values): {_OUTSIDE}",
                    "mean and share count different things": f"return sum_of_sample_mean(values): {_OUTSIDE}",
                    "missing dp_size": "leave the ranks out: the engine multiplies by them",
                    "metric depends on the cut": "reduce metrics by sum_of_sample_mean too",
                },
            )
            for name, per_token in (("slime", False), ("slime-per-token", True), ("miles", False))
        ),
        Contract(
            "trl",
            "compute_loss_func(outputs, labels, num_items_in_batch) → scalar, or a GRPOTrainer's _compute_loss",
            "added over accumulation steps, averaged over processes; compute_loss_func is multiplied by the processes",
            bind=_bind_trl,
            layouts=("padded",),
            equal_rows=True,
            changes={
                "local mean": "divide the sum by num_items_in_batch (in _compute_loss, by num_items_in_batch / "
                "num_processes), or a mean over equal rows by current_gradient_accumulation_steps",
                "missing dp_size": "in _compute_loss, divide by num_items_in_batch / accelerator.num_processes; in "
                "compute_loss_func leave the processes out",
                "number of micro-batches": "divide a mean by current_gradient_accumulation_steps",
                "mean and share count different things": "divide sums over tokens by num_items_in_batch",
                "local count as a factor": "divide by num_items_in_batch alone",
            },
        ),
        Contract(
            "prime-rl",
            "loss(inputs) → an object with loss and metrics, one sample at a time",
            "added over all samples, divided by the tokens of the step",
            _prime_rl,
            lambda piece, count, total: piece.totals["dp_size"] / max(piece.totals["batch_num_tokens"], 1),
            layouts=("nested",),
            changes={
                "local mean": "return the sum over the sample's tokens: the engine divides by those of the step",
                "metric depends on the cut": "return numbers of the sample alone",
            },
        ),
    )
}


def contract_of(name: str) -> Contract:
    """The contract of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in CONTRACTS:
        raise ConfigError(f"--contract is {name!r}; expected one of {', '.join(CONTRACTS)}")
    return CONTRACTS[name]
