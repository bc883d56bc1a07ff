"""What the model gave and what the loss made of it in one pass of an audit, row by row."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from trinity_loss.jagged import jagged_parts, stored_values
from trinity_loss.recorder import Recorder
from trinity_loss.verl.choice import config_of
from trinity_loss.verl.shadow import loss_gradients

_OF_MODEL = ("log_probs", "entropy")
#: Of one row: values per token by name, and whether the row stood first in its micro-batch.
Row = tuple[dict[str, Tensor], bool]


@dataclass
class Observer:
    """Stands in the loss's place in one pass, and keeps per row what the model gave and what the loss made of it.

    Attributes:
        loss_fn: The loss.
        plain: Only the loss is called, as in training.
        record: So many tokens are recorded, and the rest of their micro-batch.
        recorder: Keeps what the loss looks at.
        recorded: Tokens, so far.
        rows: By number of the row.
        micro_batches: So far.
        error: The first that was raised behind the model; the engine is given a loss of zero then, so that this rank
            goes through the same collectives as the others.
    """

    loss_fn: Callable[..., Any]
    plain: bool = False
    record: int = 0
    recorder: Recorder = field(init=False)
    recorded: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    micro_batches: int = 0
    error: Exception | None = None

    def __post_init__(self) -> None:
        config = config_of(self.loss_fn)
        named = () if config is None else (config.row_weights, config.policy_loss.fields)
        self.recorder = Recorder(sys.maxsize, *named)

    def __call__(self, *, data: Any, model_output: Any = None, dp_group: Any = None, **named: Any) -> Any:
        if model_output is None or self.plain:  # A loss that distils is asked for a divergence of the logits before.
            given = {} if model_output is None else {"model_output": model_output, "dp_group": dp_group}
            return self.loss_fn(data=data, **given, **named)
        self.micro_batches += 1
        try:
            if self.error is None:
                if self.recorded < self.record:
                    self._record(model_output, data)
                self._keep(model_output, data, dp_group)
                return self.loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        except Exception as error:
            self.error = error
        outputs = [value for value in model_output.values() if isinstance(value, Tensor) and value.requires_grad]
        sums = [(stored_values(value) if value.is_nested else value).sum() for value in outputs]
        return torch.stack(sums).sum() * 0.0, {}

    def _record(self, model_output: Any, data: Any) -> None:
        try:
            self.recorded += int(jagged_parts(model_output["log_probs"])[1][-1])
            self.recorder.add(model_output, data)
        except Exception:  # Fields that nobody knows how to lay out again: then the loss is not tried by itself.
            self.recorder, self.record = Recorder(0), 0

    def _keep(self, model_output: Any, data: Any, dp_group: Any) -> None:
        gradients, _, _ = loss_gradients(self.loss_fn, model_output, data, dp_group)
        given = {name: model_output[name] for name in (*gradients, "entropy") if model_output.get(name) is not None}
        # Where the model is trained by a teacher alone, its divergence stands where log-probs would.
        by_name = {
            "log_probs" if "log_probs" not in given and name in gradients else name: given[name] for name in given
        }
        offsets = jagged_parts(by_name["log_probs"])[1].tolist()
        values = {name: [jagged_parts(value)[0].detach()] for name, value in by_name.items() if name in _OF_MODEL}
        values["loss gradient"] = list(gradients.values())
        on_host = {name: [part.to("cpu", torch.float64) for part in parts] for name, parts in values.items()}
        for place, row in enumerate(data["audit_row"].tolist()):
            # The last place predicts the first token of whatever comes after the row.
            part = slice(offsets[place], offsets[place + 1] - 1)
            kept = {name: torch.cat([whole[part] for whole in parts]) for name, parts in on_host.items()}
            self.rows[row] = (kept, place == 0)


@contextmanager
def outputs_observed(engine: Any, observer: Observer) -> Iterator[None]:
    """Within, what fails in FSDP between the model and the loss fails the pass, and not the collectives of backward.

    There the logits become log-probs and entropies, which is where memory ends first. Where ranks share a sequence
    (Ulysses), and in Megatron, ranks wait for each other there, so that nothing can be done.
    """
    if engine.engine_config.strategy not in ("fsdp", "fsdp2") or engine.ulysses_sequence_parallel_size > 1:
        yield
        return
    original = engine.prepare_model_outputs

    def prepare_model_outputs(*, output: Any, micro_batch: Any, **named: Any) -> Any:
        try:
            return original(output=output, micro_batch=micro_batch, **named)
        except Exception as error:
            observer.error = observer.error or error
        return _zeros(output, micro_batch)  # The memory of what failed is free by now.

    with mock.patch.object(engine, "prepare_model_outputs", prepare_model_outputs):
        yield


def _zeros(output: Any, micro_batch: Any) -> dict[str, Tensor]:
    """Log-probs and entropies of zero that hang on all that the model gave."""
    given = [value for value in (output.get("logits"), output.get("log_probs")) if isinstance(value, Tensor)]
    offsets = micro_batch["input_ids"].offsets()
    nothing = given[0].new_zeros(int(offsets[-1])) + given[0].flatten()[0] * 0.0
    return {n: torch.nested.nested_tensor_from_jagged(nothing, offsets=offsets) for n in ("log_probs", "entropy")}
