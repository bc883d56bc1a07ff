"""What holds for all tests: no model hub, one thread each, and where they run when two processes share them."""

import os

import pytest

# Before anything imports what reads them; what the tests start inherits them.
os.environ["HF_HUB_OFFLINE"] = "1"  # A test that asks for a model hub fails instead of waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file of tests stays in one process, which has its fixtures; so do all engines, as each fills two cores."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "engines" if file.startswith("tests/engines/") else file

    return Scheduling(config, log)
