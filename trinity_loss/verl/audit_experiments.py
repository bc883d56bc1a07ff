"""Passes of an audit that are made only where the others differ, to tell why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from trinity_loss.verl.audit_passes import Pass
from trinity_loss.verl.gradients import noise, off


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

    def made_with(self, transformer: Any) -> AbstractContextManager[Any]:
        """Within, Megatron's configuration of the model has the options."""
        return mock.patch.multiple(transformer, **self.options) if self.options else nullcontext()


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
    if noise(runs, "log_probs") > tolerance:
        return Experiment(Pass("same random numbers", first.dynamic, first.size))
    far = max(runs, key=lambda run: off(run, "log_probs"))
    if off(far, "log_probs") > tolerance / 10:
        return _without("expert capacity", {"moe_expert_capacity_factor": None}, far, first, transformer)
    far = max(runs, key=off)
    if off(far) > tolerance:
        none = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}
        return _without("router loss", none, far, first, transformer)
    return None


def _without(
    what: str, options: Mapping[str, Any], far: dict[str, Any], first: Pass, transformer: Any
) -> Experiment | None:
    asked = {name: getattr(transformer, name, None) for name in options}
    on = {name: value for name, value in asked.items() if value is not None and np.any(value)}
    none = {n: [options[n]] * len(v) if isinstance(v, Sequence) else options[n] for n, v in on.items()}
    if not none:
        return None
    again = Pass(f"{far['name']}, no {what}", far["dynamic"], far["size"], far["name"] == "reverse")
    return Experiment(Pass(f"no {what}", first.dynamic, first.size), again, none)
