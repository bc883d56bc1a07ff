"""What watches a training neither ends nor changes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_warning(what: str) -> Iterator[None]:
    """Turns an error within into a warning: what failed, and that training goes on.

    Args:
        what: What is done within, as the subject of a sentence.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as said:
        ...     with only_warning("recording"):
        ...         raise OSError("the disk is full")
        >>> str(said[0].message)
        'recording failed, and training goes on without it: OSError: the disk is full'
    """
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what} failed, and training goes on without it: {type(error).__name__}: {error}", stacklevel=3)
