"""The maps that an engine sends today, typed: msgspec checks the fields while it reads them, and no dict is made.

Rules:
1. A payload is read this way whole or not at all. If anything in it is not of the layout (older arrays, an unknown
   tag, a field of another type or out of its range), `batch` reads it field by field and says what is wrong with which
   event.
2. Both ways read a payload alike, but for neighbouring removals of one tier and group: here they become one event.
   vLLM sends one for each evicted block, and the effect is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from prefixroute.events import EngineBatch, EngineEvent

from .fields import MalformedError

E = TypeVar("E")


class Removal(Protocol):
    """The fields that a layout's struct of a removal must have."""

    block_hashes: list[int]
    medium: str | None
    locality: object


class _Batch(msgspec.Struct, Generic[E], array_like=True, gc=False):
    """A batch as it travels."""

    ts: float
    events: list[E]
    rank: int | None = None


class Layout:
    """How the events of one engine look: `events` are the tagged structs, `removal` is that of a removal.

    `convert` makes an event of a struct; it raises `MalformedError` for one that has to be read the tolerant way. Of a
    removal it is also told how many of the engine's events it is made of. `joins` says whether a removal may be one
    event with the one before it.
    """

    def __init__(
        self,
        events: Any,
        removal: type[Removal],
        convert: Callable[[Any, int], EngineEvent],
        joins: Callable[[Any, Any], bool],
    ) -> None:
        self._read: Callable[[bytes], _Batch[Any]] = msgspec.msgpack.Decoder(_Batch[events]).decode
        self._removal = removal
        self._convert = convert
        self._joins = joins

    def decode(self, payload: bytes) -> EngineBatch | None:
        """Decode a payload that is of this layout; None for any other bytes. O(bytes)."""
        try:
            batch = self._read(payload)
            rank = batch.rank or 0
            if rank < 0 or not math.isfinite(batch.ts):
                return None
            return EngineBatch(tuple(self._events(batch.events)), rank, batch.ts)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, TypeError, OverflowError, MalformedError):
            return None

    def _events(self, events: list[Any]) -> list[EngineEvent]:
        removal, joins, convert = self._removal, self._joins, self._convert
        found: list[EngineEvent] = []
        last: Any = None
        told = 1
        for event in events:
            if last is not None:
                if type(event) is removal and joins(last, event):
                    last.block_hashes += event.block_hashes
                    told += 1
                    continue
                found.append(convert(last, told))
                last, told = None, 1
            if type(event) is removal:
                last = event
            else:
                found.append(convert(event, 1))
        if last is not None:
            found.append(convert(last, told))
        return found
