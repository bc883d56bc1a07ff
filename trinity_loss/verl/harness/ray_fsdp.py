"""The FSDP2 engine in Ray workers, driven through verl's own worker group as a trainer does.

Run as ``python -m trinity_loss.verl.harness.ray_fsdp FOLDER`` by `launch`, once.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from trinity_loss.verl.harness.engine_case import EngineError, EngineResult, load
from trinity_loss.verl.harness.fsdp import worker_class, worker_config
from trinity_loss.verl.harness.launch import main
from trinity_loss.verl.harness.model import save_tiny_model
from trinity_loss.verl.harness.rank import Job, cut, result_of


def start_ray(num_cpus: int) -> None:
    """Start a private Ray on this machine, without its dashboard.

    Ray gives its own processes 30 s to start, fixed; on a busy machine that may not do, so a second try follows.

    Args:
        num_cpus: Workers that may run at a time.
    """
    import ray

    for last_try in (False, True):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 * 2**20,
            )
            return
        except Exception:
            ray.shutdown()
            if last_try:
                raise


def run_driver(job: Job) -> list[EngineResult]:
    """Start a private Ray, one worker per rank, and run all cases of the job, which share one engine."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils import tensordict_utils as tu

    save_tiny_model(job.model)
    first = job.cases[0]
    # Finding out the port in a Ray task would start one more process that imports verl.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Workers inherit this process's environment, which selects the platform.
    start_ray(first.world_size)
    # The worker's methods are bound to the group at run time.
    group: Any = RayWorkerGroup(
        resource_pool=RayResourcePool([first.world_size], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(worker_class(first)), config=worker_config(first, job.model)
        ),
        device_name="cpu",
        master_addr="127.0.0.1",
        master_port=str(port),
    )
    group.reset()
    # verl asks the workers for this behind the first step; if one fails there, the others never answer.
    group._collect_info["train"] = group._query_collect_info("train")
    results: list[EngineResult] = []
    try:
        for case in job.cases:
            data = cut(case, case.world_size)
            group.set_loss_fn(load(case.loss))
            start = time.perf_counter()
            output: Any = group.train_mini_batch(data).get()
            seconds = time.perf_counter() - start
            results.append(result_of(case, group.take_record(), tu.get(output, "metrics"), seconds))
    except ray.exceptions.RayError as error:
        raise EngineError(str(error), results) from None
    finally:
        ray.shutdown()
    return results


if __name__ == "__main__":
    main(run_driver)
