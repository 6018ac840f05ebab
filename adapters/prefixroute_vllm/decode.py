"""vLLM's KV-cache events, as bytes of one published batch, to engine-neutral events.

Rules:
1. Any bytes give an `EngineBatch` or `DecodeError`. The latter only when the batch itself cannot be read: a bad
   event becomes an `UnknownEvent` with a reason, and its siblings survive.
2. Events are decoded by tag, from arrays (vLLM 0.9 to 0.23) and maps (0.24 on). Unknown fields are ignored and
   missing ones are None. Arrays may have any length.
3. A handle is always an unsigned 64-bit int, see `_handle`.
4. When content identity is in doubt the event is not mappable: an under-estimate costs a cold prefill somewhere
   else, a false match costs one here and misleads every peer.

Until 0.16 the events name neither salts nor images: such requests cannot be told from plain ones, and the
caller has to keep them out of routing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

import msgspec

from prefixroute.errors import DecodeError
from prefixroute.events import (
    CPU,
    DISK,
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    EngineBatch,
    EngineEvent,
    Namespace,
    UnknownEvent,
)

MAX_PAYLOAD_BYTES: Final = 32 << 20
"""A larger payload is refused unread. A step of 131,072 tokens with as many evictions needs about 2 MiB."""

MAX_BLOCK_SIZE: Final = 1 << 20
"""No cache group has blocks of more tokens; hybrid models inflate them to a few thousand (vllm#43258)."""

_MASK_64: Final = (1 << 64) - 1
_TAG_CHARS: Final = 64  # tags name counters, so a hostile one must stay short

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

_Fields = dict[object, object]
_BAD_BYTES: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, TypeError)
"""What msgspec raises for them; the last two before 0.23, for text that is none and for keys that cannot be hashed."""
_UNDECODABLE: Final = object()
_plain: Final = msgspec.msgpack.Decoder().decode
_raw_items: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class _MalformedError(Exception):
    """A field cannot be used; the text becomes the reason of an `UnknownEvent`."""


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode the payload frame of one live or replayed message, of any vLLM from 0.9 to 0.33.

    Raises `DecodeError` when the batch as a whole cannot be read; its `kind` is one of ``too_large``,
    ``malformed``, ``depth``, ``shape``, ``timestamp`` and ``rank``. O(bytes); nothing is allocated because a
    length field claims it.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise DecodeError("too_large", f"payload of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    try:
        batch = _plain(payload)
    except _BAD_BYTES:
        batch = _decode_apart(payload)
    if type(batch) is not list or len(batch) < 2:
        raise DecodeError("shape", "a batch is an array of a timestamp, events and perhaps a rank")
    ts, events, rank = batch[0], batch[1], batch[2] if len(batch) > 2 else None
    if type(events) is not list:
        raise DecodeError("shape", "the second element of a batch is an array of events")
    if type(ts) not in (int, float) or not math.isfinite(ts):
        raise DecodeError("timestamp", "the first element of a batch is a finite number of seconds")
    if rank is not None and (type(rank) is not int or rank < 0):
        raise DecodeError("rank", "the third element of a batch is a data-parallel rank or null")
    decoded: list[EngineEvent] = []
    for event in events:
        decoded.extend(_decode_event(event))
    return EngineBatch(tuple(decoded), rank or 0, float(ts))


def _decode_apart(payload: bytes) -> list[object]:
    """Decode event by event, so that an invalid string in one event costs that event alone."""
    try:
        items = _raw_items(payload)
        head: list[object] = [_plain(item) for item in items[:1]]
        events = [_decode_alone(raw) for raw in _raw_items(items[1])] if len(items) > 1 else []
        return [*head, events, *(_plain(item) for item in items[2:3])]
    except RecursionError as error:
        raise DecodeError("depth", "nested too deeply") from error
    except _BAD_BYTES as error:
        raise DecodeError("malformed", str(error)) from error


def _decode_alone(raw: msgspec.Raw) -> object:
    try:
        return _plain(raw)
    except _BAD_BYTES:
        return _UNDECODABLE


def _decode_event(event: object) -> Sequence[EngineEvent]:
    if event is _UNDECODABLE:
        return (UnknownEvent("", "undecodable"),)
    if type(event) is dict:
        tag = event.get("type")
    elif type(event) is list and event:
        tag = event[0]
    else:
        return (UnknownEvent("", "neither an array nor a map"),)
    if type(tag) is not str:
        return (UnknownEvent("", "no tag"),)
    known = _EVENTS.get(tag)
    if known is None:
        return (UnknownEvent(tag[:_TAG_CHARS]),)
    names, decode = known
    fields: _Fields = event if type(event) is dict else dict(zip(names, event[1:], strict=False))
    try:
        return decode(fields)
    except _MalformedError as error:
        return (UnknownEvent(tag, str(error)),)


def _decode_stored(fields: _Fields) -> Sequence[EngineEvent]:
    handles = _handles(fields)
    parent = fields.get("parent_block_hash")
    tokens = _tokens(fields)
    block_size = _count(fields, "block_size", MAX_BLOCK_SIZE)
    lora = _text(fields, "lora_name")
    salt, contents, mappable = _extra_keys(fields.get("extra_keys"), len(handles), block_size, parent is None, lora)
    lora_id = fields.get("lora_id")
    if not lora and lora_id is not None:
        if type(lora_id) is not int:
            raise _MalformedError("lora_id: not an int")
        lora = f"id:{lora_id}"
    stored = BlocksStored(
        handles,
        None if parent is None else _handle(parent),
        tokens,
        block_size,
        _tier(fields),
        _count(fields, "group_idx", _MASK_64),
        _text(fields, "kv_cache_spec_kind"),
        Namespace(lora, salt),
        contents,
        mappable,
    )
    return (stored,)


def _decode_removed(fields: _Fields) -> Sequence[EngineEvent]:
    handles, tier, group = _handles(fields), _tier(fields), _count(fields, "group_idx", _MASK_64)
    left = fields.get("remaining_copy_counts")  # proposed by vllm#48933: copies left of each hash
    if type(left) is not list or len(left) != len(handles):
        return (BlocksRemoved(handles, tier, group),)
    runs = groupby(zip(handles, left, strict=True), key=lambda pair: type(pair[1]) is int and pair[1] == 0)
    return [BlocksRemoved(tuple([h for h, _ in run]), tier, group, last) for last, run in runs]


def _decode_all_cleared(fields: _Fields) -> Sequence[EngineEvent]:
    # It names no tier: a prefix-cache reset clears the GPU pool only (vllm#57296).
    return (BlocksCleared(GPU),)


def _decode_tier_cleared(fields: _Fields) -> Sequence[EngineEvent]:
    return (BlocksCleared(_tier(fields)),)


_EVENTS: Final[dict[str, tuple[tuple[str, ...], Callable[[_Fields], Sequence[EngineEvent]]]]] = {
    "BlockStored": (_STORED_FIELDS, _decode_stored),
    "BlockRemoved": (_REMOVED_FIELDS, _decode_removed),
    "AllBlocksCleared": ((), _decode_all_cleared),
    "TierBlocksCleared": (("medium",), _decode_tier_cleared),  # proposed by vllm#57296
}


# --- fields ------------------------------------------------------------------------------------------------


def _handles(fields: _Fields) -> tuple[int, ...]:
    hashes = fields.get("block_hashes")
    if type(hashes) is not list:
        raise _MalformedError("block_hashes: not a list")
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
        return value & _MASK_64
    if type(value) is bytes and value:
        return int.from_bytes(value[-8:], "big")
    raise _MalformedError("block hash: neither an int nor bytes")


def _tokens(fields: _Fields) -> array[int]:
    tokens = fields.get("token_ids")
    if tokens is None:
        return array("I")
    if type(tokens) is not list:
        raise _MalformedError("token_ids: not a list")
    try:
        return array("I", tokens)  # checks every token in C, 5 ns each, and packs them once for all users
    except (TypeError, OverflowError):
        raise _MalformedError("token_ids: not ints from 0 to 2**32 - 1") from None


def _count(fields: _Fields, name: str, most: int) -> int:
    value = fields.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= most:
        raise _MalformedError(f"{name}: not an int from 0 to {most}")
    return value


def _text(fields: _Fields, name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if type(value) is not str:
        raise _MalformedError(f"{name}: not a string")
    return value


def _tier(fields: _Fields) -> str:
    medium = _text(fields, "medium")[:_TAG_CHARS].lower() or GPU
    tier = _TIERS.get(medium, medium)
    # Every node can load a remote block, so it is kept apart from the tiers that make a node worth a forward.
    return f"remote-{tier}" if fields.get("locality") == "REMOTE" else tier


def _extra_keys(
    keys: object, blocks: int, block_size: int, root: bool, lora: str
) -> tuple[str, tuple[ContentSpan, ...], bool]:
    """What the extra keys of a stored event's blocks say: the salt, the items that start here, mappable or not.

    A block's entry is null or a list of: the LoRA name; a pair (identifier, offset) for each item that overlaps
    the block; the cache salt, in the prompt's first block only; a digest of prompt embeddings, as bytes. An
    offset counts from the start of the block; below zero the item began earlier and is in the chain already.

    In 0.17 and 0.18 an item is its bare identifier. In the first block of a prompt it cannot be told from a
    salt and is taken for one, which is safe: nobody asks for that namespace. Anywhere else its start is unknown.
    """
    if keys is None:
        return "", (), True
    if type(keys) is not list:
        raise _MalformedError("extra_keys: not a list")
    if not any(keys):
        return "", (), True
    if len(keys) != blocks:
        return "", (), False
    salts: list[str] = []
    contents: list[ContentSpan] = []
    mappable = True
    for number, entry in enumerate(keys):
        if entry is None:
            continue
        if type(entry) is not list:
            raise _MalformedError("extra_keys: an entry is neither null nor a list")
        first = root and number == 0
        # A salt may equal the LoRA name, and the name comes first.
        named = bool(lora and entry and entry[0] == lora)
        for key in entry[1:] if named else entry:
            item = _item(key)
            if first and type(key) is str:
                salts.append(key)
            elif item is None:
                mappable = False
            elif 0 <= item[1] < block_size:
                contents.append(ContentSpan(item[0], number * block_size + item[1]))
            elif first or item[1] >= 0:
                mappable = False
    if len(salts) > 1:
        return "", (), False
    return "".join(salts), tuple(contents), mappable


def _item(key: object) -> tuple[str, int] | None:
    if type(key) is list and len(key) == 2 and type(key[0]) is str and type(key[1]) is int:
        return key[0], key[1]
    return None
