"""Run any loss of verl's engine contract through verl's real engines, on a CPU (or on GPUs: `EngineCase.device`).

```python
from trinity_loss.verl.harness import EngineCase, run_cases

one, two = run_cases("fsdp", [EngineCase("my.package:my_loss", micro_batches=pieces) for pieces in (1, 2)])
assert two.gradient_error(one) < 1e-5
```
The engines run in processes of their own (`launch`); this process imports nothing of verl.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from trinity_loss.verl.harness.engine_case import BatchSpec, EngineCase, EngineError, EngineName, EngineResult
from trinity_loss.verl.harness.launch import launch
from trinity_loss.verl.harness.rank import Job

__all__ = ["BatchSpec", "EngineCase", "EngineError", "EngineResult", "run_cases"]

MODULES = {
    "fsdp": "trinity_loss.verl.harness.fsdp",
    "megatron": "trinity_loss.verl.harness.megatron",
    "ray": "trinity_loss.verl.harness.ray_fsdp",
}
ON_CPU = {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# verl finds CUDA by itself. Looking whether it is there must not start it before the ranks do.
ON_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def run_cases(
    engine: EngineName, cases: Sequence[EngineCase], *, ray: bool = False, timeout: float = 300.0
) -> list[EngineResult]:
    """Run cases one after the other through one engine.

    Starting takes about 10 s, another engine (see `EngineCase.engine_options`) one or two, another case well
    under one: put as many cases as possible into one call, those that share an engine next to each other.

    Args:
        engine: ``"fsdp"`` (FSDP2) or ``"megatron"``.
        cases: The cases.
        ray: Whether the ranks are Ray workers of verl's worker group instead of plain processes; FSDP only,
            and all cases must share one engine.
        timeout: Seconds for the whole call.

    Returns:
        One result per case, in order.

    Raises:
        EngineError: If a rank fails (within seconds, with its traceback) or time runs out.
        ValueError: If ``ray`` is asked for where it is not possible, or the cases differ in their device.
        TypeError: If a loss cannot be pickled.
    """
    if ray and engine != "fsdp":
        raise ValueError("Ray workers are available for the fsdp engine only")
    if ray and len({case.engine_options for case in cases}) > 1:
        raise ValueError("with Ray workers all cases must share one engine")
    devices = {case.device for case in cases}
    if len(devices) != 1:
        raise ValueError(f"all cases must be on one device, not on {sorted(devices)}")
    (device,) = devices
    if ray and device != "cpu":
        raise ValueError("Ray workers are available on the CPU only")
    kind = "ray" if ray else engine
    environment = ON_CPU if device == "cpu" else ON_CUDA
    with tempfile.TemporaryDirectory(prefix="trinity_") as folder:
        job = Job(tuple(cases), str(Path(folder) / "model"), timeout)
        return launch(MODULES[kind], job, environment=environment, timeout=timeout)
