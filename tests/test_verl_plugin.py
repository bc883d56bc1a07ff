"""The entry point that verl loads at import: inert unless VERL_PLATFORM=cpu asks for the CPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")


def run_python(code: str, **environment: str) -> None:
    """Run ``code`` in a fresh interpreter; its assertions are the test."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


def test_plugin_needs_nothing_and_does_nothing_by_itself():
    run_python("""
import sys
for missing in ("verl", "ray", "transformers", "transfer_queue", "hydra"):
    sys.modules[missing] = None  # An import of it raises.
import trinity_loss.verl.plugin
assert "trinity_loss.verl.cpu" not in sys.modules
""")


def test_verl_is_as_it_was_without_the_switch():
    run_python("""
import sys
sys.modules["transfer_queue"] = None  # verl itself does without it, and so has the plugin to.
import verl
assert "trinity_loss.verl.plugin" in sys.modules, "the entry point was not loaded"
ours = {name for name in sys.modules if name.startswith("trinity_loss.verl.")}
assert ours == {"trinity_loss.verl.plugin"}, ours

from verl.plugin.platform import PlatformRegistry, get_platform
assert "cpu" not in PlatformRegistry.registered_names()
assert get_platform().device_name != "cpu"

try:
    import trinity_loss.verl.cpu.register
except RuntimeError as error:
    assert "VERL_PLATFORM=cpu" in str(error)
else:
    raise AssertionError("registered on another platform")
""")


def test_switch_registers_the_platform_which_is_never_found_by_itself():
    run_python(
        """
import os, sys
sys.modules["transfer_queue"] = None
import verl
assert not any(name.startswith("verl.workers") for name in sys.modules), "the plugin imports more than it needs"

from verl.plugin.platform import get_platform, platform_manager
platform = get_platform()
assert platform.device_name == "cpu"
assert platform.is_available() and not platform.is_platform_available()
assert platform.device_module.max_memory_allocated() > 0

del os.environ["VERL_PLATFORM"]
assert platform_manager._detect_platform_name() != "cpu"
""",
        VERL_PLATFORM="cpu",
    )
