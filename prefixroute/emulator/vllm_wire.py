"""The emulated engine's cache events, in the shape that vLLM 0.24 and later put on the wire.

Rules:
1. Events are MessagePack maps with their name under ``type``. Fields without a default are always present,
   fields with one are left out while they hold it.
2. A batch is an array: time stamp, events, data-parallel rank. One engine step makes at most one batch.
3. A handle on the wire is the low 64 bits of a digest as an unsigned int, or the whole digest as bytes.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from prefixroute.events import Handle

GPU_MEDIUM = "GPU"
FULL_ATTENTION = "full_attention"


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """The engine cached blocks, root side first; `token_ids` covers the whole span."""

    block_hashes: tuple[Handle, ...]
    parent_block_hash: Handle | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    """The engine dropped one physical copy of each of these blocks; an eviction names one block."""

    block_hashes: tuple[Handle, ...]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The engine dropped every block of its GPU tier."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""Any of the three events."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One engine step that did something to the cache; `ts` is wall-clock seconds."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int = 0


_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(batch: Batch) -> bytes:
    """The MessagePack payload of one batch."""
    return _ENCODER.encode(batch)


def wire_handle(digest: bytes, as_int: bool) -> Handle:
    """The form of a block's digest that travels in events."""
    return int.from_bytes(digest[-8:], "big") if as_int else digest
