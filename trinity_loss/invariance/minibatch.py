"""A mini-batch as flat sequences: drawn (:mod:`trinity_loss.invariance.draw`), or recorded in a run.

One representation, whatever layout a loss will see: tensors over the response tokens of all sequences, one
sequence after the other. :mod:`trinity_loss.invariance.layouts` builds an engine's micro-batches from it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity_loss.errors import ConfigError, FieldShapeError, MissingFieldError
from trinity_loss.tokens import ResponseTokens
from trinity_loss.totals import Rows, count_names, count_rows

#: ``cut[r][k]`` lists the sequences of micro-batch k on rank r.
Ranks = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Everything a loss may look at, for S sequences with N response tokens in all.

    Attributes:
        prompt_lengths: int64 [S], at least 1 each.
        response_lengths: int64 [S].
        response_mask: [N], non-zero counts.
        log_probs: [N], the policy's log-probabilities.
        entropy: [N], or None where the engine computed none.
        token_fields: Fields [N] by verl's names: ``advantages``, ``old_log_probs``, ``ref_log_prob``, …
        sequence_fields: Fields [S] or [S, …], one entry per sequence.
        loss_mask: [N], what ``batch_num_tokens`` counts where that is not ``response_mask`` (rejection).
        uids: Names of the prompts, one per sequence; None: every sequence has a prompt of its own.
        totals: What a recorded run said of its mini-batch, by the names of
            :func:`trinity_loss.totals.count_names`; what is missing is counted.
        cut: How the recorded run cut it: per rank, per micro-batch, the numbers of the sequences.
        group_size: So many consecutive sequences stay together in every cut (verl's ``force_group_size``).
        input_ids: int64 [M], prompt and response of each sequence in turn, for a model to read; None: ones.
        constants: Further fields, the same for all micro-batches.
        count_empty_sequences: Whether a prompt without any token that counts is a prompt.
        count_padding_rows: Whether a prompt of synthetic rows is a prompt.

    Example:
        >>> batch = MiniBatch(
        ...     prompt_lengths=torch.tensor([2, 1]),
        ...     response_lengths=torch.tensor([3, 1]),
        ...     response_mask=torch.tensor([1, 0, 1, 1]),
        ...     log_probs=torch.tensor([-0.1, -0.2, -0.3, -0.4]),
        ... )
        >>> batch.num_sequences, batch.valid_counts, batch.counted_totals["batch_num_tokens"]
        (2, [2, 1], 3)
        >>> restored = MiniBatch.from_dict(batch.to_dict())
        >>> bool((restored.log_probs == batch.log_probs).all())
        True
    """

    prompt_lengths: Tensor
    response_lengths: Tensor
    response_mask: Tensor
    log_probs: Tensor
    entropy: Tensor | None = None
    token_fields: Mapping[str, Tensor] = field(default_factory=dict)
    sequence_fields: Mapping[str, Tensor] = field(default_factory=dict)
    loss_mask: Tensor | None = None
    uids: Sequence[str] | None = None
    totals: Mapping[str, int] = field(default_factory=dict)
    cut: Ranks | None = None
    group_size: int = 1
    input_ids: Tensor | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    count_empty_sequences: bool = True
    count_padding_rows: bool = True

    def __post_init__(self) -> None:
        sequences, tokens = self.num_sequences, int(self.response_lengths.sum())
        everything = tokens + int(self.prompt_lengths.sum())
        masks = {"response_mask": self.response_mask, "loss_mask": self.loss_mask}
        for expected, size, values in (
            (f"one per token, [{tokens}]", tokens, masks | self._of_tokens),
            (f"prompts and responses, [{everything}]", everything, {"input_ids": self.input_ids}),
            (f"one per sequence, [{sequences}]", sequences, {"prompt_lengths": self.prompt_lengths}),
        ):
            for name, value in values.items():
                if value is not None and value.shape != (size,):
                    raise FieldShapeError(f"{name} has shape {list(value.shape)}; expected {expected}")
        for name, value in self.sequence_fields.items():
            if value.shape[:1] != (sequences,):
                raise FieldShapeError(f"{name} has shape {list(value.shape)}; expected one per sequence, [{sequences}]")
        if self.uids is not None and len(self.uids) != sequences:
            raise FieldShapeError(f"uids has {len(self.uids)} entries; expected one per sequence, {sequences}")
        if sequences == 0 or int(self.prompt_lengths.min()) < 1:
            raise FieldShapeError(
                "a mini-batch needs a sequence, and every sequence a prompt token before its response"
            )
        if self.group_size < 1 or sequences % self.group_size:
            raise FieldShapeError(f"group_size is {self.group_size}; expected a divisor of {sequences} sequences")
        if self.cut is not None:
            if sorted(i for rank in self.cut for rows in rank for i in rows) != list(range(sequences)):
                raise FieldShapeError(f"cut does not name each of the {sequences} sequences once")
            object.__setattr__(self, "cut", tuple(tuple(tuple(rows) for rows in rank) for rank in self.cut))

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.response_lengths.numel()

    @property
    def num_tokens(self) -> int:
        """N, counted or not."""
        return self.response_mask.numel()

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """The sequences that stay together, in order; one each where nothing has to."""
        size = self.group_size
        return [tuple(range(first, first + size)) for first in range(0, self.num_sequences, size)]

    @cached_property
    def starts(self) -> list[int]:
        """Where the tokens of each sequence start, S + 1 entries."""
        return [0, *accumulate(self.response_lengths.tolist())]

    @cached_property
    def valid_counts(self) -> list[int]:
        """Tokens that count, per sequence."""
        counted = (self.response_mask != 0).tolist()
        return [sum(counted[a:b]) for a, b in pairwise(self.starts)]

    @cached_property
    def _counted(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        uids = self.uids or [str(i) for i in range(self.num_sequences)]
        offsets = torch.tensor(self.starts)
        tokens = ResponseTokens.from_jagged(self.response_mask, offsets)
        per_token = {
            name: torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
            for name, values in self.token_fields.items()
        }
        data = {**per_token, **self.sequence_fields, "loss_mask": self.loss_mask, "uid": list(uids)}
        return count_rows(Rows(tokens, data, self.count_empty_sequences, self.count_padding_rows))

    @property
    def counts_per_sequence(self) -> dict[str, Tensor]:
        """Fields int64 [S] that our training worker attaches, such as ``prompt_num_tokens``; recorded, or counted."""
        counted = self._counted[1]
        return {name: self.sequence_fields.get(name, values) for name, values in counted.items()}

    @property
    def prompt_num_tokens(self) -> Tensor:
        """int64 [S]: tokens that count in the prompt group of each sequence."""
        return self.counts_per_sequence["prompt_num_tokens"]

    @property
    def counted_totals(self) -> dict[str, int]:
        """What an engine, its trainer and our training worker count of this mini-batch."""
        return self._counted[0]

    @property
    def all_totals(self) -> dict[str, int]:
        """The recorded totals, and those counted here where none was recorded; ``dp_size`` is the cut's."""
        return {k: v for k, v in (self.counted_totals | dict(self.totals)).items() if k != "dp_size"}

    def with_fields(self, **changed: Tensor) -> MiniBatch:
        """The same sequences with other token fields."""
        return replace(self, token_fields={**self.token_fields, **changed})

    def without_policy_gradient(self) -> MiniBatch:
        """The same sequences with nothing to gain: advantages 0, the old policy equal to the current one."""
        zero = torch.zeros_like(self.log_probs)
        calm = {"advantages": zero, "old_log_probs": self.log_probs.detach().clone()}
        return self.with_fields(**{name: value for name, value in calm.items() if name in self.token_fields})

    @property
    def _of_tokens(self) -> dict[str, Tensor]:
        """All that is given per token, masks apart."""
        named = {"log_probs": self.log_probs, "entropy": self.entropy, **self.token_fields}
        return {name: values for name, values in named.items() if values is not None}

    def _with(self, of_tokens: dict[str, Tensor], **others: Any) -> MiniBatch:
        """With other values of :attr:`_of_tokens`, and other attributes."""
        parts: dict[str, Any] = {name: of_tokens.pop(name, None) for name in ("log_probs", "entropy")}
        return replace(self, token_fields=of_tokens, **parts | others)

    def with_masked_tokens_at(self, number: float, *names: str) -> MiniBatch:
        """That number wherever the mask is 0, in the fields named (``log_probs``, ``entropy`` or a token field),
        or in all."""
        chosen = {n: v for n, v in self._of_tokens.items() if v.is_floating_point() and (not names or n in names)}
        poisoned = {name: values.masked_fill(self.response_mask == 0, number) for name, values in chosen.items()}
        return self._with(self._of_tokens | poisoned)

    def with_other_content(self, scale: float, *rows: int) -> MiniBatch:
        """Values times ``scale`` in these sequences, in every field of numbers; masks and lengths stay. Below 0,
        the advantages alone, and all of them to one side: what is chosen among others is then chosen no more."""
        here = torch.zeros(self.num_tokens, dtype=torch.bool)
        for i in rows:
            here[self.starts[i] : self.starts[i + 1]] = True
        if scale < 0:
            old = self.token_fields.get("advantages", torch.zeros_like(self.log_probs))
            return self.with_fields(advantages=torch.where(here, -scale * old.abs(), old))
        numbers = {name: values for name, values in self._of_tokens.items() if values.is_floating_point()}
        # On the same side of 0: log-probs stay negative, weights positive.
        other = {name: torch.where(here, scale * v + 0.2 * v.sign(), v) for name, v in numbers.items()}
        return self._with(self._of_tokens | other)

    def with_masked_sequences(self, *lengths: int) -> MiniBatch:
        """Appends fully masked sequences of these lengths, copies of the first tokens; the totals stay."""
        donors = [torch.arange(length) % self.num_tokens for length in lengths]
        index = torch.cat([torch.arange(self.num_tokens), *donors])
        rows = [*range(self.num_sequences), *(0 for _ in lengths)]
        uids = self.uids or [str(i) for i in range(self.num_sequences)]
        return self.picked(
            torch.cat([self.response_lengths, torch.tensor(lengths, dtype=torch.int64)]),
            index,
            rows,
            response_mask=self.response_mask[index].index_fill(0, torch.arange(self.num_tokens, len(index)), 0),
            loss_mask=None,
            uids=[uids[i] for i in rows],
            totals=self.all_totals,
        )

    def picked(self, lengths: Tensor, tokens: Tensor, rows: list[int], **others: Any) -> MiniBatch:
        """Sequences of tokens of this mini-batch, without cut and input ids.

        Args:
            lengths: int64 [S'], of the responses.
            tokens: int64 [N'], which ones, one sequence after the other.
            rows: [S'], which sequence has its prompt and its fields.
            **others: Attributes that are others altogether.
        """
        others = {
            "prompt_lengths": self.prompt_lengths[rows],
            "response_lengths": lengths,
            "response_mask": self.response_mask[tokens],
            "sequence_fields": {name: values[rows] for name, values in self.sequence_fields.items()},
            "loss_mask": None if self.loss_mask is None else self.loss_mask[tokens],
            "uids": None if self.uids is None else [self.uids[i] for i in rows],
            **dict.fromkeys(("cut", "input_ids")),
            **others,
        }
        return self._with({name: values[tokens] for name, values in self._of_tokens.items()}, **others)

    def to(self, dtype: torch.dtype) -> MiniBatch:
        """The same mini-batch with its floating-point tensors in another type."""

        def cast(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: v.to(dtype) if v.is_floating_point() else v for name, v in fields.items()}

        everything = [*self._of_tokens.values(), *self.sequence_fields.values()]
        if all(values.dtype == dtype for values in everything if values.is_floating_point()):
            return self
        return self._with(cast(self._of_tokens), sequence_fields=cast(self.sequence_fields))

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, one key per attribute: what ``torch.save`` writes for ``--batch``."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["cut"] = None if self.cut is None else [[list(rows) for rows in rank] for rank in self.cut]
        plain["uids"] = None if self.uids is None else list(self.uids)
        return plain | {name: dict(plain[name]) for name in ("token_fields", "sequence_fields", "totals", "constants")}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> MiniBatch:
        """The mini-batch that :meth:`to_dict` wrote.

        Raises:
            MissingFieldError: A key that every mini-batch has is missing, or one is unknown.
            FieldShapeError: A tensor does not fit the others.
        """
        known = {f.name for f in fields(cls)}
        missing = {"prompt_lengths", "response_lengths", "response_mask", "log_probs"} - set(plain)
        unknown = set(plain) - known
        if missing or unknown:
            wrong = f"lacks {', '.join(sorted(missing))}" if missing else f"has {', '.join(sorted(map(str, unknown)))}"
            raise MissingFieldError(f"a recorded mini-batch {wrong}; it may have {', '.join(sorted(known))}")
        unknown = set(plain.get("totals") or {}) - {"dp_size", *count_names()}
        if unknown:
            raise MissingFieldError(f"the totals of a recorded mini-batch have {', '.join(sorted(unknown))}")
        return cls(**plain)


def load_mini_batch(path: str) -> MiniBatch:
    """Reads a file that ``torch.save(batch.to_dict(), path)`` wrote; nothing in it is executed.

    Raises:
        ConfigError: The file is damaged.
        MissingFieldError: It holds something else.
        OSError: It cannot be read.
    """
    return MiniBatch.from_dict(load_plain(path))


def load_plain(path: str | Path) -> dict[str, Any]:
    """The dictionary in a file, as :func:`load_mini_batch` reads it."""
    try:
        plain = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        said = str(error).partition(". ")[0]
        raise ConfigError(f"{path} cannot be read: {said}; expected what torch.save of plain data wrote") from error
    if not isinstance(plain, Mapping):
        kind = type(plain).__name__
        raise MissingFieldError(f"{path} holds a {kind}; expected the dictionary of MiniBatch.to_dict()")
    return dict(plain)
