"""The audit of a run of Trinity-RFT, switched on by environment variables, which reach its training workers.

``TRINITY_LOSS_AUDIT_STEPS=1,100`` and ``TRINITY_LOSS_AUDIT_DIR=/shared/audits``, set where Ray is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_loss.errors import ConfigError

STEPS, FOLDER = "TRINITY_LOSS_AUDIT_STEPS", "TRINITY_LOSS_AUDIT_DIR"


class Audits:
    """Counts the steps of a training worker, from 1 at its start, and audits those that were chosen.

    Args:
        environment: Where the variables are.

    Raises:
        ConfigError: The steps are no whole numbers above 0, or no folder is given.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        text, self.folder = environment.get(STEPS, ""), environment.get(FOLDER, "")
        words = [word.strip() for word in text.split(",")] if text.strip() else []
        if not all(word.isdecimal() and int(word) for word in words):
            raise ConfigError(f"{STEPS} is {text!r}; expected training steps, such as 1,100")
        if words and not self.folder:
            raise ConfigError(f"{STEPS} is {text!r}, but {FOLDER} is not set")
        self.steps = frozenset(map(int, words))
        self.step = self.mini_batch = 0

    def next_batch(self) -> None:
        """A batch begins."""
        self.step, self.mini_batch = self.step + 1, 0

    def of(self, worker: Any, data: Any, group_size: int) -> dict[str, float]:
        """The ``audit/…`` metrics of a mini-batch, if it is the first of a chosen step; see ``verl.audit.audit``."""
        self.mini_batch += 1
        if self.step not in self.steps or self.mini_batch > 1:
            return {}
        from trinity_loss.verl.audit import audit
        from trinity_loss.verl.audit_settings import AuditSettings

        return audit(worker, data, AuditSettings(self.steps, Path(self.folder)), self.step, group_size)
