"""The verl platform ``cpu``, for demonstration and tests; selected by ``VERL_PLATFORM=cpu`` and never found alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_base import PlatformBase

from trinity_loss.verl.cpu import device


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """A machine whose only device is its CPU."""

    device_name = vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        return device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Every machine has a CPU: saying so would take over machines that have better.
        return False

    def current_device(self) -> str:  # type: ignore[override]
        # verl writes `.to(get_device_id())`, where a number would mean an accelerator.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *args: object, **kwargs: object) -> None:
        """A CPU has no such thing."""

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        # verl counts only Ray's GPUs and NPUs before it places workers, so a rank is a logical GPU:
        # ray_kwargs.ray_init.num_gpus says how many.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
