"""Why a loss depends on the cut: experiments on one micro-batch, each of which one cause answers to.

All of them keep the totals of the mini-batch, so a loss that keeps the contract is a plain sum over the
sequences of a micro-batch: what a sequence contributes does not ask who else is there. Then

- a wider padding changes nothing, nor does another order of the sequences;
- other values in one half of the sequences change nothing for the other half: where they do, by one factor for
  all its tokens, a statistic is a factor, and where each token changes by its own, tokens are chosen or normalised;
  each field by itself says by what;
- other lengths in some sequences change nothing for the rest, where all counts stay as they were;
- a sequence alone gives what it gave in company: where values do not matter and company does, something is
  counted, and the factors over some micro-batches say what;
- twice the ranks give twice the gradient, since the engine averages over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trinity_loss.invariance.contracts import Played
from trinity_loss.invariance.head_count import HeadCount
from trinity_loss.invariance.measure import Subject, describe
from trinity_loss.invariance.probe import Cause


def causes(subject: Subject, term: str, deviation: float, pieces: Iterable[Sequence[int]] = ()) -> list[Cause]:
    """What makes this term depend on the cut, the likeliest first; empty where nothing answers.

    Args:
        subject: The loss.
        term: The term.
        deviation: How far off it is where it is worst; a small fault takes a sharper eye.
        pieces: Micro-batches of a cut that shows it, to look at where the whole has no gradient.
    """
    tried: list[str] = []
    for layout in dict.fromkeys(layout for layout in ("padded", subject.base) if layout in subject.layouts):
        try:
            found = _causes(HeadCount(subject, term, layout, deviation, pieces))
        except Exception as error:
            # A loss may refuse an experiment; that is no answer.
            tried.append(describe(error))
            continue
        if found:
            return found
    if tried:
        return [Cause("unexplained", f"{{}} raises where it is looked into: {tried[0]}")]
    return []


def _causes(probe: HeadCount) -> list[Cause]:
    quiet = probe.subject.noise is None
    place = probe.order() if quiet else None
    if place is not None and not probe.ties:
        return [place]
    width = probe.width() if quiet else None
    found = [] if width is None else [width]
    inside = probe.content()
    if inside is None and quiet:
        inside = probe.count()
        if inside is not None and inside.name == "local count as a factor":
            # A threshold answers to other values only where they cross it, and a length is no count.
            inside = probe.crossed() or (None if found else probe.lengths()) or inside
    if inside is None and quiet and not found:
        inside = probe.silenced() or probe.crossed() or probe.lengths()
    if inside is not None:
        return [_named_by_contract(probe, inside), *found]
    if not quiet:
        return found
    found += probe.of_the_ranks()
    for name, why in (
        ("num_micro_batch", "{} multiplies by num_micro_batch, and so does the engine already"),
        ("micro_batch_size_per_gpu", "{} asks for micro_batch_size_per_gpu, which says nothing of this micro-batch"),
    ):
        if abs(probe.ratio(**{name: (3, 1)}) - 1) > probe.same:
            found.append(Cause("number of micro-batches", why))
    return found if found or place is None else [place]


def _named_by_contract(probe: HeadCount, cause: Cause) -> Cause:
    """A mean over rows is no fault where all pieces have as many; not dividing by their number is."""
    loss_fn = probe.subject.loss_fn
    if not isinstance(loss_fn, Played) or not loss_fn.contract.equal_rows or cause.name != "local mean":
        return cause
    if "sequences" not in cause.why or abs(probe.ratio(pieces_per_rank=(3, 1)) - 1) > probe.same:
        return cause
    return Cause("number of micro-batches", "{} is a mean over rows, and is not divided by the accumulation steps")
