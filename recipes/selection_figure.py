"""Draws which tokens of a mini-batch a loss chooses under 1, 2, 4, 8 micro-batches and on 1, 2 ranks: ours and verl's.

    python recipes/selection_figure.py docs/images/selection.png

Prints the table too. What is chosen is read off the gradient, of this package's losses and of verl's alike: a token is
chosen where its gradient is another one than that of the same loss with the selection switched off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.invariance import MiniBatch, make_mini_batch
from trinity_loss.invariance.cuts import Cut, even
from trinity_loss.invariance.engine import LossFn, run
from trinity_loss.invariance.layouts import build
from trinity_loss.invariance.ranks import on_ranks
from trinity_loss.micro_batch import read_micro_batch
from trinity_loss.selection import Ranks, row_numbers, token_numbers

MICRO_BATCHES, RANKS = (1, 2, 4, 8), (1, 2)
#: Shares of tokens, large enough to see and to differ; verl's default is 0.0002.
SHARE, DEFAULT_SHARE = 0.02, 0.0002
#: No token is clipped, so that each that is dropped has a gradient to lose.
NO_CLIP = {"clip_ratio_low": 0.999, "clip_ratio_high": 1e6, "clip_ratio_c": 1e6}


@dataclass(frozen=True)
class Case:
    """A loss that chooses.

    Attributes:
        title: What the chosen tokens are.
        loss: It.
        without: The same, but for the choice.
        keeps: Whether the chosen ones keep their gradient, and the others lose it.
    """

    title: str
    loss: LossConfig
    without: LossConfig
    keeps: bool = False

    @property
    def has_verl(self) -> bool:
        """Whether verl has this loss."""
        return self.loss.loss_mode in ("clip_cov", "kl_cov")


def _kl_cov(title: str, share: float) -> Case:
    loss, without = (
        LossConfig(loss_mode="kl_cov", loss_args={"kl_cov_ratio": share, "ppo_kl_coef": coef}) for coef in (1.0, 0.0)
    )
    return Case(title, loss, without)


CASES = (
    Case(
        f"clip_cov: drawn, {SHARE:.0%}",
        *(
            LossConfig(loss_mode="clip_cov", loss_args={"clip_cov_ratio": SHARE, "clip_cov_lb": lowest})
            for lowest in (1.0, 5.0)
        ),
    ),
    _kl_cov(f"kl_cov: largest covariance, {SHARE:.0%}", SHARE),
    _kl_cov(f"kl_cov at its default, {DEFAULT_SHARE:.2%}", DEFAULT_SHARE),
    Case(
        "m2po: dropped, m2_threshold 0.3",
        *(LossConfig(loss_mode="m2po", loss_args={"m2_threshold": bound}, **NO_CLIP) for bound in (0.3, 1e6)),
    ),
    Case(
        f"top_entropy_quantile {SHARE:g}: kept",
        *(LossConfig(loss_mode="gpg", top_entropy_quantile=share) for share in (SHARE, 1.0)),
        keeps=True,
    ),
)


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen under one cut.

    Attributes:
        tokens: bool [N].
        gradient: [N].
    """

    tokens: Tensor
    gradient: Tensor

    def common(self, other: Choice) -> float:
        """Tokens that both chose over those that either did (Jaccard), 1.0 where there is none."""
        either = int((self.tokens | other.tokens).sum())
        return int((self.tokens & other.tokens).sum()) / either if either else 1.0

    def deviation(self, whole: Choice) -> float:
        """How far its gradient is from another, relatively."""
        return float((self.gradient - whole.gradient).norm() / whole.gradient.norm())


def mini_batch(sequences: int = 64, longest: int = 200) -> MiniBatch:
    """A drawn mini-batch whose rows differ in what they say, since that is what a draw belongs to."""
    drawn = make_mini_batch(sequences, longest=longest)
    size = int((drawn.prompt_lengths + drawn.response_lengths).sum())
    ids = torch.randint(1000, (size,), generator=torch.Generator().manual_seed(0))
    return MiniBatch.from_dict(drawn.to_dict() | {"input_ids": ids})


def cuts(batch: MiniBatch) -> dict[str, Cut]:
    """By ``micro-batches × ranks``, the whole one first."""
    return {f"{m} × {r}": Cut("even", even(batch, m, r)) for r in RANKS for m in MICRO_BATCHES}


def select(loss: EnginePolicyLoss, batch: MiniBatch, cut: Cut) -> MiniBatch:
    """The mini-batch with what the training worker attaches to it; threads play the ranks."""
    shares = [sum(rank, ()) for rank in cut.ranks]
    made = {name: torch.zeros_like(batch.log_probs) for name in loss.over_mini_batch}

    @torch.no_grad()
    def play(ranks: Ranks) -> None:
        rows = build(batch, shares[ranks.rank])
        here = read_micro_batch(rows.model_output(batch.log_probs, batch.entropy), rows.data)
        ids = rows.fields["input_ids"]
        numbers = token_numbers(here.tokens.per_token(row_numbers(ids.values(), ids.offsets())), here.tokens.places)
        fields = loss.mini_batch_fields(here, numbers, ranks)
        places = torch.cat([torch.arange(batch.starts[i], batch.starts[i + 1]) for i in shares[ranks.rank]])
        for name, values in fields.items():
            made[name][places] = values

    on_ranks(len(shares), play)
    return batch.with_fields(**made)


def ours(config: LossConfig, batch: MiniBatch, cut: Cut, seed: int) -> Tensor:
    """The gradient [N] with the loss of trinity_loss."""
    loss = EnginePolicyLoss(config)
    return run(loss, select(loss, batch, cut), cut, seed=seed, worker=False).log_prob_gradient


def verls(config: LossConfig, batch: MiniBatch, cut: Cut, seed: int) -> Tensor:
    """The gradient [N] with verl's."""
    policy_loss = PolicyLossConfig(loss_mode=config.loss_mode, **config.loss_args)
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    loss: LossFn = partial(ppo_loss, config=actor)
    return run(loss, batch, cut, seed=seed, worker=False).log_prob_gradient


def choose(case: Case, gradient: Callable[..., Tensor], batch: MiniBatch, cut: Cut, seed: int = 0) -> Choice:
    """What a loss chooses under a cut.

    Args:
        case: The loss.
        gradient: :func:`ours` or :func:`verls`.
        batch: The mini-batch.
        cut: How it is cut.
        seed: Of torch's generators, from which verl draws.
    """
    found, without = (gradient(config, batch, cut, seed) for config in (case.loss, case.without))
    moved = ~torch.isclose(found, without, rtol=1e-9, atol=0)
    counted = (batch.response_mask != 0) & (without != 0)
    return Choice(counted & (moved ^ case.keeps), found)


def choices(batch: MiniBatch) -> dict[tuple[str, str], dict[str, Choice]]:
    """By loss and whose it is, what is chosen under each cut, and uncut with another seed of the generators."""
    found = {}
    for case in CASES:
        for name, gradient in {"trinity_loss": ours, "verl": verls}.items():
            if name == "verl" and not case.has_verl:
                continue
            of_cuts = {label: choose(case, gradient, batch, cut) for label, cut in cuts(batch).items()}
            whole, cut = next(iter(cuts(batch).items()))
            found[case.title, name] = of_cuts | {f"{whole}, another seed": choose(case, gradient, batch, cut, seed=1)}
    return found


def table(found: dict[tuple[str, str], dict[str, Choice]]) -> str:
    """Markdown: how many tokens are chosen, the share in common with the uncut choice, the gradient's deviation."""
    labels = list(next(iter(found.values())))
    lines = ["| loss | | " + " | ".join(labels) + " |", "|---|---|" + "---|" * len(labels)]
    for (title, name), row in found.items():
        whole = row[labels[0]]
        cells = []
        for choice in row.values():
            deviation = choice.deviation(whole)
            off = "0" if deviation < 1e-12 else f"{deviation:.1%}"
            cells.append(f"{int(choice.tokens.sum())}; {choice.common(whole):.2f}; {off}")
        lines.append(f"| {title} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(found: dict[tuple[str, str], dict[str, Choice]], path: str) -> None:
    """Draws a panel for each loss and whose it is: a line per cut, a column per token that either chooses anywhere."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    titles, names = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    figure, panels = plt.subplots(
        len(titles), len(names), figsize=(12, 1.6 * len(titles)), squeeze=False, layout="constrained"
    )
    colours = {"not chosen": "white", "chosen, as uncut": "tab:blue", "missed": "0.8", "chosen instead": "tab:orange"}
    for title, line in zip(titles, panels, strict=True):
        sets = {
            name: torch.stack([choice.tokens for label, choice in found[title, name].items() if "seed" not in label])
            for name in names
            if (title, name) in found
        }
        anywhere = torch.cat(list(sets.values())).any(0)
        for name, panel in zip(names, line, strict=True):
            panel.set_title(f"{name}: {title}" if name in sets else f"{name} has none", fontsize=9, loc="left")
            if name not in sets:
                panel.axis("off")
                continue
            chosen = sets[name][:, anywhere]
            # 0 neither, 1 both, 2 uncut alone, 3 cut alone.
            kinds = torch.where(chosen, torch.where(chosen[0], 1, 3), torch.where(chosen[0], 2, 0))
            panel.pcolormesh(
                kinds.numpy(), cmap=ListedColormap(list(colours.values())), vmin=0, vmax=3, edgecolors="white", lw=0.3
            )
            rows = [label for label in found[title, name] if "seed" not in label]
            panel.invert_yaxis()
            panel.set_yticks(torch.arange(len(rows)).add(0.5).tolist(), rows, fontsize=7)
            panel.set_xticks([])
            for side in ("top", "right", "bottom"):
                panel.spines[side].set_visible(False)
    figure.supylabel("micro-batches a rank × ranks", fontsize=9)
    figure.supxlabel("tokens that one of the two chooses under any of these cuts, in their order", fontsize=9)
    patches = [Patch(color=colour, label=name) for name, colour in list(colours.items())[1:]]
    figure.legend(handles=patches, loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    made = choices(mini_batch())
    print(table(made))
    for target in sys.argv[1:]:
        draw(made, target)
