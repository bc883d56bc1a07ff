"""The audit: the gradient of one mini-batch of a run, computed several times, each time cut in another way.

It takes no step of the optimizer and leaves weights, gradients, buffers and random states as it found them, so that
the run goes on as without it. What it found is explained by :mod:`trinity_loss.invariance.audit_report`.
"""

from __future__ import annotations

import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_torch_device
from verl.utils.metric import Metric, reduce_metrics

from trinity_loss.jagged import jagged_parts
from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.recorder import Recorder
from trinity_loss.verl.audit_passes import Pass, plan
from trinity_loss.verl.gradients import Comparison, Distance, gradient_shares
from trinity_loss.verl.kept_state import as_it_was, modules_of
from trinity_loss.verl.metric_reduction import reduce_over_ranks
from trinity_loss.verl.policy_options import AUDIT_CUTS
from trinity_loss.verl.shadow import loss_gradient

#: Largest relative deviation that is taken for rounding, by the type that the model computes in.
TOLERANCES = {"float32": 1e-4, "float64": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
_SECONDS = 300  # That a rank waits for the others.
_RECORDED_TOKENS = 2**17  # Of the mini-batch, that the loss is tried on again.


@dataclass(frozen=True)
class AuditSettings:
    """What the configuration says of the audit.

    Attributes:
        steps: Training steps, as verl logs them.
        folder: Where the reports go.
        cuts: Of :data:`AUDIT_CUTS`.
    """

    steps: frozenset[int]
    folder: Path
    cuts: tuple[str, ...] = AUDIT_CUTS


class EngineFailed(RuntimeError):
    """The engine failed in a pass, and training cannot go on from there: the run has to end.

    One rank alone failed, and the others wait for it where it can no longer go; or what was left behind in the engine
    changes the gradient of the next pass.
    """


@dataclass
class Observer:
    """Stands in the loss's place in one pass, and keeps per row what the model gave and what the loss made of it.

    Attributes:
        loss_fn: The loss.
        record: So many tokens are recorded, and the rest of their micro-batch.
        recorder: Keeps what the loss looks at.
        recorded: Tokens, so far.
        rows: By number of the row: values per token by name, and whether the row stood first in its micro-batch.
        micro_batches: So far.
        error: The first that the loss raised; the engine is given a loss of zero then, so that no rank waits.
    """

    loss_fn: Callable[..., Any]
    record: int = 0
    recorder: Recorder = field(default_factory=lambda: Recorder(sys.maxsize))
    recorded: int = 0
    rows: dict[int, tuple[dict[str, Tensor], bool]] = field(default_factory=dict)
    micro_batches: int = 0
    error: Exception | None = None

    def __call__(self, *, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        self.micro_batches += 1
        try:
            if self.recorded < self.record:
                self._record(model_output, data)
            self._keep(model_output, data, dp_group)
            return self.loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        except Exception as error:
            self.error = self.error or error
            return model_output["log_probs"].values().sum() * 0.0, {}

    def _record(self, model_output: Any, data: Any) -> None:
        self.recorded += int(jagged_parts(model_output["log_probs"])[1][-1])
        try:
            self.recorder.add(model_output, data)
        except Exception:  # Fields that nobody knows how to lay out again: then the loss is not tried by itself.
            self.recorder, self.record = Recorder(0), 0

    def _keep(self, model_output: Any, data: Any, dp_group: Any) -> None:
        _, offsets = jagged_parts(model_output["log_probs"])
        values = {"loss gradient": loss_gradient(self.loss_fn, model_output, data, dp_group)[0]}
        for name in ("log_probs", "entropy"):
            if model_output.get(name, None) is not None:
                values[name] = jagged_parts(model_output[name])[0].detach()
        values = {name: value.to("cpu", torch.float64) for name, value in values.items()}
        bounds = offsets.tolist()
        for place, row in enumerate(data["audit_row"].tolist()):
            # The last place predicts the first token of whatever comes after the row.
            part = slice(bounds[place], bounds[place + 1] - 1)
            self.rows[row] = ({name: value[part] for name, value in values.items()}, place == 0)


def audit(worker: Any, data: TensorDict, settings: AuditSettings, step: int, group_size: int = 1) -> dict[str, float]:
    """Audits a mini-batch before it is trained on; every rank of the worker must call this.

    Args:
        worker: A training worker of verl.
        data: The mini-batch as ``train_batch`` is given it, the totals of the mini-batch attached; it is not changed.
        settings: What the configuration says.
        step: The training step.
        group_size: So many consecutive rows stay together where the loss is tried by itself, as pairs do.

    Returns:
        The ``audit/…`` metrics, the same on every rank; empty, with a warning, where the audit itself failed.

    Raises:
        EngineFailed: Training could not go on from where the engine failed.
    """
    group = None
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SECONDS))
        keep = tu.get(data, "disable_auto_offload", default=False)
        with as_it_was(worker.engine) as rewind, worker.engine.train_mode(disable_auto_offload=keep):
            return _Audit(worker, data, settings, step, group_size, group, rewind).run()
    except EngineFailed:
        raise
    except Exception as error:
        warnings.warn(f"audit of step {step} left out, training goes on: {said(error)}", stacklevel=2)
        return {}
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def said(error: BaseException) -> str:
    """An error in one line, without the folders of this machine."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(/[\w.\-]+)+/", "", text)[:200]


class _Audit:
    """One audit on one rank. What decides how it goes on is the same on every rank."""

    def __init__(
        self,
        worker: Any,
        data: TensorDict,
        settings: AuditSettings,
        step: int,
        group_size: int,
        group: Any,
        rewind: Callable[[], None],
    ) -> None:
        self.worker, self.engine, self.data, self.settings = worker, worker.engine, data, settings
        self.step, self.group_size, self.group, self.rewind = step, group_size, group, rewind
        self.loss_fn = getattr(worker.loss_fn, "verl_loss", worker.loss_fn)
        self.recorder = Recorder(sys.maxsize)
        self.shares = gradient_shares(self.engine, group)
        self.reference: list[Tensor] = []
        self.reference_rows: dict[int, tuple[dict[str, Tensor], bool]] = {}
        names = sorted({share.group for share in self.shares})
        self.groups = sorted(set(chain.from_iterable(self._gather(names))))
        self.runs: list[dict[str, Any]] = []
        self.left_out: list[tuple[str, str]] = []
        dtype = getattr(self.engine, "_autocast_dtype", None) or getattr(self.engine, "param_dtype", torch.float32)
        self.dtype = str(dtype).removeprefix("torch.")
        self.tolerance = TOLERANCES.get(self.dtype, 2e-2)

    def run(self) -> dict[str, float]:
        started = time.perf_counter()
        needed = self._check_memory()
        first, passes, self.left_out = plan(self.data, self.worker, self.settings.cuts, self._gather)
        if dist.get_rank() == 0:
            print(
                f"trinity_loss: audit of step {self.step}: {1 + len(passes)} passes over the first mini-batch, "
                f"{needed / 2**20:.1f} MiB of host memory on each rank",
                flush=True,
            )
        self.first = first
        if not self._pass(first):
            raise RuntimeError(f"the mini-batch as configured: {self.left_out[-1][1]}")
        for one in passes:
            self._pass(one)
        self._experiment(first)
        return self._report(started, needed)

    def _gather(self, item: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, item, group=self.group)
        return everyone

    def _check_memory(self) -> int:
        """Bytes that the copy of this rank's gradient takes; an error where some rank's host does not have them."""
        needed = sum(share.elements for share in self.shares) * 4
        here = int(getattr(get_torch_device(), "device_count", lambda: 1)() or 1)
        lacking = [(n, a) for n, a in self._gather((needed * here, psutil.virtual_memory().available)) if n > 0.8 * a]
        if lacking:
            raise MemoryError(f"it takes {lacking[0][0]} bytes of host memory, {lacking[0][1]} are free")
        return needed

    def _pass(self, one: Pass, against: str = "") -> bool:
        """Makes a pass and compares it with the first; whether it came to an end on every rank.

        The first pass of all, and of an experiment that names one by ``against``, becomes what is compared with.
        """
        if not one.fresh:
            self.rewind()
        observer = Observer(self.loss_fn)
        if not self.runs:
            observer.record = _RECORDED_TOKENS // self.engine.get_data_parallel_size()
        gradients, tokens = Comparison(self.groups), Comparison(_TOKENS)
        output, error, of_engine, started = {}, None, False, time.perf_counter()
        try:
            self.engine.optimizer_zero_grad()
            output = self.engine.forward_backward_batch(one.cut(self.data, self.worker), observer, forward_only=False)
            get_torch_device().synchronize()
            seconds = time.perf_counter() - started
            error = observer.error
        except Exception as raised:
            error, of_engine, seconds = raised, True, 0.0
        try:
            if error is None:
                self._compare(observer, gradients, tokens)
        except Exception as raised:
            error = raised
        try:
            everyone = self._gather((said(error) if error else "", of_engine, observer.micro_batches))
        except RuntimeError:
            raise EngineFailed(
                f"audit of step {self.step}, {one.name}: {said(error) if error else 'no answer'}"
            ) from error
        failed = [text for text, _, _ in everyone if text]
        if failed:
            self.left_out.append((one.name, failed[0]))
            if any(engine for _, engine, _ in everyone) and one.name != _RECOVERY:
                self._recover(failed[0])
            return False
        loss, metrics = self._numbers(output)
        if not self.runs:
            self.recorder = observer.recorder
        self.runs.append(
            {"name": one.name, "against": against, "dynamic": one.dynamic, "size": one.size, "seconds": seconds,
             "micro_batches": max(count for _, _, count in everyone), "loss": loss, "metrics": metrics,
             "gradient": _plain(gradients.over_ranks(self.group)), "tokens": _plain(tokens.over_ranks(self.group))}
        )  # fmt: skip
        return True

    def _recover(self, text: str) -> None:
        """Passes as configured until one has the gradient of the first again: an engine may keep what it had summed."""
        again = replace(self.first, name=_RECOVERY)
        for _ in range(3 if self.runs else 0):
            if self._pass(again):
                off = _error(self.runs.pop(), "all")
                noise = max((_error(run, "all") for run in self.runs if run["name"] == "repeat"), default=0.0)
                if off <= max(self.tolerance, 3 * noise):
                    return
            else:
                self.left_out.pop()
        raise EngineFailed(f"audit of step {self.step}: {text}")

    def _compare(self, observer: Observer, gradients: Comparison, tokens: Comparison) -> None:
        """Adds this rank's sums; in the first pass the gradient is kept and compared with itself."""
        now = [share.read() for share in self.shares]
        if not self.reference:
            self.reference = [
                torch.zeros(share.elements) if part is None else part.detach().to("cpu", copy=True)
                for share, part in zip(self.shares, now, strict=True)
            ]
            self.reference_rows = observer.rows
        for share, kept, part in zip(self.shares, self.reference, now, strict=True):
            gradients.add(share.group, kept, torch.zeros_like(kept) if part is None else part, share.weight)
        if not self.engine.is_mp_src_rank_with_outputs():  # The same rows as another rank's.
            return
        for row, (values, first) in observer.rows.items():
            kept_values, kept_first = self.reference_rows[row]
            for name, value in values.items():
                tokens.add(name, kept_values[name], value)
            place = "first in a row" if first and kept_first else "behind others"
            tokens.add(place, kept_values["log_probs"], values["log_probs"])

    def _numbers(self, output: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Loss and metrics as verl's log has them; those of the ranks that have any."""
        mine: tuple[float, dict[str, float]] | None = None
        with suppress(Exception):
            mine = self._reduced(output)
        return next((found for found in self._gather(mine) if found is not None), (math.nan, {}))

    def _reduced(self, output: dict[str, Any]) -> tuple[float, dict[str, float]] | None:
        if self.engine.is_mp_src_rank_with_outputs():
            output.pop("model_output", None)
            timing = {"global_token_num": None, "delta_time": 1.0, "forward_only": False, "images_seqlens": None}
            reduced = tu.get(self.worker._postprocess_output(output, **timing), "metrics")
            if isinstance(self.loss_fn, EnginePolicyLoss):
                reduce_over_ranks(reduced)
            numbers = reduce_metrics({k: _flat(v) for k, v in reduced.items() if not k.startswith("perf/")})
            return float(numbers.pop("loss")), {name: float(number) for name, number in numbers.items()}
        return None

    def _experiment(self, first: Pass) -> None:
        """Passes that are made only where the others differ, to tell why."""
        repeated = next((run for run in self.runs if run["name"] == "repeat"), None)
        if repeated is not None and _error(repeated, "log_probs") > self.tolerance:
            self._pass(Pass("same random numbers", first.dynamic, first.size))
            return
        worst = max(self.runs, key=lambda run: _error(run, "all"))
        transformer = getattr(self.engine, "tf_config", None)
        coefficients = {n: getattr(transformer, n, None) for n in ("moe_aux_loss_coeff", "moe_z_loss_coeff")}
        coefficients = {name: value for name, value in coefficients.items() if value and np.any(value)}
        if _error(worst, "all") <= self.tolerance or _error(worst, "log_probs") > self.tolerance or not coefficients:
            return
        again = Pass(f"{worst['name']}, no router loss", worst["dynamic"], worst["size"], worst["name"] == "reverse")
        try:
            for name, value in coefficients.items():
                setattr(transformer, name, [0.0] * len(value) if isinstance(value, Sequence) else 0.0)
            self.reference = []
            if self._pass(Pass("no router loss", first.dynamic, first.size)):
                self._pass(again, against="no router loss")
        finally:
            for name, value in coefficients.items():
                setattr(transformer, name, value)

    def _report(self, started: float, needed: int) -> dict[str, float]:
        """Has rank 0 explain, print and write; the metrics on every rank."""
        pairs = {"group_size": self.group_size}
        mine = self.recorder.parts if self.engine.is_mp_src_rank_with_outputs() else []
        parts = [part | pairs for part in chain.from_iterable(self._gather(mine))]
        metrics: dict[str, float] | str | None = None
        if dist.get_rank() == 0:
            from trinity_loss.invariance.audit_report import explain

            try:
                found = {
                    "format": 1,
                    "step": self.step,
                    "loss": repr(self.worker.loss_fn),
                    "dtype": self.dtype,
                    "tolerance": self.tolerance,
                    "ranks": dist.get_world_size(),
                    "data_parallel": self.engine.get_data_parallel_size(),
                    "device": str(get_torch_device().get_device_name()),
                    "runs": self.runs,
                    "left_out": self.left_out,
                    "host_bytes": needed,
                    "seconds": time.perf_counter() - started,
                }
                report = explain(found, self.loss_fn, parts, modules_of(self.engine), self.worker.engine_config)
                print(report, flush=True)
                metrics = report.metrics()
                report.write(self.settings.folder)
            except Exception as error:  # The others wait for what rank 0 says.
                metrics = metrics if isinstance(error, OSError) and metrics else said(error)
                warnings.warn(f"audit of step {self.step}: {said(error)}", stacklevel=2)
        answer = [metrics]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if not isinstance(answer[0], dict):
            raise RuntimeError(answer[0])
        return answer[0]


_RECOVERY = "as configured, after an error"
_TOKENS = ("log_probs", "entropy", "loss gradient", "first in a row", "behind others")


def _flat(value: Any) -> Any:
    """A metric as ``reduce_metrics`` takes it: verl's own way from ranks and micro-batches to one list of numbers."""
    if not isinstance(value, list):
        return [value]
    return [Metric.aggregate_dp(value)] if isinstance(value[0], Metric) else list(chain.from_iterable(value))


def _plain(deviations: dict[str, Distance]) -> dict[str, dict[str, float]]:
    return {name: asdict(deviation) for name, deviation in deviations.items()}


def _error(run: dict[str, Any], name: str) -> float:
    found = run["gradient" if name == "all" else "tokens"].get(name)
    return 0.0 if found is None else math.inf if math.isnan(found["error"]) else found["error"]
