"""The ways a mini-batch is cut: numbers of pieces, who decides their sizes, layout, width, order, engine."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import torch

from trinity_loss.invariance.minibatch import MiniBatch, Ranks

Layout = Literal["nested", "padded", "packed"]
#: What verl's trainers send to its engines.
ENGINE_LAYOUTS: tuple[Layout, ...] = ("nested", "padded")
#: How the pieces are put together: FSDP adds the micro-batches' losses and averages over ranks; Megatron's
#: schedule divides by the number of micro-batches that the engine multiplied by; its per-token regime divides
#: by a count of tokens that the engine multiplied by.
Engine = Literal["fsdp", "megatron", "megatron per token"]


@dataclass(frozen=True)
class Cut:
    """One way to cut and lay out a mini-batch.

    Attributes:
        kind: What is varied: ``even``, ``uneven``, ``dynamic``, ``budget``, ``order``, ``width``, ``layout``,
            ``engine``, ``recorded``.
        ranks: Sequences of each micro-batch of each rank.
        layout: How micro-batches are laid out.
        width: Padded width of the responses (padded layout); None: the longest of the mini-batch and one more.
        engine: How the pieces are put together.
        note: What the label adds.
    """

    kind: str
    ranks: Ranks
    layout: Layout = "nested"
    width: int | None = None
    engine: Engine = "fsdp"
    note: str = ""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the first rank; verl gives every rank as many."""
        return len(self.ranks[0])

    @property
    def label(self) -> str:
        """For instance ``4 micro-batches, 2 ranks, uneven``."""
        pieces = [f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"]
        if len(self.ranks) > 1:
            pieces.append(f"{len(self.ranks)} ranks")
        if self.kind in ("uneven", "dynamic", "recorded") or self.note:
            pieces.append(self.note or self.kind)
        return ", ".join(pieces)

    @property
    def place(self) -> str:
        """:attr:`label` and the layout, for a sentence."""
        return f"{self.label}, {self.layout} layout"


def whole(batch: MiniBatch, layout: Layout = "nested") -> Cut:
    """The mini-batch in one piece."""
    return Cut("even", ((tuple(range(batch.num_sequences)),),), layout)


def even(batch: MiniBatch, micro_batches: int, ranks: int) -> Ranks:
    """Consecutive sequences in nearly equal numbers."""
    pieces = torch.arange(len(batch.groups)).tensor_split(micro_batches * ranks)
    return _deal([_flat(batch, piece.tolist()) for piece in pieces], micro_batches)


def uneven(batch: MiniBatch, micro_batches: int, ranks: int, seed: int) -> Ranks:
    """Shuffled sequences in random numbers; the last piece holds fully masked sequences only, if there are any."""
    draw = random.Random(seed)
    order = draw.sample(range(len(batch.groups)), len(batch.groups))
    pieces = micro_batches * ranks
    masked = [k for k in order if not any(batch.valid_counts[i] for i in batch.groups[k])]
    alone = masked[:1] if pieces > 1 else []
    order = [k for k in order if k not in alone]
    inner = sorted(draw.sample(range(1, len(order)), pieces - len(alone) - 1))
    parts = [order[a:b] for a, b in pairwise([0, *inner, len(order)])] + [alone] * bool(alone)
    return _deal([_flat(batch, part) for part in parts], micro_batches)


def dynamic(batch: MiniBatch, ranks: int, seed: int, *, at_least: int | None = None, max_tokens: int) -> Ranks:
    """What verl's dynamic batch size makes of shuffled sequences: balanced by workload, cut by a token budget.

    Args:
        batch: The mini-batch.
        ranks: Data-parallel ranks; each gets as many micro-batches as the one that needs most.
        seed: Of the shuffle.
        at_least: Smallest number of micro-batches per rank.
        max_tokens: Token budget of a micro-batch, prompt and response.

    Raises:
        ImportError: verl is not installed.
    """
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    order = random.Random(seed).sample(range(len(batch.groups)), len(batch.groups))
    shares = [_flat(batch, order[rank::ranks]) for rank in range(ranks)]
    count = at_least
    while True:
        parts = []
        for rows in shares:
            ids = torch.nested.as_nested_tensor([torch.zeros(lengths[i]).long() for i in rows], layout=torch.jagged)
            data = TensorDict({"input_ids": ids}, batch_size=[len(rows)])
            limits = {"max_token_len": max_tokens, "min_num_micro_batch": count, "force_group_size": batch.group_size}
            _, indices = rearrange_micro_batches(data, **limits)
            parts.append(tuple(tuple(rows[i] for i in index) for index in indices))
        most = max(map(len, parts))
        if all(len(part) == most for part in parts):
            return tuple(parts)
        count = most


def _flat(batch: MiniBatch, groups: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for k in groups for i in batch.groups[k])


def _deal(pieces: list[tuple[int, ...]], micro_batches: int) -> Ranks:
    return tuple(tuple(pieces[k : k + micro_batches]) for k in range(0, len(pieces), micro_batches))


def all_cuts(
    batch: MiniBatch,
    micro_batches: Sequence[int],
    dp_sizes: Sequence[int],
    seed: int,
    layouts: Sequence[Layout],
    token_budgets: Sequence[int],
    skipped: list[tuple[str, str]],
    *,
    equal_rows: bool = False,
    engines: Sequence[Engine] = ("megatron", "megatron per token"),
) -> Iterator[Cut]:
    """Every cut of a check, without the whole, in the order of the table.

    Cuts that the mini-batch is too small for are left out; ``skipped`` says which, and why.

    Args:
        batch: The mini-batch.
        micro_batches: Numbers of micro-batches per rank.
        dp_sizes: Numbers of ranks.
        seed: Of the cuts that are drawn.
        layouts: The first is that of most cuts.
        token_budgets: Of verl's dynamic batch size.
        skipped: Gets what is left out.
        equal_rows: Whether only cuts into pieces of as many sequences are made.
        engines: Other engines than FSDP to be played.
    """
    groups, size = len(batch.groups), batch.group_size
    most = max((m for m in micro_batches if m + 1 < groups), default=1)
    ranks = max((d for d in dp_sizes if 2 * d + 1 < groups), default=1)
    base: Layout = layouts[0]
    together = "sequences" if size == 1 else f"groups of {size} sequences"
    for d, m in product(dp_sizes, micro_batches):
        if m * d > groups:
            skipped.append((f"{m} × {d} pieces", f"the mini-batch has {groups} {together}"))
        elif equal_rows and groups % (m * d):
            skipped.append((f"{m} × {d} pieces", f"{groups} sequences do not divide into equal ones"))
        elif m * d > 1:
            yield Cut("even", even(batch, m, d), base)
    some = [(min(4, most), 1)] + ([(min(2, most), ranks)] if ranks > 1 else [])
    if equal_rows:
        some = [(m, d) for m, d in some if groups % (m * d) == 0]
    for m, d in {(most, 1): None, **dict.fromkeys(some[1:])}:
        if 1 < m * d < groups and not equal_rows:
            yield Cut("uneven", uneven(batch, m, d, seed), base)
    if batch.cut is not None:
        yield Cut("recorded", batch.cut, base, note="as recorded")
    if not equal_rows:
        yield from _dynamic_cuts(batch, some, ranks, seed, base, token_budgets, skipped)
    backwards = _flat(batch, range(groups)[::-1])
    yield Cut("order", ((backwards,),), base, note="in reverse order")
    for layout in layouts[1:]:
        for m, d in [(1, 1), *some]:
            yield Cut("layout", even(batch, m, d), layout)
    if "padded" in layouts:
        for width in (1, 9):
            wide = int(batch.response_lengths.max()) + 1 + width
            yield Cut("width", whole(batch).ranks, "padded", wide, note=f"padded to {wide}")
    for engine in engines:
        for m, d in some:
            yield Cut("engine", even(batch, m, d), base, engine=engine, note=engine)


def _dynamic_cuts(
    batch: MiniBatch,
    some: list[tuple[int, int]],
    ranks: int,
    seed: int,
    layout: Layout,
    token_budgets: Sequence[int],
    skipped: list[tuple[str, str]],
) -> Iterator[Cut]:
    if importlib.util.find_spec("verl") is None:
        skipped.append(("dynamic cuts", "verl, which makes them, is not installed"))
        return
    lengths = batch.prompt_lengths + batch.response_lengths
    longest, everything = int(lengths.max()), int(lengths.sum())
    for m, d in some:
        if m > 1:
            yield Cut("dynamic", dynamic(batch, d, seed, at_least=m, max_tokens=everything), layout)
    for budget in token_budgets:
        if budget >= everything:
            skipped.append((f"token budget {budget}", f"the mini-batch has {everything} tokens"))
        elif budget < longest:
            skipped.append((f"token budget {budget}", f"the longest sequence has {longest} tokens"))
        else:
            for d in sorted({1, ranks}):
                note = f"at most {budget} tokens each"
                yield Cut("budget", dynamic(batch, d, seed, max_tokens=budget), layout, note=note)
