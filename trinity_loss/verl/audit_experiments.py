"""Passes of an audit that are made only where the others differ, to tell why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trinity_loss.verl.audit_passes import Pass


@dataclass(frozen=True)
class Experiment:
    """What differs from the passes before.

    Attributes:
        first: A pass as configured.
        second: The cut that was far off, to be compared with ``first``; None: that is compared with what was before.
        options: What Megatron's model is asked for meanwhile.
    """

    first: Pass
    second: Pass | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def made_with(self, transformer: Any) -> Iterator[None]:
        """Within, Megatron's configuration of the model has the options."""
        before = {name: getattr(transformer, name) for name in self.options}
        try:
            for name, value in self.options.items():
                setattr(transformer, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(transformer, name, value)


def experiment(
    runs: Sequence[dict[str, Any]], first: Pass, tolerance: float, transformer: Any = None
) -> Experiment | None:
    """What tells why the passes differ: whether what is random does it, the capacity of experts, a router's loss.

    Args:
        runs: What was found, the mini-batch as configured before all others.
        first: That pass.
        tolerance: Largest relative deviation that is rounding.
        transformer: Megatron's configuration of the model, where there is one.
    """
    repeated = next((run for run in runs if run["name"] == "repeat"), None)
    if repeated is not None and error_of(repeated, "log_probs") > tolerance:
        return Experiment(Pass("same random numbers", first.dynamic, first.size))
    far = max(runs, key=lambda run: error_of(run, "log_probs"))
    if error_of(far, "log_probs") > tolerance / 10:
        return _without("expert capacity", {"moe_expert_capacity_factor": None}, far, first, transformer)
    far = max(runs, key=lambda run: error_of(run, "all"))
    if error_of(far, "all") > tolerance:
        none = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}
        return _without("router loss", none, far, first, transformer)
    return None


def error_of(run: dict[str, Any], name: str) -> float:
    """Relative deviation of a pass: of the gradient (``all``), or of what the model or the loss gave by its name."""
    found = run["gradient" if name == "all" else "tokens"].get(name)
    return 0.0 if found is None else math.inf if math.isnan(found["error"]) else float(found["error"])


def _without(
    what: str, options: Mapping[str, Any], far: dict[str, Any], first: Pass, transformer: Any
) -> Experiment | None:
    asked = {name: getattr(transformer, name, None) for name in options}
    none = {name: _like(value, options[name]) for name, value in asked.items() if value is not None and np.any(value)}
    if not none:
        return None
    again = Pass(f"{far['name']}, no {what}", far["dynamic"], far["size"], far["name"] == "reverse")
    return Experiment(Pass(f"no {what}", first.dynamic, first.size), again, none)


def _like(value: Any, other: Any) -> Any:
    return [other] * len(value) if isinstance(value, Sequence) else other
