"""Attach the slots engine: read ``GET /slots``, tell a node what is held and how busy the engine is.

Rules:
1. The engine tells states, not changes, so each answer becomes the whole state: everything is cleared, then stored.
   The residency nets out what did not change, so peers hear of differences alone.
2. Hence nothing is remembered from one answer to the next: an answer that was lost, or an engine that began a new life,
   is healed by the next answer, whatever it says.
3. A handle is the hash of all tokens up to the block's end. Two slots with one prefix tell it twice: two copies.
4. A tail that fills no block is not told. An estimate may be low, never high.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import httpx
import msgspec

from prefixroute import BlocksCleared, BlocksStored, DecodeError, EngineBatch, LoadReport, StreamGap

BLOCK: Final = 16
"""Tokens of a told block. The engine reuses single tokens, but nodes compare whole canonical blocks anyway."""

MAX_ANSWER_BYTES: Final = 32 << 20
"""A longer answer is refused unparsed."""

Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Slot(msgspec.Struct):
    tokens: list[Token]


class _Slots(msgspec.Struct):
    slots: list[_Slot]
    running: Count = 0
    waiting: Count = 0
    queued_tokens: Count = 0
    tokens_per_s: Rate = 0.0
    capacity_tokens: Count = 0


def decode(payload: bytes) -> EngineBatch:
    """Return the whole state that an answer of ``GET /slots`` tells. O(tokens).

    Raises `DecodeError` of kind ``malformed`` for anything else.
    """
    return EngineBatch((BlocksCleared(None), *_stores(_parsed(payload))))


def decode_load(payload: bytes) -> LoadReport:
    """Return the load that an answer of ``GET /slots`` tells; raises as `decode` does."""
    told = _parsed(payload)
    return LoadReport(
        running=told.running,
        waiting=told.waiting,
        queued_tokens=told.queued_tokens,
        prefill_tokens_per_s=told.tokens_per_s,
        capacity_tokens=told.capacity_tokens,
    )


def _parsed(payload: bytes) -> _Slots:
    if len(payload) > MAX_ANSWER_BYTES:
        raise DecodeError("malformed", f"an answer of {len(payload)} bytes")
    try:
        return msgspec.json.decode(payload, type=_Slots)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError("malformed", str(error)) from error


def _stores(told: _Slots) -> Iterator[BlocksStored]:
    for slot in told.slots:
        whole = len(slot.tokens) // BLOCK * BLOCK
        if whole:
            yield BlocksStored(_handles(slot.tokens), None, slot.tokens[:whole], BLOCK)


def _handles(tokens: list[int]) -> tuple[bytes, ...]:
    """Name each whole block by everything from the beginning to its end."""
    packed = array("I", tokens)
    state = blake2b(digest_size=16)
    handles = []
    for end in range(BLOCK, len(packed) + 1, BLOCK):
        state.update(packed[end - BLOCK : end].tobytes())
        handles.append(state.digest())
    return tuple(handles)


class Engine(NamedTuple):
    """What `prefixroute replay --engine slots` finds through the entry-point group ``prefixroute.engines``."""

    name: str
    decode: Callable[[bytes], EngineBatch]


ENGINE: Final = Engine("slots", decode)


class SlotsWatcher:
    """Asks an engine for its slots again and again.

    `on_batch` gets each new state, `on_load` each new load; what is as it was is told to nobody. `client` is closed by
    whoever opened it. While the engine does not answer its state is in doubt: a gap is told, once, and the first answer
    after it ends the doubt.
    """

    def __init__(
        self,
        url: str,
        on_batch: Callable[[EngineBatch], Any],
        on_load: Callable[[LoadReport], Any],
        client: httpx.AsyncClient,
        *,
        interval_s: float = 0.1,
        timeout_s: float = 2.0,
    ) -> None:
        self.polls = 0
        self.failures = 0
        self._url = url.rstrip("/") + "/slots"
        self._on_batch = on_batch
        self._on_load = on_load
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._batch: EngineBatch | None = None
        self._load: LoadReport | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._interval_s)

    async def poll(self) -> bool:
        """Ask once, and tell what is new; return whether the engine gave an answer that can be read."""
        self.polls += 1
        try:
            reply = await self._client.get(self._url, timeout=self._timeout_s)
            reply.raise_for_status()
            batch, load = decode(reply.content), decode_load(reply.content)
        except (httpx.HTTPError, DecodeError):
            self.failures += 1
            if self._batch is not None:
                self._batch = None
                self._on_batch(EngineBatch((StreamGap(),)))
            return False
        if batch != self._batch:
            self._batch = batch
            self._on_batch(batch)
        if load != self._load:
            self._load = load
            self._on_load(load)
        return True
