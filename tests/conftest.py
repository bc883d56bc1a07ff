"""What holds for all tests: no model hub, one thread each, and where they run when two processes share them."""

import os
import re
from collections import Counter

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


_FIELD_CASE = re.compile(r"tests/test_field_cases\.py::test_(\d\d)_(\w+)")


def pytest_terminal_summary(terminalreporter):
    """A line per case of ``test_field_cases.py``, where that file is run by itself."""
    reports = [
        (outcome, report)
        for outcome, found in terminalreporter.stats.items()
        for report in found
        if hasattr(report, "nodeid") and getattr(report, "when", None) in ("call", "setup")
    ]
    if not reports or any("test_field_cases.py" not in report.nodeid for _, report in reports):
        return
    outcomes, titles = {}, {}
    for outcome, report in reports:
        if outcome and (case := _FIELD_CASE.match(report.nodeid)):
            outcomes.setdefault(case[1], Counter())[outcome] += 1
            titles[case[1]] = titles.get(case[1]) or case[2].replace("_", " ")
    terminalreporter.section("field cases")
    for number in sorted(outcomes):
        counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes[number].items()))
        terminalreporter.write_line(f"{number}  {counted:12}  {titles[number]}")
