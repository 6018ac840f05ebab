"""The two kinds of error: the caller's and the other side's.

Rule: misuse raises at once and says what to do; bad bytes from a peer or an engine raise only inside the
codec that met them, and become a counter and an event before they reach the caller's loop.
"""

from __future__ import annotations


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
