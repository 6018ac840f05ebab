"""SGLang's KV-cache events, as bytes or as its publisher's objects, to engine-neutral events.

Rules, beside those of `prefixroute_streams.batch` and `prefixroute_streams.fields`:
1. Arrays are SGLang up to 0.5.18, where the last element of a salted store is a map (vLLM has a text in that place);
   maps are 0.5.20 on.
2. A handle is whatever the engine says, a signed int as a rule: it is opaque and compared for equality alone.
3. A clear names no tier and clears them all.
4. ``session_id`` and ``lora_id`` (always null) do not separate caches; ``cache_salt`` and ``lora_name`` do.

What the events do not tell: ``extra_key``. Equal tokens under two extra keys are announced with equal hashes, once
each, and removed once each; counting copies keeps that right, but such a page looks like one of a plain prompt. The
same is true of salts up to 0.5.17. The caller keeps such requests out of routing, and `cached_tokens` corrects.

Bigrams. With EAGLE a page is `page_size` pairs (t0, t1), (t1, t2) ... and holds the KV of as many tokens: the first
members, t0 to t[page_size - 1]. The second member of its last pair is the first token of the next page, on which the
page depends but whose KV it does not hold. So a page is passed on as its first members:
- The pages of a chain then tile its tokens, each once, and a child goes on where its parent ends, in this event or in
  another. A path of n tokens has n - 1 pairs, and the KV of its last token is claimed by nobody, which is true.
- A prompt that agrees with a cached path in more tokens than a page boundary is judged exactly. One that leaves the
  path *at* a boundary agrees with the first members of the page before it, but not with its last pair: the estimate
  is one page high, never more, since a radix tree holds all pages above. Claiming a page less would be low for every
  prompt that goes on, to be exact for 1 in `page_size` that do not; claiming it by the second members would need the
  token after a canonical block in that block's key, which no other engine has.
- Pairs that do not chain within an event give no path of tokens: such pages are counted, never matched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from prefixroute_streams import Engine, EventForm, Forms, decode_objects, decode_payload
from prefixroute_streams.fields import (
    MAX_BLOCK_SIZE,
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
    Handle,
    Namespace,
)

_EIGHTH: Final = "element 8"  # a name that no map has

# Field order of array-shaped events, tag excluded. The last one is there in 0.5.18 only, and only with a salt.
_STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    _EIGHTH,
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium")

# What EXTERNAL storage holds any node can load: it keeps its own name, and gets no credit.
_TIERS: Final = {"gpu": GPU, "cpu": CPU, "cpu_pinned": CPU, "disk": DISK}


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode the payload frame of one live or replayed message, of SGLang 0.5.9 to 0.5.23.

    Raises `DecodeError` when the batch as a whole cannot be read, see `prefixroute_streams.batch.decode_payload`.
    O(bytes).
    """
    return decode_payload(payload, _EVENTS, _LAYOUT)


def batch_of(batch: object, rank: int = 0) -> EngineBatch:
    """Decode the batch object that a publisher inside the engine's process gets; `rank` counts when it names none.

    Raises `DecodeError` as `decode_batch` does. O(events' sizes); nothing of the object is kept.
    """
    return decode_objects(batch, "attn_dp_rank", rank, _EVENTS)


def _decode_stored(fields: Fields) -> Sequence[EngineEvent]:
    more = fields.get(_EIGHTH)
    if more is not None:
        if type(more) is not dict:
            raise MalformedError(f"{_EIGHTH}: not a map")
        fields = {**more, **fields}
    handles = _handles(fields)
    parent = fields.get("parent_block_hash")
    tokens, chained = _tokens(fields)
    block_size = read_count(fields, "block_size", MAX_BLOCK_SIZE)
    salt = read_text(fields, "cache_salt")
    told, contents, mappable = read_extra_keys(
        fields.get("extra_keys"), len(handles), block_size, parent is None, read_text(fields, "lora_name")
    )
    stored = BlocksStored(
        handles,
        None if parent is None else _handles({"block_hashes": [parent]})[0],
        tokens,
        block_size,
        read_tier(fields, _TIERS),
        namespace=Namespace(read_lora(fields), salt or told),
        contents=contents,
        mappable=mappable and chained and not (salt and told and salt != told),
    )
    return (stored,)


def _decode_removed(fields: Fields) -> Sequence[EngineEvent]:
    return (BlocksRemoved(_handles(fields), read_tier(fields, _TIERS)),)


def _decode_all_cleared(fields: Fields) -> Sequence[EngineEvent]:
    return (BlocksCleared(None),)


_EVENTS: Final[Forms] = {
    "BlockStored": EventForm(_STORED_FIELDS, _decode_stored),
    "BlockRemoved": EventForm(_REMOVED_FIELDS, _decode_removed),
    "AllBlocksCleared": EventForm((), _decode_all_cleared),
}

# --- maps of today -----------------------------------------------------------------------------------------


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: list[int] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_SIZE)] | None = None
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    locality: Any = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str | None = None
    locality: Any = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


def _joins(last: _Removed, event: _Removed) -> bool:
    return event.medium == last.medium and event.locality == last.locality


def _convert(event: _Stored | _Removed | _Cleared, told: int) -> EngineEvent:
    if type(event) is _Stored:
        handles = tuple(event.block_hashes)
        size = event.block_size or 0
        lora, salt = lora_of(event.lora_name, event.lora_id), event.cache_salt or ""
        keyed, contents, mappable = read_extra_keys(
            event.extra_keys, len(handles), size, event.parent_block_hash is None, event.lora_name or ""
        )
        return BlocksStored(
            handles,
            event.parent_block_hash,
            array("I", event.token_ids or ()),
            size,
            tier_of(event.medium, event.locality, _TIERS),
            namespace=Namespace(lora, salt or keyed) if lora or salt or keyed else DEFAULT_NAMESPACE,
            contents=contents,
            mappable=mappable and not (salt and keyed and salt != keyed),
        )
    if type(event) is _Removed:
        return BlocksRemoved(tuple(event.block_hashes), tier_of(event.medium, event.locality, _TIERS), told=told)
    return BlocksCleared(None)


_LAYOUT: Final = Layout(_Stored | _Removed | _Cleared, _Removed, _convert, _joins)

ENGINE: Final = Engine("sglang", decode_batch, binding_hosts=("*", "::", "0.0.0.0"))
"""Found by its name through the entry-point group. 0.0.0.0 binds from 0.5.17 on."""


def _handles(fields: Fields) -> tuple[Handle, ...]:
    hashes = fields.get("block_hashes")
    if type(hashes) is not list:
        raise MalformedError("block_hashes: not a list")
    if not set(map(type, hashes)) <= {int, bytes}:
        raise MalformedError("block hash: neither an int nor bytes")
    return tuple(hashes)


def _tokens(fields: Fields) -> tuple[array[int], bool]:
    """Return the tokens whose KV the pages hold, and whether they are a path."""
    pairs = fields.get("token_ids")
    if type(pairs) is not list or not pairs or type(pairs[0]) not in (list, tuple):
        return read_tokens(fields), True
    if not set(map(type, pairs)) <= {list, tuple} or set(map(len, pairs)) != {2}:
        raise MalformedError("token_ids: neither ints nor pairs of them")
    firsts, seconds = (read_tokens({"token_ids": list(members)}) for members in zip(*pairs, strict=True))
    return firsts, firsts[1:] == seconds[:-1]
