"""The typed way of reading an engine's maps against the tolerant one: the same events, or left to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import prefixroute_sglang.decode as sglang
import prefixroute_vllm.decode as vllm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixroute_streams.batch import Forms, decode_payload
from prefixroute_streams.layout import Layout

from prefixroute import BlocksRemoved, BlocksStored, DecodeError, EngineBatch, EngineEvent


class Ways(NamedTuple):
    """An engine's layout and its forms."""

    layout: Layout
    forms: Forms


ENGINES = {"vllm": Ways(vllm._LAYOUT, vllm._EVENTS), "sglang": Ways(sglang._LAYOUT, sglang._EVENTS)}
BOTH = pytest.mark.parametrize("engine", ENGINES)


def payload(*events: Any, ts: object = 1.5, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([ts, events, rank])


def joined(events: tuple[EngineEvent, ...]) -> list[EngineEvent]:
    """Neighbouring removals as one, as the typed way has them."""
    found: list[EngineEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, BlocksRemoved) and isinstance(last, BlocksRemoved) and _rest(event) == _rest(last):
            found[-1] = BlocksRemoved(last.handles + event.handles, *_rest(event))
        else:
            found.append(event)
    return found


def _rest(event: BlocksRemoved) -> tuple[str, int, bool]:
    return event.tier, event.group, event.last_copy


def stored(**fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    return event | {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


def removed(*handles: object, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(handles), "medium": "GPU"} | fields


# --- by hand -----------------------------------------------------------------------------------------------


@BOTH
def test_neighbouring_removals_of_one_tier_are_one_event_that_says_how_many_it_was(engine: str) -> None:
    events = [removed(1), removed(2, 3), removed(4, medium="CPU"), removed(5, medium="CPU"), stored(), removed(6)]
    batch = ENGINES[engine].layout.decode(payload(*events))
    assert batch is not None
    first, second, store, last = batch.events
    assert (first, second, last) == (BlocksRemoved((1, 2, 3)), BlocksRemoved((4, 5), "cpu"), BlocksRemoved((6,)))
    assert isinstance(store, BlocksStored)
    assert [event.told for event in batch.events if isinstance(event, BlocksRemoved)] == [2, 2, 1]
    assert batch.told == 6


def test_removals_of_two_groups_or_localities_stay_apart() -> None:
    events = [removed(1, group_idx=0), removed(2, group_idx=1), removed(3, group_idx=1, locality="REMOTE")]
    batch = vllm._LAYOUT.decode(payload(*events))
    assert batch is not None
    assert batch.events == (BlocksRemoved((1,)), BlocksRemoved((2,), group=1), BlocksRemoved((3,), "remote-gpu", 1))


@BOTH
@pytest.mark.parametrize(
    "event",
    [
        ["BlockRemoved", [1], "GPU"],
        {"type": "NewKind"},
        {"block_hashes": [1]},
        removed("x"),
        removed(True),
        removed(b"12345678"),
        removed(1, medium=7),
        stored(token_ids=[-1, 2, 3, 4]),
        stored(token_ids=[2**32, 2, 3, 4]),
        stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]),
        stored(block_size=-1),
        stored(block_size=2**21),
        stored(block_size=2.0),
        stored(extra_keys="?"),
        stored(lora_id="a"),
        stored(medium=b"GPU"),
        stored(parent_block_hash="x"),
        7,
    ],
    ids=str,
)
def test_what_is_not_of_the_layout_is_left_to_the_tolerant_way(engine: str, event: object) -> None:
    data = payload(removed(5), event, removed(6))
    assert ENGINES[engine].layout.decode(data) is None
    batch = decode_payload(data, ENGINES[engine].forms, ENGINES[engine].layout)
    assert batch == decode_payload(data, ENGINES[engine].forms)
    assert (batch.events[0], batch.events[-1]) == (BlocksRemoved((5,)), BlocksRemoved((6,)))


def test_copies_that_are_left_are_read_the_tolerant_way() -> None:
    data = payload(removed(5, remaining_copy_counts=[0]))
    assert vllm._LAYOUT.decode(data) is None
    assert vllm.decode_batch(data).events == (BlocksRemoved((5,), last_copy=True),)


@BOTH
@pytest.mark.parametrize(
    ("ts", "rank", "kind"),
    [
        (float("nan"), 0, "timestamp"),
        (float("inf"), 0, "timestamp"),
        ("now", 0, "timestamp"),
        (1, -1, "rank"),
        (1, "0", "rank"),
        (1, True, "rank"),
    ],
    ids=str,
)
def test_heads_that_are_refused_are_refused_by_both(engine: str, ts: object, rank: object, kind: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_payload(payload(ts=ts, rank=rank), ENGINES[engine].forms, ENGINES[engine].layout)
    assert caught.value.kind == kind


@BOTH
def test_rank_and_what_follows_it_may_be_there_or_not(engine: str) -> None:
    for head in ([1, [removed(1)]], [1, [removed(1)], None], [1, [removed(1)], 3, "more"]):
        batch = ENGINES[engine].layout.decode(msgspec.msgpack.encode(head))
        assert batch == EngineBatch((BlocksRemoved((1,)),), 3 if len(head) > 3 else 0, 1.0)


# --- at random ---------------------------------------------------------------------------------------------

WHOLE = st.integers(0, 2**64 - 1)
HASH = st.one_of(WHOLE, WHOLE, WHOLE, st.integers(-(2**63), -1), st.binary(max_size=9), st.none(), st.booleans())
TEXT = st.one_of(st.none(), st.sampled_from(["", "GPU", "cpu", "CPU_PINNED", "odd", "REMOTE", "salt", "lo"]), WHOLE)
ITEM = st.one_of(st.text(max_size=3), st.tuples(st.text(max_size=2), st.integers(-3, 9)), st.integers(0, 3))
KEYS = st.one_of(st.none(), st.lists(st.none() | st.lists(ITEM, max_size=2), max_size=3), st.just("?"))
TOKEN = st.one_of(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**32 - 1), st.integers(-1, 2**33))


def maps(kind: str, fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=fields)


SHARED = {"block_hashes": st.lists(HASH, max_size=3), "medium": TEXT, "group_idx": st.none() | st.integers(-1, 2)}
SHARED |= {"locality": TEXT}
STORES = maps(
    "BlockStored",
    SHARED
    | {
        "parent_block_hash": HASH,
        "token_ids": st.none() | st.lists(TOKEN, max_size=6),
        "block_size": st.none() | st.integers(-1, 4),
        "lora_id": st.none() | st.integers(0, 2) | st.just("a"),
        "lora_name": TEXT,
        "extra_keys": KEYS,
        "kv_cache_spec_kind": TEXT,
        "cache_salt": TEXT,
        "session_id": TEXT,
    },
)
REMOVALS = maps("BlockRemoved", SHARED | {"remaining_copy_counts": st.none() | st.lists(st.integers(0, 1), max_size=3)})
CLEARS = st.sampled_from([{"type": "AllBlocksCleared"}, {"type": "TierBlocksCleared", "medium": "cpu"}])
PLAIN = st.builds(lambda handles, medium: removed(*handles, medium=medium), st.lists(WHOLE, max_size=2), st.just("GPU"))


def outcome(decode: Callable[[bytes], EngineBatch], data: bytes) -> EngineBatch | str:
    try:
        return decode(data)
    except DecodeError as error:
        return error.kind


@BOTH
@settings(derandomize=True, deadline=None, max_examples=400, database=None)
@given(
    events=st.lists(st.one_of(STORES, REMOVALS, PLAIN, PLAIN, CLEARS), max_size=4),
    head=st.sampled_from([(1.5, 0), (2, None), (1.5, 3)]),
)
def test_both_ways_read_the_same(engine: str, events: list[dict[str, Any]], head: tuple[Any, Any]) -> None:
    data = payload(*events, ts=head[0], rank=head[1])
    layout, forms = ENGINES[engine]
    typed, tolerant = layout.decode(data), decode_payload(data, forms)
    if typed is not None:
        # Removals that name a tier in two words stay apart when they are typed.
        assert joined(typed.events) == joined(tolerant.events)
        assert (typed.rank, typed.ts) == (tolerant.rank, tolerant.ts)
        assert typed.told == len(events)


@BOTH
@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(
    data=st.data(),
    events=st.lists(st.one_of(PLAIN, st.builds(stored), CLEARS), min_size=1, max_size=3),
)
def test_damaged_bytes_are_no_error_of_the_typed_way(engine: str, data: st.DataObject, events: list[Any]) -> None:
    good = bytearray(payload(*events))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    layout, forms = ENGINES[engine]
    typed = layout.decode(bytes(good))
    assert typed is None or isinstance(typed, EngineBatch)
    if typed is None:
        assert outcome(partial(decode_payload, forms=forms, layout=layout), bytes(good)) == outcome(
            partial(decode_payload, forms=forms), bytes(good)
        )
