"""Puts back what a forward or backward pass changes beside gradients."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from verl.utils.device import get_torch_device


def modules_of(engine: Any) -> list[torch.nn.Module]:
    """The model of an engine of verl: one module, or Megatron's chunks of it."""
    return list(engine.module) if isinstance(engine.module, list) else [engine.module]


@contextmanager
def as_it_was(engine: Any) -> Iterator[Callable[[bool], None]]:
    """Afterwards buffers (as the bias of experts), random states and what Megatron logs of routers are as before.

    Yields:
        What puts them back in between, given whether the random states are among them: a pass that moves the bias of
        experts is no other pass's beginning.

    Raises:
        NotImplementedError: Something cannot be put back.
    """
    transformer = getattr(engine, "tf_config", None)
    if getattr(transformer, "fp8", None) and str(getattr(transformer, "fp8_recipe", "delayed")).endswith("delayed"):
        raise NotImplementedError("the scales of FP8 with fp8_recipe=delayed follow every pass and cannot be put back")
    parts = [part for module in modules_of(engine) for part in module.modules()]
    # By their place: an engine that offloads its model replaces them.
    buffers = [(p, name, b.detach().clone()) for p in parts for name, b in p._buffers.items() if b is not None]
    moe = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    tracker = moe.get_moe_layer_wise_logging_tracker() if moe else {}
    logged = copy.deepcopy(tracker)
    random_again = random_states()

    def put_back(random_states_too: bool) -> None:
        if random_states_too:
            random_again()
        with torch.no_grad():
            for part, name, content in buffers:
                part._buffers[name].copy_(content)  # type: ignore[union-attr]
        tracker.clear()
        tracker.update(copy.deepcopy(logged))

    try:
        yield put_back
    finally:
        put_back(True)


def random_states() -> Callable[[], None]:
    """Remembers every generator that a pass may draw from; what is returned puts them back."""
    device = get_torch_device()
    python, numpy = random.getstate(), np.random.get_state()
    host, on_device = torch.get_rng_state(), device.get_rng_state()
    parallel = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = parallel.get_cuda_rng_tracker() if parallel else None
    # Of tensor-parallel ranks: states that are replaced, or generators that are not.
    held = tracker.get_states() if tracker else {}
    states = {name: s.get_state() if isinstance(s, torch.Generator) else s.clone() for name, s in held.items()}

    def again() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        device.set_rng_state(on_device)
        for name, state in states.items():
            if isinstance(held[name], torch.Generator):
                held[name].set_state(state)
        if tracker and not any(isinstance(s, torch.Generator) for s in held.values()):
            tracker.set_states({name: state.clone() for name, state in states.items()})

    return again
