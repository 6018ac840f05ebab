"""What tells one engine's event streams from another's, once the transport is the same.

Rule: everything else about a stream (three-frame live messages, a sequence from 0 a process, replay by DEALER with an
end marker of all ones) is common, and lives in this package once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from prefixroute.events import EngineBatch

MAX_PAYLOAD_BYTES: Final = 32 << 20
"""A larger payload is refused unread. A step of 131,072 tokens with as many evictions needs about 2 MiB."""


class Engine(NamedTuple):
    """What the entry-point group ``prefixroute.engines`` offers: a name, bytes to events, and small differences.

    `binding_hosts` are the texts in an event endpoint that make the engine bind it instead of connecting.
    """

    name: str
    decode: Callable[[bytes], EngineBatch]
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    binding_hosts: tuple[str, ...] = ("*", "::")
