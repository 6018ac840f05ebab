"""vLLM's KV-cache events, as bytes of one published batch, to engine-neutral events.

Rules, beside those of `prefixroute_streams.batch` and `prefixroute_streams.fields`:
1. Arrays are vLLM 0.9 to 0.23, maps 0.24 on.
2. A handle is always an unsigned 64-bit int, see `_handle`.
3. A full report looks like a store. It is known by the session of the request that asked for it, see `REPORT_SESSION`.

Until 0.16 the events name neither salts nor images: such requests cannot be told from plain ones, and the
caller has to keep them out of routing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from prefixroute_streams import MAX_PAYLOAD_BYTES, Engine, EventForm, Forms, decode_objects, decode_payload
from prefixroute_streams.fields import (
    MASK_64,
    MAX_BLOCK_SIZE,
    MAX_WINDOW,
    Fields,
    MalformedError,
    lora_of,
    read_count,
    read_extra_keys,
    read_lora,
    read_text,
    read_tier,
    read_tokens,
    tier_of,
)
from prefixroute_streams.layout import Layout

from prefixroute.events import (
    CPU,
    DEFAULT_NAMESPACE,
    DISK,
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
    Namespace,
)

__all__ = ["ENGINE", "MAX_BLOCK_SIZE", "MAX_PAYLOAD_BYTES", "REPORT_SESSION", "batch_of", "decode_batch"]

REPORT_SESSION: Final = "prefixroute-report"
"""How the ``session_id`` of a request with ``"vllm_xargs": {"kv_cache_report_mode": "full"}`` begins (0.30 on).

vLLM tells the blocks that such a request reuses again, from the root, in no way different from a store. What the same
request stores itself follows below them, or begins at the root if it reuses nothing; so of its events those at the root
tell what the engine holds, and not how often.
"""

# Field order of array-shaped events, tag excluded, as of 0.23.0. Fields were only ever appended.
_STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")

# 0.26 said CPU, FS and OBJ, 0.27.1 says CPU and STORAGE, the Mooncake connector says lower-case cpu.
_TIERS: Final = {
    "gpu": GPU,
    "cpu": CPU,
    "cpu_pinned": CPU,
    "storage": DISK,
    "fs": DISK,
    "obj": DISK,
    "disk": DISK,
}


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode the payload frame of one live or replayed message, of any vLLM from 0.9 to 0.33.

    Raises `DecodeError` when the batch as a whole cannot be read, see `prefixroute_streams.batch.decode_payload`.
    O(bytes).
    """
    return decode_payload(payload, _EVENTS, _LAYOUT)


def batch_of(batch: object, rank: int = 0) -> EngineBatch:
    """Decode the batch object that a publisher inside the engine's process gets; `rank` counts when it names none.

    Raises `DecodeError` as `decode_batch` does. O(events' sizes); nothing of the object is kept.
    """
    return decode_objects(batch, "data_parallel_rank", rank, _EVENTS)


def _decode_stored(fields: Fields) -> Sequence[EngineEvent]:
    handles = _handles(fields)
    parent, session = fields.get("parent_block_hash"), fields.get("session_id")
    tokens = read_tokens(fields)
    block_size = read_count(fields, "block_size", MAX_BLOCK_SIZE)
    salt, contents, mappable = read_extra_keys(
        fields.get("extra_keys"), len(handles), block_size, parent is None, read_text(fields, "lora_name")
    )
    stored = BlocksStored(
        handles,
        None if parent is None else _handle(parent),
        tokens,
        block_size,
        read_tier(fields, _TIERS),
        read_count(fields, "group_idx", MASK_64),
        read_text(fields, "kv_cache_spec_kind"),
        Namespace(read_lora(fields), salt),
        contents,
        mappable,
        parent is None and _reports(session),
        read_count(fields, "kv_cache_spec_sliding_window", MAX_WINDOW),
    )
    return (stored,)


def _decode_removed(fields: Fields) -> Sequence[EngineEvent]:
    handles, tier, group = _handles(fields), read_tier(fields, _TIERS), read_count(fields, "group_idx", MASK_64)
    left = fields.get("remaining_copy_counts")  # proposed by vllm#48933: copies left of each hash
    if type(left) is not list or len(left) != len(handles):
        return (BlocksRemoved(handles, tier, group),)
    runs = groupby(zip(handles, left, strict=True), key=lambda pair: type(pair[1]) is int and pair[1] == 0)
    return [BlocksRemoved(tuple([h for h, _ in run]), tier, group, last) for last, run in runs]


def _decode_all_cleared(fields: Fields) -> Sequence[EngineEvent]:
    # It names no tier: a prefix-cache reset clears the GPU pool only (vllm#57296).
    return (BlocksCleared(GPU),)


def _decode_tier_cleared(fields: Fields) -> Sequence[EngineEvent]:
    return (BlocksCleared(read_tier(fields, _TIERS)),)


_EVENTS: Final[Forms] = {
    "BlockStored": EventForm(_STORED_FIELDS, _decode_stored),
    "BlockRemoved": EventForm(_REMOVED_FIELDS, _decode_removed),
    "AllBlocksCleared": EventForm((), _decode_all_cleared),
    "TierBlocksCleared": EventForm(("medium",), _decode_tier_cleared),  # proposed by vllm#57296
}

# --- maps of today -----------------------------------------------------------------------------------------

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Count]
    parent_block_hash: _Count | None = None
    token_ids: list[_Count] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE)] | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: _Count | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW)] | None = None
    locality: Any = None
    session_id: Any = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Count]
    medium: str | None = None
    group_idx: _Count | None = None
    locality: Any = None
    remaining_copy_counts: Any = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


def _joins(last: _Removed, event: _Removed) -> bool:
    return event.medium == last.medium and event.group_idx == last.group_idx and event.locality == last.locality


def _convert(event: _Stored | _Removed | _Cleared, told: int) -> EngineEvent:
    if type(event) is _Stored:
        handles = tuple(event.block_hashes)
        lora = lora_of(event.lora_name, event.lora_id)
        size = event.block_size or 0
        salt, contents, mappable = read_extra_keys(
            event.extra_keys, len(handles), size, event.parent_block_hash is None, event.lora_name or ""
        )
        return BlocksStored(
            handles,
            event.parent_block_hash,
            array("I", event.token_ids or ()),
            size,
            tier_of(event.medium, event.locality, _TIERS),
            event.group_idx or 0,
            event.kv_cache_spec_kind or "",
            Namespace(lora, salt) if lora or salt else DEFAULT_NAMESPACE,
            contents,
            mappable,
            event.parent_block_hash is None and _reports(event.session_id),
            event.kv_cache_spec_sliding_window or 0,
        )
    if type(event) is _Removed:
        if event.remaining_copy_counts is not None:
            raise MalformedError("remaining_copy_counts: read with the fields")
        tier = tier_of(event.medium, event.locality, _TIERS)
        return BlocksRemoved(tuple(event.block_hashes), tier, event.group_idx or 0, told=told)
    return BlocksCleared(GPU)


_LAYOUT: Final = Layout(_Stored | _Removed | _Cleared, _Removed, _convert, _joins)

ENGINE: Final = Engine("vllm", decode_batch)
"""Found by its name through the entry-point group."""


def _reports(session: object) -> bool:
    """Whether a store is of a request that asked for a report."""
    return isinstance(session, str) and session.startswith(REPORT_SESSION)


def _handles(fields: Fields) -> tuple[int, ...]:
    hashes = fields.get("block_hashes")
    if type(hashes) is not list:
        raise MalformedError("block_hashes: not a list")
    if set(map(type, hashes)) == {int} and min(hashes) >= 0:
        return tuple(hashes)
    return tuple([_handle(value) for value in hashes])


def _handle(value: object) -> int:
    """One canonical form for every hash: the low 64 bits, unsigned.

    From 0.11.0 to 0.23.0 offload events carry raw bytes even while GPU events carry ints, so one block comes
    in both forms and only the reduction joins them. The int form is the low 64 bits of the digest read
    big-endian: all 140 digests of the recorded sha256 stream, recomputed from its tokens, end in the published
    int. Two of n live blocks of one engine collide with probability n^2 / 2^65: 3e-8 for a million, no more
    than vLLM's own default takes. The builtin hash of 0.9 and 0.10 is signed, hence the mask.
    """
    if type(value) is int:
        return value & MASK_64
    if type(value) is bytes and value:
        return int.from_bytes(value[-8:], "big")
    raise MalformedError("block hash: neither an int nor bytes")
