"""What a configuration names by its place: ``package.module:name``."""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

from trinity_loss.errors import ConfigError


def find_at(field: str, place: str) -> Any:
    """What stands at ``package.module:name``, the value of a field; the name may be nested, ``Class.method``.

    Raises:
        ConfigError: The place has another form, the module cannot be imported, for whatever reason, or has no
            such name.

    Example:
        >>> find_at("loss_mode", "collections:OrderedDict.fromkeys").__name__
        'fromkeys'
    """
    module, _, name = place.partition(":")
    if not all(part.isidentifier() for path in (module, name) for part in path.split(".")):
        raise ConfigError(f"{field} is {place!r}; expected package.module:name")
    try:
        return reduce(getattr, name.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # What a module does at its import may fail in any way.
        raise ConfigError(f"{field} is {place!r}: {type(error).__name__}: {error}") from error
