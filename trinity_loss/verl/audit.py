"""The audit: the gradient of one mini-batch of a run, computed several times, each time cut in another way.

It takes no step of the optimizer and leaves weights, gradients, buffers and random states as it found them, so that
the run goes on as without it. What it found is explained by :mod:`trinity_loss.invariance.audit_report`.

What a rank does by itself may fail: the ranks tell each other (:mod:`trinity_loss.verl.agreement`) before any of them
goes where it would wait for the others.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_torch_device
from verl.utils.metric import Metric, reduce_metrics

from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.verl.agreement import Agreement, StageFailed, said
from trinity_loss.verl.audit_experiments import experiment
from trinity_loss.verl.audit_passes import Pass, plan, shape_of
from trinity_loss.verl.audit_room import check_room, free_host_memory
from trinity_loss.verl.audit_settings import AuditSettings
from trinity_loss.verl.gradients import Comparison, Distance, gradient_shares, joined, noise, off
from trinity_loss.verl.kept_state import as_it_was, modules_of
from trinity_loss.verl.metric_reduction import reduce_over_ranks
from trinity_loss.verl.observer import Observer, Row, outputs_observed

#: Largest relative deviation that is taken for rounding, by the type that the model computes in.
TOLERANCES = {"float32": 1e-4, "float64": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
_SECONDS = 30  # That a rank waits for the others after a pass, beside ten times the longest pass so far.
_RECORDED_TOKENS = 2**17  # Of the mini-batch, that the loss is tried on again.


class EngineFailed(RuntimeError):
    """The engine failed in a pass, and training cannot go on from there: the run has to end.

    One rank alone failed, and the others wait for it where it can no longer go; or what was left behind in the engine
    changes the gradient of the next pass.
    """


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
    ranks = None
    try:
        ranks = Agreement()
        keep = tu.get(data, "disable_auto_offload", default=False)
        with ExitStack() as stack:

            def begin() -> None:
                one.append(_Audit(worker, data, settings, step, group_size))
                one[0].put_back = stack.enter_context(as_it_was(worker.engine))
                stack.enter_context(worker.engine.train_mode(disable_auto_offload=keep))
                # What the passes leave free in pieces would be missed by training.
                stack.callback(get_torch_device().empty_cache)
                one[0].look()

            one: list[_Audit] = []
            ranks.each(begin)
            return one[0].run(ranks)
    except EngineFailed:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, StageFailed) else said(error)
        warnings.warn(f"audit of step {step} left out, training goes on: {text}", stacklevel=2)
        return {}
    finally:
        if ranks is not None:
            ranks.close()


class _Audit:
    """One audit on one rank. What decides how it goes on is the same on every rank."""

    put_back: Callable[[bool], None]
    ranks: Agreement
    first: Pass
    groups: list[str]

    def __init__(self, worker: Any, data: TensorDict, settings: AuditSettings, step: int, group_size: int) -> None:
        self.worker, self.engine, self.data, self.settings = worker, worker.engine, data, settings
        self.step, self.group_size = step, group_size
        self.loss_fn = getattr(worker.loss_fn, "verl_loss", worker.loss_fn)
        self.parts: list[dict[str, Any]] = []
        self.reference: list[Tensor] | None = None
        self.reference_rows: dict[int, Row] = {}
        self.runs: list[dict[str, Any]] = []
        self.left_out: list[tuple[str, str]] = []
        dtype = getattr(self.engine, "_autocast_dtype", None) or getattr(self.engine, "param_dtype", torch.float32)
        self.dtype = str(dtype).removeprefix("torch.")
        self.tolerance = TOLERANCES.get(self.dtype, 2e-2)

    def look(self) -> None:
        """Finds this rank's parts of the gradient, once the engine has its parameters where it trains."""
        self.shares = gradient_shares(self.engine)
        scaler = getattr(self.engine, "scaler", None)
        self.scale = 1.0 if scaler is None else float(scaler.get_scale())

    def run(self, ranks: Agreement) -> dict[str, float]:
        self.ranks, started = ranks, time.perf_counter()
        everyone = ranks.each(self._facts)
        self.groups = sorted(set(chain.from_iterable(groups for groups, _, _ in everyone)))
        for needed, here, available in (memory for _, memory, _ in everyone):
            if needed * here > 0.8 * available:
                raise MemoryError(f"it takes {needed * here} bytes of host memory, {available} are free")
        needed = max(memory[0] for _, memory, _ in everyone)
        shapes = [shape for _, _, shape in everyone]
        self.first, passes, self.left_out = plan(self.data, self.worker, self.settings.cuts, shapes)
        if dist.get_rank() == 0:
            print(
                f"trinity_loss: audit of step {self.step}: {1 + len(passes)} passes over the first mini-batch, "
                f"{needed / 2**20:.1f} MiB of host memory on each rank",
                flush=True,
            )
        if not self._pass(self.first):
            raise StageFailed(f"the mini-batch as configured: {self.left_out[-1][1]}")
        for one in passes:
            self._pass(one)
        self._experiment()
        return self._report(started, needed)

    def _facts(self) -> tuple[list[str], tuple[int, int, int], tuple[int, int, int]]:
        """Kinds of parameters of this rank; bytes of its gradient's copy, ranks that share its host, free bytes."""
        here = int(getattr(get_torch_device(), "device_count", lambda: 1)() or 1)
        needed = sum(share.elements for share in self.shares) * 4
        memory = (needed, here, free_host_memory())
        return sorted({share.group for share in self.shares}), memory, shape_of(self.data, self.worker)

    def _pass(self, one: Pass, against: str = "") -> bool:
        """Makes a pass and compares it with the first; whether it came to an end on every rank.

        The first pass of all, and of an experiment that names one by ``against``, becomes what is compared with.
        """
        observer = Observer(self.loss_fn, plain=one.name == _RECOVERY)
        if not self.runs:
            observer.record = _RECORDED_TOKENS // self.engine.get_data_parallel_size()

        def prepare() -> None:
            check_room(one)
            self.put_back(not one.fresh)
            batch.append(one.cut(self.data, self.worker))
            self.engine.optimizer_zero_grad()

        batch: list[TensorDict] = []
        try:
            self.ranks.each(prepare)
            output, seconds = self._compute(one, batch[0], observer)
            everyone = self.ranks.each(lambda: self._found(output, observer))
        except StageFailed as failed:
            self.left_out.append((one.name, str(failed)))
            return False
        if not self.runs:
            self.parts = observer.recorder.parts
        loss, metrics = self._numbers(one.name, [numbers for *_, numbers in everyone if numbers is not None])
        self.runs.append(
            {"name": one.name, "against": against, "dynamic": one.dynamic, "size": one.size, "seconds": seconds,
             "micro_batches": max(count for _, _, count, _ in everyone), "loss": loss, "metrics": metrics,
             "gradient": _plain(joined([gradients for gradients, *_ in everyone]), self.scale),
             "tokens": _plain(joined([tokens for _, tokens, *_ in everyone]))}
        )  # fmt: skip
        return True

    def _compute(self, one: Pass, batch: TensorDict, observer: Observer) -> tuple[dict[str, Any], float]:
        """Has the engine compute the gradient; its output and the seconds, the most of any rank.

        Raises:
            StageFailed: On every rank, where the loss or the engine failed on one; the engine is as before.
            EngineFailed: It is not, or some rank waits within it.
        """
        output, error, of_engine, started = {}, None, False, time.perf_counter()
        try:
            with outputs_observed(self.engine, observer):
                output = self.engine.forward_backward_batch(batch, observer, forward_only=False)
            get_torch_device().synchronize()
            error = observer.error
        except Exception as raised:
            error, of_engine = raised, True
        seconds = time.perf_counter() - started
        try:
            # Nobody knows how long the first one takes.
            longest = max((run["seconds"] for run in self.runs), default=math.inf)
            self.ranks.meet(_SECONDS + 10 * longest)
        except RuntimeError as unanswered:
            text = said(unanswered if error is None else error)
            raise EngineFailed(f"audit of step {self.step}, {one.name}: {text}") from error
        everyone = self.ranks.each(lambda: ("" if error is None else said(error), of_engine, seconds))
        failed = [text for text, _, _ in everyone if text]
        if failed:
            if any(engine for _, engine, _ in everyone) and one.name != _RECOVERY:
                self._recover(failed[0])
            raise StageFailed(failed[0])
        return output, max(seconds for *_, seconds in everyone)

    def _recover(self, text: str) -> None:
        """Passes as configured until one has the gradient of the first again: an engine may keep what it had summed.

        Where there is no first, until two that follow each other have the same.
        """
        again, begun, alone = replace(self.first, name=_RECOVERY), len(self.runs), self.reference is None
        for _ in range(3):
            if alone:
                self.reference = None
            done = [self._pass(again) for _ in range(2 if alone else 1)]
            distance = off(self.runs[-1]) if all(done) else math.inf
            allowed = max(self.tolerance, 3 * noise(self.runs[:begun]))
            del self.runs[begun:], self.left_out[len(self.left_out) - done.count(False) :]
            if distance <= allowed:
                return
        raise EngineFailed(f"audit of step {self.step}: {text}")

    def _found(self, output: dict[str, Any], observer: Observer) -> tuple[Comparison, Comparison, int, Any]:
        """This rank's sums, its micro-batches, and its loss and metrics if it has any.

        In the first pass the gradient is kept and compared with itself.
        """
        now = [share.read() for share in self.shares]
        if self.reference is None:
            self.reference = [
                torch.zeros(share.elements) if part is None else part.detach().to("cpu", copy=True)
                for share, part in zip(self.shares, now, strict=True)
            ]
            self.reference_rows = observer.rows
        gradients, tokens = Comparison(self.groups), Comparison(_TOKENS)
        for share, kept, part in zip(self.shares, self.reference, now, strict=True):
            part = torch.zeros_like(kept) if part is None else part
            gradients.add(share.group, kept, part, share.weight)
        if not self.engine.is_mp_src_rank_with_outputs():  # The same rows as another rank's.
            return gradients, tokens, observer.micro_batches, None
        for row, (values, first) in observer.rows.items():
            kept_values, kept_first = self.reference_rows[row]
            for name, value in values.items():
                tokens.add(name, kept_values[name], value)
            place = "first in a row" if first and kept_first else "behind others"
            tokens.add(place, kept_values["log_probs"], values["log_probs"])
        numbers = (self.engine.get_data_parallel_rank(), float(sum(map(float, output["loss"]))), output["metrics"])
        return gradients, tokens, observer.micro_batches, numbers

    def _numbers(self, name: str, parts: list[tuple[int, float, Mapping[str, Any]]]) -> tuple[float, dict[str, float]]:
        """Loss and metrics as verl's log has them, of those of each data-parallel rank."""
        parts.sort(key=lambda part: part[0])
        numbers: dict[str, Any] = {}
        for _, _, metrics in parts:
            for key, value in metrics.items():
                numbers.setdefault(key, []).append(value)
        loss = sum(loss for _, loss, _ in parts) / len(parts)
        try:
            if isinstance(self.loss_fn, EnginePolicyLoss):
                reduce_over_ranks(numbers)
            numbers = reduce_metrics({key: _flat(value) for key, value in numbers.items()})
            return loss, {key: float(value) for key, value in numbers.items()}
        except Exception as error:  # The same on every rank. Its gradient can be compared all the same.
            self.left_out.append((f"metrics of {name}", said(error)))
            return loss, {}

    def _experiment(self) -> None:
        """Passes that are made only where the others differ, to tell why."""
        transformer = getattr(self.engine, "tf_config", None)
        # The stages of a pipeline have their own; where one is asked for something, all make the passes.
        everyone = self.ranks.each(lambda: experiment(self.runs, self.first, self.tolerance, transformer))
        tried = next((one for one in everyone if one is not None), None)
        if tried is None:
            return
        with tried.made_with(transformer):
            if tried.second is not None:
                self.reference = None
            if self._pass(tried.first) and tried.second is not None:
                self._pass(tried.second, against=tried.first.name)

    def _report(self, started: float, needed: int) -> dict[str, float]:
        """Has rank 0 explain, print and write; the metrics on every rank."""
        source, pairs = self.engine.is_mp_src_rank_with_outputs(), {"group_size": self.group_size}
        everyone = self.ranks.each(lambda: self.parts if source else [])
        parts = [part | pairs for part in chain.from_iterable(everyone)]

        def explained() -> dict[str, float] | None:
            if dist.get_rank():
                return None
            from trinity_loss.invariance.audit_report import explain

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
            try:
                report.write(self.settings.folder)
            except Exception as error:  # It is in the log.
                warnings.warn(f"audit of step {self.step} is not written: {said(error)}", stacklevel=2)
            return report.metrics()

        return self.ranks.each(explained)[0]


_RECOVERY = "as configured, after an error"
_TOKENS = ("log_probs", "entropy", "loss gradient", "first in a row", "behind others")


def _flat(value: Any) -> Any:
    """A metric as ``reduce_metrics`` takes it: verl's own way from ranks and micro-batches to one list of numbers."""
    if not isinstance(value, list):
        return [value]
    return [Metric.aggregate_dp(value)] if isinstance(value[0], Metric) else list(chain.from_iterable(value))


def _plain(distances: dict[str, Distance], scale: float = 1.0) -> dict[str, dict[str, float]]:
    """As plain data, of vectors that are ``scale`` times too long."""
    return {name: asdict(found) | {"norm": found.norm / scale} for name, found in distances.items()}
