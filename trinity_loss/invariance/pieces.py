"""A micro-batch of verl's engines, taken apart for a loss that was written for another framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

#: Label of every response token in the two-token vocabulary of :attr:`Piece.logits`.
LABEL = 1

#: Fields of tokens that are no numbers per response token.
_OF_THE_TEXT = ("input_ids", "position_ids", "prompts", "responses", "attention_mask")


class Piece:
    """The response tokens of some sequences, and what the engine counted of the mini-batch.

    Args:
        model_output: Of the engine, jagged over prompt and response.
        data: The micro-batch, nested or padded.

    Attributes:
        lengths: Response tokens of each sequence.
        prompts: Prompt tokens of each sequence.
        sizes: Tokens of each sequence, int64 [rows].
        width: Columns of a rectangle: the longest response here, or as the padded layout has it.
        totals: ``batch_num_tokens``, ``global_batch_size``, ``dp_size`` and what else is known of the mini-batch.

    Example:
        >>> from trinity_loss.invariance import build, make_mini_batch
        >>> batch = make_mini_batch(8)
        >>> micro = build(batch, [0, 3], "nested")
        >>> piece = Piece(micro.model_output(batch.log_probs), micro.with_totals({"dp_size": 2}))
        >>> [len(row) for row in piece.rows("advantages")] == piece.lengths, piece.rectangle("log_probs").shape[0]
        (True, 2)
    """

    def __init__(self, model_output: Mapping[str, Tensor], data: Any) -> None:
        self._model, self._data, self._names = model_output, data, tuple(data.keys())
        prompts, responses = data["prompts"], data["responses"]
        if prompts.is_nested:
            self.prompts: list[int] = prompts.offsets().diff().tolist()
            self.lengths: list[int] = responses.offsets().diff().tolist()
            self.width = max(self.lengths)
        else:
            real = data["attention_mask"].split([prompts.shape[1], responses.shape[1]], dim=1)
            self.prompts, self.lengths = (part.sum(1).tolist() for part in real)
            self.width = responses.shape[1]
        self.sizes = torch.tensor(self.prompts) + torch.tensor(self.lengths)
        self.totals = {name: value for name in self._names if isinstance(value := data[name], int | float)}

    @cached_property
    def names(self) -> list[str]:
        """Fields of response tokens, those of the model output among them."""
        mask = self._data["response_mask"]
        found = [n for n in self._names if n not in _OF_THE_TEXT and isinstance(self._data[n], Tensor)]
        same = [n for n in found if self._data[n].is_nested or self._data[n].shape == mask.shape]
        return [*self._model, *same]

    def has(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self._model or name in self._names

    def rows(self, name: str) -> list[Tensor]:
        """A field, [length] per sequence."""
        if name in self._model:
            jagged: Any = self._model[name]
            values, starts = jagged.values(), jagged.offsets().tolist()
            return [
                values[start + prompt - 1 : start + prompt - 1 + length]
                for (start, _), prompt, length in zip(pairwise(starts), self.prompts, self.lengths, strict=True)
            ]
        value = self._data[name]
        return [row[:length] for row, length in zip(value.unbind(), self.lengths, strict=True)]

    def rectangle(self, name: str, after: Callable[[int], int] = lambda _: 0, width: int | None = None) -> Tensor:
        """A field [rows, width], 0 where there is no response token.

        Args:
            name: The field.
            after: From the prompt's length to the column of the first response token.
            width: Columns; None: :attr:`width`.
        """
        width = self.width if width is None else width
        padded = []
        for row, prompt in zip(self.rows(name), self.prompts, strict=True):
            left = after(prompt)
            padded.append(torch.nn.functional.pad(row, (left, width - left - len(row))))
        return torch.stack(padded)

    def packed(self, name: str) -> Tensor:
        """A field [tokens, prompts included], each value where the model predicts its token, 0 elsewhere."""
        pad = torch.nn.functional.pad
        return torch.cat([pad(row, (p - 1, 1)) for row, p in zip(self.rows(name), self.prompts, strict=True)])

    @property
    def real(self) -> Tensor:
        """int64 [rows, width]: 1 where a response token is, whether it counts or not."""
        return (torch.arange(self.width) < torch.tensor(self.lengths)[:, None]).long()

    @property
    def logits(self) -> Tensor:
        """[tokens, prompts included, 2]: of a vocabulary of two, that give :data:`LABEL` its log-probability."""
        log_probs = torch.where(self.packed("log_probs") < 0, self.packed("log_probs"), -1.0)
        return torch.stack([torch.log(-torch.expm1(log_probs)), log_probs], dim=-1)

    @property
    def nothing(self) -> Tensor:
        """0-d, 0 with a graph to the model."""
        return self._model["log_probs"].values().nan_to_num().sum() * 0.0
