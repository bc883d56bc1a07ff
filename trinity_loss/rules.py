"""What a value of a configuration must be: a test, and the words for the error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar

from trinity_loss.errors import ConfigError, UnknownFieldError

C = TypeVar("C")


@dataclass(frozen=True)
class Rule:
    """A test, and what passes it in words."""

    holds: Callable[[Any], bool]
    expected: str


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer that no float holds.
        return False


def number(expected: str, holds: Callable[[Any], bool]) -> Rule:
    """The rule that a value is a finite number, no text and no boolean, of which ``holds`` is true."""
    return Rule(lambda value: _is_number(value) and holds(value), expected)


NUMBER = Rule(_is_number, "a finite number")
POSITIVE = number("a finite number above 0", lambda value: value > 0)
NOT_NEGATIVE = number("a finite number, 0 or more", lambda value: value >= 0)
SHARE = number("a number above 0, at most 1", lambda value: 0 < value <= 1)
COUNT = number("a whole number, 0 or more", lambda value: isinstance(value, int | Integral) and int(value) >= 0)
BOOLEAN = Rule(lambda value: isinstance(value, bool), "true or false")
TEXT = Rule(lambda value: isinstance(value, str) and bool(value), "a name")


def one_of(*choices: str | None) -> Rule:
    """The rule that a value is one of these words, or None where it is among them."""
    words = ["null" if choice is None else str(choice) for choice in choices]
    return Rule(lambda value: isinstance(value, str | None) and value in choices, "one of " + ", ".join(words))


def optional(rule: Rule) -> Rule:
    """The rule that a value is None or as ``rule`` says; the text ``None`` is neither, as what Hydra makes of it."""

    def holds(value: Any) -> bool:
        return value is None or (not (isinstance(value, str) and value.strip() == "None") and rule.holds(value))

    return Rule(holds, f"null or {rule.expected}")


def list_of(rule: Rule) -> Rule:
    """The rule that a value is a list, no text, whose every entry is as ``rule`` says."""

    def holds(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(rule.holds, value))

    return Rule(holds, f"a list, each entry {rule.expected}")


def check(field: str, value: Any, rule: Rule) -> None:
    """Raises :class:`ConfigError` unless ``value`` is as ``rule`` says.

    Example:
        >>> check("clip_ratio", "0.2", NOT_NEGATIVE)
        Traceback (most recent call last):
        ...
        trinity_loss.errors.ConfigError: clip_ratio is '0.2'; expected a finite number, 0 or more
    """
    if not rule.holds(value):
        raise ConfigError(f"{field} is {value!r}; expected {rule.expected}")


def naming_unknown_fields(cls: type[C]) -> type[C]:
    """Makes an argument that is no field of a dataclass an :class:`UnknownFieldError` that lists the fields."""
    make = cls.__init__

    @wraps(make)
    def init(self: C, *values: Any, **named: Any) -> None:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in named:
            if name not in known:
                near = get_close_matches(name, known, 1)
                meant = f", but {near[0]!r}" if near else ""
                raise UnknownFieldError(
                    f"{cls.__name__} has no field {name!r}{meant}; its fields are {', '.join(known)}"
                )
        make(self, *values, **named)

    cls.__init__ = init  # type: ignore[method-assign,assignment]
    return cls
