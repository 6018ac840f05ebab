"""The two kinds of error: the caller's and the other side's.

Rule: misuse raises at once and says what to do; bad bytes from a peer or an engine raise only inside the
codec that met them, and become a counter and an event before they reach the caller's loop.
"""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

_T = TypeVar("_T")

_PLAIN: dict[Any, tuple[type, str]] = {
    "int": (Integral, "an int"),
    "float": (Real, "a number"),
    "str": (str, "a text"),
    "bool": (bool, "True or False"),
}
"""Declared as -> what it has to be an instance of, and in words."""


class PrefixRouteError(Exception):
    """Base of every error that this library raises on purpose."""


class UsageError(PrefixRouteError, ValueError):
    """The caller passed something that cannot be used; the message says what to pass instead."""


class NoEndpointError(UsageError):
    """Nobody is there to route to: no endpoint is known (yet), none of those offered is, or a rule forbids them all."""


class DecodeError(PrefixRouteError, ValueError):
    """Bytes from a peer or an engine could not be decoded.

    `kind` is a short stable word for counters, such as ``truncated``, ``forged`` or ``version``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def expect(value: _T, kinds: type | tuple[type, ...], what: str) -> _T:
    """Return a value that is of one of `kinds`. Raises `UsageError` that says what was wanted, and what came."""
    if isinstance(value, kinds):
        return value
    wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    got = f"the class {value.__name__} itself" if isinstance(value, type) else f"{type(value).__name__} {value!r:.60}"
    raise UsageError(f"{what} must be of type {wanted}, not {got}")


def is_number(value: Any) -> bool:
    """Whether a value is a real number; a bool is none."""
    return type(value) is int or type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def expect_plain(record: Any) -> None:
    """Look at the fields of a dataclass that are declared as plain values. O(fields).

    Raises `UsageError` for one of another type: a bool is no number, and neither is NaN.
    """
    for field in fields(record):
        kind, words = _PLAIN.get(field.type, (object, ""))
        value = getattr(record, field.name)
        if not isinstance(value, kind) or (words and kind is not bool and isinstance(value, bool)) or value != value:
            raise UsageError(f"{type(record).__name__}.{field.name} must be {words}, not {value!r:.60}")
