"""What the configuration says of the audit, and what of it a run cannot do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trinity_loss.verl.policy_options import AUDIT_CUTS, PolicyLossOptions


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

    @classmethod
    def of(cls, policy_loss: PolicyLossOptions) -> AuditSettings | None:
        """What a configuration says; None where no step is chosen."""
        if not policy_loss.audit_steps:
            return None
        steps = frozenset(map(int, policy_loss.audit_steps))
        return cls(steps, Path(str(policy_loss.audit_dir)).expanduser(), tuple(policy_loss.audit_cuts))

    def notices(self, first: int, last: int) -> list[str]:
        """What will not happen, a sentence each; makes the folder.

        Args:
            first: The step that a run begins with, as one that goes on from a checkpoint.
            last: The step that it ends with; 0 or less: nobody knows.
        """
        found = []
        if gone := sorted(step for step in self.steps if step < first):
            found.append(f"audit_steps {gone} have gone by: the run begins with step {first}")
        if beyond := sorted(step for step in self.steps if step > last > 0):
            found.append(f"audit_steps {beyond} will not come: the run ends with step {last}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            found.append(f"audit_dir {self.folder} cannot be written: the log alone will have the reports")
        return found
