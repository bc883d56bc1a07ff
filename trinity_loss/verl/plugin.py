"""What verl loads at import, through the entry-point group ``verl.plugins``.

It registers the demonstration platform ``cpu`` when, and only when, ``VERL_PLATFORM=cpu`` asks for it. In any
other process nothing happens: the loss itself needs no plugin, since ``trinity_loss.verl.PolicyLossConfig`` is
imported by the worker that instantiates it.
"""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from trinity_loss.verl.cpu import platform  # noqa: F401  (the import registers it)
