"""Aggregation modes: a numerator, the count that this micro-batch holds, the count of the mini-batch.

A loss term is a numerator over a denominator. The numerator adds up over micro-batches and ranks; the
denominator belongs to the whole mini-batch. :func:`aggregate_loss` gives both for one batch in any layout;
:class:`trinity_loss.EnginePolicyLoss` divides by what the engine counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError, FieldShapeError
from trinity_loss.import_path import find_at
from trinity_loss.jagged import check_tensor
from trinity_loss.rules import BOOLEAN, POSITIVE, TEXT, check
from trinity_loss.tokens import ResponseTokens, SequenceGroups
from trinity_loss.totals import GroupCount, find_count


@dataclass(frozen=True)
class Ratio:
    """A numerator over a denominator; both add up over the pieces of a batch.

    Attributes:
        numerator: 0-d tensor, float32 or better.
        denominator: 0-d tensor, float64 (float32 loses counts above 2²⁴).
    """

    numerator: Tensor
    denominator: Tensor

    def value(self) -> Tensor:
        """The quotient; 0, with the numerator's graph, where the denominator is 0."""
        quotient = self.numerator / torch.where(self.denominator == 0, torch.inf, self.denominator)
        return quotient.to(self.numerator.dtype)


@dataclass(frozen=True)
class AggregationMode:
    """A mode with its arguments. Subclass it to add one, see :func:`register_aggregation_mode`.

    A subclass gives either :meth:`sequence_weights` (every built-in mode is a weighted sum of token
    losses) or its own :meth:`numerator`, and :meth:`local_count` with :attr:`total`.

    Attributes:
        loss_scale_factor: Constant divisor, for the modes that have one.
        count_empty_sequences: Whether fully masked sequences count in a denominator of sequences.
        count_padding_rows: Whether the synthetic rows that verl appends count as sequences.
        count_rejected_tokens: Whether a denominator of tokens counts those that rejection masked later.
    """

    loss_scale_factor: float | None = None
    count_empty_sequences: bool = True
    count_padding_rows: bool = True
    count_rejected_tokens: bool = True

    has_scale_factor: ClassVar[bool] = False
    #: So many consecutive sequences are one, and must stay together in a micro-batch.
    group_size: ClassVar[int] = 1

    @property
    def total(self) -> str | None:
        """Name of the count that is this mode's denominator, see :mod:`trinity_loss.totals`; None for a plain sum."""
        raise NotImplementedError(f"{type(self).__name__} has no total")

    def local_count(self, tokens: ResponseTokens) -> Tensor:
        """0-d: this micro-batch's part of the denominator; the tokens are those before the loss rejected some."""
        raise NotImplementedError(f"{type(self).__name__} has no local_count")

    def sequence_weights(self, tokens: ResponseTokens, dtype: torch.dtype) -> Tensor | None:
        """Weight [S] of the token losses of each sequence; None for 1."""
        return None

    def token_weights(self, tokens: ResponseTokens, dtype: torch.dtype) -> Tensor:
        """Weight [N] of each token loss in the numerator, 0 where the mask is."""
        indicator = tokens.indicator(dtype)
        weights = self.sequence_weights(tokens, dtype)
        return indicator if weights is None else indicator * tokens.per_token(weights)

    def numerator(self, losses: Tensor, tokens: ResponseTokens) -> Tensor:
        """0-d: sum over the sequences of token losses [N], finite where uncounted; differentiable."""
        return (losses * self.token_weights(tokens, losses.dtype)).sum()

    @property
    def is_linear(self) -> bool:
        """Whether the numerator is the sum of token losses times :meth:`token_weights`."""
        return type(self).numerator is AggregationMode.numerator

    def linearize(self, losses: Tensor, tokens: ResponseTokens) -> tuple[Tensor, Tensor]:
        """The numerator at token losses [N], 0-d, and its derivative with respect to them [N]."""
        with torch.enable_grad():
            leaf = losses.detach().requires_grad_()
            numerator = self.numerator(leaf, tokens)
            return numerator.detach(), torch.autograd.grad(numerator, leaf)[0]

    def _check_scale_factor(self, name: str) -> None:
        factor = self.loss_scale_factor
        if not self.has_scale_factor:
            if factor is not None:
                raise ConfigError(f"loss_scale_factor is {factor!r}, but loss_agg_mode {name!r} has no divisor")
            return
        if not POSITIVE.holds(factor):
            raise ConfigError(
                f"loss_scale_factor is {factor!r}; loss_agg_mode {name!r} needs a positive finite number, "
                "for instance the longest response allowed (a padded width depends on the cut)"
            )


class _OverScaleFactor(AggregationMode):
    """What a mode that divides by its constant has instead of its weights."""

    has_scale_factor: ClassVar[bool] = True

    def sequence_weights(self, tokens: ResponseTokens, dtype: torch.dtype) -> Tensor:
        assert self.loss_scale_factor is not None
        return torch.full((tokens.num_slots,), 1 / self.loss_scale_factor, dtype=dtype, device=tokens.mask.device)


@dataclass(frozen=True)
class TokenMean(AggregationMode):
    """Mean over the tokens of the mini-batch."""

    @property
    def total(self) -> str:
        return "batch_num_tokens" if self.count_rejected_tokens else "batch_num_valid_tokens"

    def local_count(self, tokens: ResponseTokens) -> Tensor:
        return tokens.num_tokens


@dataclass(frozen=True)
class PositiveTokenMean(TokenMean):
    """Mean over the tokens of positive advantage of the mini-batch, which the tokens given to it are."""

    @property
    def total(self) -> str:
        return "batch_num_positive_tokens"


@dataclass(frozen=True)
class TokenSum(AggregationMode):
    """Sum over tokens: no denominator."""

    @property
    def total(self) -> None:
        return None

    def local_count(self, tokens: ResponseTokens) -> Tensor:
        return torch.ones((), dtype=torch.int64, device=tokens.mask.device)


@dataclass(frozen=True)
class Constant(_OverScaleFactor, TokenSum):
    """Sum over tokens, divided by a constant of the run."""


@dataclass(frozen=True)
class SeqMeanTokenSum(AggregationMode):
    """Sum over the tokens of a sequence, mean over sequences."""

    @property
    def total(self) -> str:
        if not self.count_empty_sequences:
            return "batch_num_nonempty_sequences"
        return "global_batch_size" if self.count_padding_rows else "batch_num_real_sequences"

    def local_count(self, tokens: ResponseTokens) -> Tensor:
        return tokens.num_sequences if self.count_empty_sequences else tokens.num_nonempty_sequences


@dataclass(frozen=True)
class SeqMeanTokenMean(SeqMeanTokenSum):
    """Mean over the tokens of a sequence, mean over sequences."""

    def sequence_weights(self, tokens: ResponseTokens, dtype: torch.dtype) -> Tensor:
        return tokens.counts.clamp(min=1).to(dtype).reciprocal()


@dataclass(frozen=True)
class SeqMeanTokenSumNorm(_OverScaleFactor, SeqMeanTokenSum):
    """Sum over the tokens of a sequence, divided by a constant, mean over sequences."""


@dataclass(frozen=True)
class PromptMean(AggregationMode):
    """Mean over the tokens of a prompt group, mean over prompt groups."""

    @property
    def total(self) -> str:
        return "batch_num_prompts"

    def local_count(self, tokens: ResponseTokens) -> Tensor:
        return self._groups(tokens).num_groups

    def sequence_weights(self, tokens: ResponseTokens, dtype: torch.dtype) -> Tensor:
        return self._groups(tokens).num_tokens.clamp(min=1).to(dtype).reciprocal()

    def _groups(self, tokens: ResponseTokens) -> SequenceGroups:
        if self.total not in tokens.groups:
            noun = self.total.removeprefix("batch_num_")
            raise FieldShapeError(f"the tokens of a mean over {noun} have none; pass {noun.removesuffix('s')}_ids")
        return tokens.groups[self.total]


@dataclass(frozen=True)
class TrajectoryMean(PromptMean):
    """Mean over the tokens of a trajectory, mean over trajectories; a trajectory may have several rows."""

    @property
    def total(self) -> str:
        return "batch_num_trajectories"


@dataclass(frozen=True)
class TrajectoryMeanTokenSumNorm(_OverScaleFactor, TrajectoryMean):
    """Sum over the tokens of a trajectory, divided by a constant, mean over trajectories."""


_MODES: dict[str, Callable[..., AggregationMode]] = {
    "token-mean": TokenMean,
    "token-sum": TokenSum,
    "seq-mean-token-sum": SeqMeanTokenSum,
    "seq-mean-token-mean": SeqMeanTokenMean,
    "seq-mean-token-sum-norm": SeqMeanTokenSumNorm,
    "prompt-mean": PromptMean,
    "constant": Constant,
    "trajectory-mean": TrajectoryMean,
    "trajectory-mean-token-sum-norm": TrajectoryMeanTokenSumNorm,
}


def aggregation_mode_names() -> tuple[str, ...]:
    """Names that ``loss_agg_mode`` accepts."""
    return tuple(_MODES)


def has_scale_factor(loss_agg_mode: str) -> bool:
    """Whether the mode of that name divides by a constant of the run."""
    known = ":" in loss_agg_mode or loss_agg_mode in _MODES
    return known and getattr(find_aggregation_mode(loss_agg_mode), "has_scale_factor", False)


def find_aggregation_mode(loss_agg_mode: str) -> Callable[..., AggregationMode]:
    """What makes the mode of that name: one that is registered, or ``package.module:Class``.

    Raises:
        ConfigError: There is none.
    """
    check("loss_agg_mode", loss_agg_mode, TEXT)
    if loss_agg_mode in _MODES:
        return _MODES[loss_agg_mode]
    if ":" in loss_agg_mode:
        return cast(Callable[..., AggregationMode], find_at("loss_agg_mode", loss_agg_mode))
    raise ConfigError(
        f"loss_agg_mode is {loss_agg_mode!r}; expected one of {', '.join(_MODES)}, or a mode of your own as "
        "'package.module:Class'"
    )


def check_aggregation_mode(field: str, loss_agg_mode: str | None) -> None:
    """Raises :class:`ConfigError`, with the name of the field, unless there is such a mode or none is given."""
    if loss_agg_mode is not None:
        try:
            find_aggregation_mode(loss_agg_mode)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error


def register_aggregation_mode(name: str, mode: Callable[..., AggregationMode]) -> None:
    """Adds a mode of your own under a name that ``loss_agg_mode`` then accepts.

    Args:
        name: New name.
        mode: Subclass of :class:`AggregationMode`, or a callable that takes its arguments and makes one.

    Raises:
        ConfigError: The name is taken.
    """
    if name in _MODES:
        raise ConfigError(f"loss_agg_mode {name!r} exists already")
    _MODES[name] = mode


def make_aggregation_mode(
    loss_agg_mode: str,
    *,
    loss_scale_factor: float | None = None,
    count_empty_sequences: bool = True,
    count_padding_rows: bool = True,
    count_rejected_tokens: bool = True,
) -> AggregationMode:
    """The mode of that name with its arguments.

    Raises:
        ConfigError: Unknown name; a divisor missing, not positive, not finite or without use.
    """
    make = find_aggregation_mode(loss_agg_mode)
    try:
        mode = make(
            loss_scale_factor=loss_scale_factor,
            count_empty_sequences=count_empty_sequences,
            count_padding_rows=count_padding_rows,
            count_rejected_tokens=count_rejected_tokens,
        )
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"loss_agg_mode is {loss_agg_mode!r}, which makes no mode: {said}") from error
    if not isinstance(mode, AggregationMode):
        raise ConfigError(
            f"loss_agg_mode is {loss_agg_mode!r}, which makes a {type(mode).__name__}; expected an AggregationMode"
        )
    mode._check_scale_factor(loss_agg_mode)
    return mode


def aggregate_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    segment_ids: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    loss_scale_factor: float | None = None,
    count_empty_sequences: bool = True,
    **group_ids: Tensor,
) -> Ratio:
    """Aggregates token losses of one batch to a numerator and a denominator.

    Args:
        loss_mat: Token losses, floating point [rows, T], or a jagged nested tensor.
        loss_mask: Same shape (or jagged with the same lengths); non-zero counts.
        loss_agg_mode: A mode, see :func:`aggregation_mode_names`.
        segment_ids: Integers [rows, T] for packed rows, 0 is padding; without them a row is a sequence.
        prompt_ids: Integer ids of prompt groups for ``prompt-mean``: [rows], or [rows, T] when packed.
        trajectory_ids: Integer ids of trajectories for the modes of them, as ``prompt_ids``; without them a sequence is
            one.
        loss_scale_factor: Divisor of the modes that have a constant one.
        count_empty_sequences: Whether fully masked sequences, prompts and trajectories count in the denominator.
        **group_ids: Ids of the groups that a mode of your own counts, under the name that its count gives them.

    Returns:
        Numerator and denominator, 0-d tensors. Both add up over the pieces of a batch
        where the denominator is a count; that of ``token-sum`` and ``constant`` is 1.

    Raises:
        ConfigError: The mode or its divisor is not valid, or there are ids that it does not take.
        FieldShapeError: Shapes do not fit.

    Example:
        >>> import torch
        >>> losses = torch.tensor([[9., 2, 4, 6, 0], [8, 10, 0, 0, 0], [0, 0, 0, 0, 0]])
        >>> mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
        >>> segments = torch.tensor([[1, 1, 1, 2, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
        >>> aggregate_loss(losses, mask, "token-mean", segment_ids=segments).value().item()
        6.0
        >>> aggregate_loss(losses, mask, "seq-mean-token-mean", segment_ids=segments).value().item()
        6.0
    """
    mode = make_aggregation_mode(
        loss_agg_mode, loss_scale_factor=loss_scale_factor, count_empty_sequences=count_empty_sequences
    )
    check("count_empty_sequences", count_empty_sequences, BOOLEAN)
    check_tensor("loss_mat", loss_mat)
    check_tensor("loss_mask", loss_mask)
    if loss_mat.is_complex():
        raise FieldShapeError(f"loss_mat has dtype {loss_mat.dtype}; expected real numbers")
    if loss_mat.is_nested:
        if not loss_mask.is_nested or segment_ids is not None:
            raise FieldShapeError("loss_mat is jagged; loss_mask must be jagged too, segment_ids None")
        # Both keep the graph of the losses, which a contiguous copy of a narrowed tensor does not.
        narrowed = cast(Any, loss_mat).lengths() is not None
        losses = torch.cat(loss_mat.unbind()) if narrowed else loss_mat.values()
    else:
        if loss_mat.shape != loss_mask.shape:
            raise FieldShapeError(
                f"loss_mask has shape {list(loss_mask.shape)}; expected that of loss_mat, {list(loss_mat.shape)}"
            )
        losses = loss_mat.reshape(-1)
    tokens = ResponseTokens.of(loss_mask, segment_ids)
    if losses.shape != tokens.mask.shape:
        raise FieldShapeError(f"loss_mat holds {losses.numel()} tokens, loss_mask {tokens.size}")
    count = None if mode.total is None else find_count(mode.total)
    taken = count.ids if isinstance(count, GroupCount) else None
    if unknown := sorted(group_ids.keys() - {taken}):
        raise ConfigError(f"there are {unknown[0]}, which loss_agg_mode {loss_agg_mode!r} does not take")
    if isinstance(count, GroupCount):
        ids = {"prompt_ids": prompt_ids, "trajectory_ids": trajectory_ids, **group_ids}.get(count.ids)
        if ids is None and count.told_by:
            ids = tokens.sequence if segment_ids is not None else torch.arange(tokens.num_slots, device=losses.device)
        if ids is not None:
            ids = flat_ids(count.ids, ids, tokens)
            if tokens.offsets is None and bool(tokens.differ_within(ids)):
                raise FieldShapeError(f"{count.ids} differs within a segment; expected one id for all of its tokens")
            groups = tokens.group_by(ids, count_empty=count_empty_sequences)
            tokens = replace(tokens, groups={count.name: groups})
    dtype = torch.promote_types(losses.dtype, torch.float32)
    selected = tokens.select(losses).to(dtype)
    return Ratio(mode.numerator(selected, tokens), mode.local_count(tokens).to(torch.float64))


def flat_ids(name: str, ids: Tensor, tokens: ResponseTokens) -> Tensor:
    """Ids of groups, one per row, or one per token of packed rows.

    Raises:
        FieldShapeError: There are others, or they are no integers.
    """
    check_tensor(name, ids)
    packed = tokens.offsets is None
    expected = tokens.size if packed else tokens.num_slots
    if ids.numel() != expected:
        raise FieldShapeError(
            f"{name} has shape {list(ids.shape)}; expected one id per {'token' if packed else 'row'}, {expected} in all"
        )
    if ids.is_floating_point():
        raise FieldShapeError(f"{name} has dtype {ids.dtype}; expected integers")
    return ids.reshape(-1)
