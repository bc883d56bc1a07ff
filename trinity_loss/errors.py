"""What can be wrong with a configuration or a batch, one class each.

Every message names the field, what it was and what was expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class TrinityLossError(ValueError):
    """Base class of all errors that this package raises on bad input."""


class ConfigError(TrinityLossError):
    """A configuration that cannot mean what it says; raised when the configuration is made."""


class UnknownFieldError(ConfigError, TypeError):
    """A configuration was given a field that it does not have."""


class BatchError(TrinityLossError):
    """Base class: a micro-batch does not fit the configuration or itself."""


class MissingFieldError(BatchError):
    """A field that the configured loss reads is not in the micro-batch or the model output."""


class MissingGraphError(BatchError):
    """A part of the model output that a term is differentiated by has no graph."""


class FieldShapeError(BatchError):
    """A field has a shape, a type or sequence lengths that do not fit the response tokens."""


class FieldValueError(BatchError):
    """A field holds a number that it must not, at a token that counts."""


class NonFiniteError(BatchError):
    """NaN or infinity at a token that the loss mask counts."""


class TotalsError(BatchError):
    """The totals of the mini-batch are missing, negative, or not those of this mini-batch."""


class Fault(NamedTuple):
    """What contradicts itself in a micro-batch where only the device can see it.

    Attributes:
        found: 0-d tensor, not 0 where it is; read to the host with everything else.
        error: What to raise then.
    """

    found: Tensor
    error: BatchError
