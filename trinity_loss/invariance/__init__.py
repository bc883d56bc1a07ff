"""Whether a loss depends on how its mini-batch was cut, for any callable of verl's engine contract.

```python
from trinity_loss.invariance import assert_invariant, check_invariance

report = check_invariance(my_loss)       # report.ok, report.rows, report.findings, print(report)
assert_invariant(my_loss)                # for a test suite
```
Importing this imports nothing of verl. verl is imported by losses that need it, and for the cuts that its
dynamic batch size makes.
"""

from trinity_loss.invariance.check import assert_invariant, check_invariance
from trinity_loss.invariance.draw import make_mini_batch
from trinity_loss.invariance.engine import ContractError
from trinity_loss.invariance.layouts import EngineMicroBatch, build
from trinity_loss.invariance.minibatch import MiniBatch, load_mini_batch
from trinity_loss.invariance.report import Report
from trinity_loss.invariance.rows import CAUSES, Deviation, Finding, Row, Value

__all__ = [
    "CAUSES",
    "ContractError",
    "Deviation",
    "EngineMicroBatch",
    "Finding",
    "MiniBatch",
    "Report",
    "Row",
    "Value",
    "assert_invariant",
    "build",
    "check_invariance",
    "load_mini_batch",
    "make_mini_batch",
]
