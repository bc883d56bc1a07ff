"""What a configuration names by its place: ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from trinity_loss.errors import ConfigError


def find_at(field: str, place: str) -> Any:
    """What stands at ``package.module:name``, the value of a field.

    Raises:
        ConfigError: The module cannot be imported, or has no such name.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field} is {place!r}: {error}") from error
