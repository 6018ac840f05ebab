"""Any bytes into the decoders of gossip and of both engines, the codec and a node: a value or `DecodeError`, no other
exception, bounded memory.
"""

from __future__ import annotations

import random
import runpy
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import prefixroute_sglang
import prefixroute_vllm
import pytest
import sglang_streams
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixroute import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    DatagramRejected,
    DecodeError,
    Domain,
    EngineBatch,
    Node,
    NodeSettings,
    Residency,
    UnknownEvent,
)
from prefixroute.keys.keyset import checksum
from prefixroute.keys.rice import decode_sorted, encode_sorted
from prefixroute.replication.transfer import Assembly, decode_keys
from prefixroute.replication.wire import (
    HEADER_BYTES,
    KEY_LIMIT,
    MAX_DATAGRAM_BYTES,
    MAX_MISSING,
    Envelope,
    Update,
    decode,
)

FOLDER = Path(__file__).parents[1] / "data" / "corpus"
MAKE = runpy.run_path(str(FOLDER / "make.py"))
CORPUS: dict[str, tuple[str, bytes]] = MAKE["CORPUS"]
HELD: list[int] = MAKE["HELD"]
DOMAIN, tagged, says, claim = MAKE["DOMAIN"], MAKE["tagged"], MAKE["says"], MAKE["claim"]
SECRET = DOMAIN.secret
BODIES = [data[HEADER_BYTES:] for _, data in CORPUS.values() if len(data) > HEADER_BYTES]
UPDATES = [
    update
    for kind, data in CORPUS.values()
    if kind in ("", "keys")
    for update in decode(data, SECRET).message.updates
    if update.added or update.removed
]
QUICK = settings(derandomize=True, deadline=None, max_examples=200)
EVIL = [0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xC9, 0xCF, 0xD9, 0xDB, 0xDC, 0xDD, 0xDF, 0xFF]


def sorted_keys(values: list[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def receiver(**bounds: int) -> Node:
    """Node "b": it owns "b/0" and holds version 2 of "a/0"."""
    node = Node("b", DOMAIN, rng=random.Random(1), now=0.0, settings=NodeSettings(replay_window=0, **bounds))  # type: ignore[arg-type]
    node.add_endpoint("0", incarnation=1, now=0.0)
    node.add_peer("a", "at a", 0.0)
    total = checksum(sorted_keys(HELD))
    update = ["a/0", 1, 0, 2, total, 1, 0, 0, encode_sorted(sorted_keys(HELD), KEY_LIMIT), b""]
    node.receive_datagram(says([["a/0", 1, 1, 2, total & 0xFFFF]], [update]), "at a", 0.0)
    assert node.digests()["a/0"].keys.tolist() == HELD
    node.events()
    node.datagrams_to_send(0.0)
    return node


def outcome(data: bytes) -> str:
    """The kind of error that a datagram gives, "" if it decodes."""
    try:
        assert isinstance(decode(data, SECRET), Envelope)
    except DecodeError as error:
        return error.kind
    return ""


def feed(node: Node, data: bytes, now: float) -> None:
    """Let a node take a datagram and do what then is due; what it sends must be good and within its budgets."""
    node.receive_datagram(data, "at a", now)
    sent = node.datagrams_to_send(now)
    assert sum(len(datagram.data) for datagram in sent) <= node.settings.burst_bytes
    node.handle_timer(now)
    for datagram in [*sent, *node.datagrams_to_send(now)]:
        assert len(datagram.data) <= node.settings.datagram_bytes
        assert outcome(datagram.data) == ""
    node._check()


# --- the corpus --------------------------------------------------------------------------------------------


def test_the_corpus_is_what_its_script_makes() -> None:
    assert {path.stem: path.read_bytes() for path in FOLDER.glob("*.bin")} == {
        name: data for name, (_, data) in CORPUS.items()
    }
    assert len({data for _, data in CORPUS.values()}) == len(CORPUS)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.bin")), ids=lambda path: path.stem)
def test_a_datagram_of_the_corpus_is_taken_for_what_it_is(path: Path) -> None:
    kind, data = CORPUS[path.stem][0], path.read_bytes()
    assert outcome(data) == (kind if kind != "keys" else "")
    node = receiver()
    feed(node, data, 0.1)
    refusals = [event.kind for event in node.events() if isinstance(event, DatagramRejected)]
    assert refusals == ([kind] if kind else [])
    # Nothing that was refused has left a trace but its count, or a copy that is asked for anew.
    held = node.digests().get("a/0")
    if kind:
        assert held is not None
        assert held.keys.tolist() in (HELD, [])


def test_the_whole_corpus_into_one_node_in_any_order() -> None:
    rng = random.Random(5)
    for _ in range(20):
        node, now = receiver(), 0.1
        for data in rng.sample([data for _, data in CORPUS.values()], len(CORPUS)):
            now += rng.choice((0.0, 0.01, 1.1))
            feed(node, data, now)
        assert set(node.digests()) <= {"a/0", "b/0", "c/0", "z/0"}


# --- mutations ---------------------------------------------------------------------------------------------


@st.composite
def mutants(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed that was flipped, cut, spliced with another or repeated in part, once or a few times."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(1, 12))
        how = draw(st.sampled_from(["flip", "evil", "cut", "tail", "splice", "repeat", "huge"]))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "evil" and at < len(data):
            data[at] = draw(st.sampled_from(EVIL))
        elif how == "cut":
            del data[at : at + length]
        elif how == "tail":
            del data[at:]
        elif how == "splice":
            other = draw(st.sampled_from(seeds))
            start = draw(st.integers(0, len(other)))
            data[at : at + draw(st.sampled_from([0, length]))] = other[start : start + 4 * length]
        elif how == "repeat":
            data[at:at] = data[max(0, at - length) : at] * draw(st.integers(1, 4))
        elif how == "huge":
            data[at : at + 4] = b"\xff\xff\xff\xff"
    return bytes(data)


@settings(QUICK, max_examples=600)
@given(st.binary(max_size=200) | mutants(BODIES), st.integers(0, 4))
@example(b"", 1)
def test_any_body_gives_a_value_or_malformed(body: bytes, kind: int) -> None:
    assert outcome(tagged(body, kind)) in ("", "malformed") if 1 <= kind <= 3 else ("kind",)


@settings(QUICK, max_examples=300)
@given(st.binary(max_size=80) | mutants([data for _, data in CORPUS.values()]))
def test_a_mutant_without_a_right_tag_is_refused_before_its_body_is_read(data: bytes) -> None:
    if data not in {good for _, good in CORPUS.values()}:
        assert outcome(data) in ("truncated", "magic", "version", "forged")
    feed(receiver(), data, 0.1)


@QUICK
@given(
    st.lists(st.tuples(mutants(BODIES), st.integers(1, 3), st.sampled_from([0.0, 0.05, 1.1])), min_size=1, max_size=8)
)
def test_a_node_takes_any_bodies_under_a_right_tag(said: list[tuple[bytes, int, float]]) -> None:
    node, now = receiver(), 0.1
    for body, kind, wait in said:
        now += wait
        feed(node, tagged(body, kind), now)


@settings(QUICK, max_examples=300)
@given(st.sampled_from(UPDATES), st.data())
def test_a_node_takes_any_codes_in_a_well_formed_update(update: Update, data: st.DataObject) -> None:
    """A flipped byte of a datagram seldom reaches the codes; here every mutant does."""
    codes = [update.added, update.removed, *(other.added for other in UPDATES[:9]), b"\1\0\0\0\1\0\0\0\x80\0\0"]
    ranges = st.sampled_from([0, 1, 9, 25, 60, KEY_LIMIT - 1, KEY_LIMIT])
    bad = msgspec.structs.replace(
        update,
        endpoint="a/0",
        since=data.draw(st.sampled_from([0, 2])),
        lower=data.draw(st.just(update.lower) | ranges),
        upper=data.draw(st.just(update.upper) | ranges),
        added=data.draw(st.just(update.added) | mutants([code for code in codes if code])),
        removed=data.draw(st.just(update.removed) | mutants([code for code in codes if code])),
    )
    try:
        added, removed = decode_keys(bad, sorted_keys(HELD))
    except DecodeError as error:
        assert error.kind == "keys"
    else:
        upper = bad.upper or KEY_LIMIT
        for found in (added.tolist(), removed.tolist()):
            assert found == sorted(set(found))
            assert all(bad.lower <= key < upper for key in found)
        assert set(removed.tolist()) <= (set(HELD) if bad.since else set())
        # What was taken is the one encoding of it.
        assert encode_sorted(added - np.uint64(bad.lower), upper - bad.lower) == bad.added
    feed(receiver(), says([], [msgspec.structs.astuple(bad)]), 0.1)


@settings(QUICK, max_examples=400)
@given(
    st.binary(max_size=60)
    | mutants([encode_sorted(sorted_keys(HELD), universe) for universe in (61, 2**16, KEY_LIMIT)]),
    st.sampled_from([0, 1, 2, 61, 2**16, KEY_LIMIT, 2**56]),
)
def test_any_code_gives_a_set_in_its_universe_or_an_error(code: bytes, universe: int) -> None:
    try:
        values = decode_sorted(code, universe)
    except DecodeError as error:
        assert error.kind == "keys"
        return
    assert encode_sorted(values, universe) == code
    assert all(a < b for a, b in zip(values.tolist(), [*values.tolist()[1:], universe], strict=False))


# --- memory ------------------------------------------------------------------------------------------------


def peak_bytes(call: Any) -> int:
    """The most that a call has allocated at one moment."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [name for name, (kind, _) in CORPUS.items() if kind])
def test_what_a_hostile_datagram_claims_is_not_allocated(name: str) -> None:
    node, data = receiver(), CORPUS[name][1]
    node.receive_datagram(data, "at a", 0.1)
    assert peak_bytes(lambda: node.receive_datagram(data, "at a", 0.1)) < 40 * len(data) + 65536


@pytest.mark.parametrize("what", ["unary alone", "one among zeros", "densest", "densest beyond"])
def test_the_largest_codes_cost_a_fixed_factor(what: str) -> None:
    room = MAX_DATAGRAM_BYTES - 256
    ones = claim(8 * (room - 8), room - 8, b"\xff" * (room - 8))
    zeros = claim(1, room - 14, bytes(room - 8))
    dense = encode_sorted(np.arange(250_000, dtype=np.uint64), 250_000)
    code, universe = {
        "unary alone": (ones, 9),
        "one among zeros": (zeros[:-7] + b"\1" + zeros[-6:], KEY_LIMIT),
        "densest": (dense, 250_000),
        "densest beyond": (dense, 249_999),
    }[what]
    assert len(code) <= MAX_DATAGRAM_BYTES

    def call() -> None:
        try:
            decode_sorted(code, universe)
        except DecodeError as error:
            assert error.kind == "keys"

    call()
    assert peak_bytes(call) < 200 * len(code)


def test_parts_without_keys_leave_a_vector_that_still_fits() -> None:
    """However a transfer is shot full of holes, what is asked for of it is bounded."""
    node = receiver()
    parts = [["a/0", 1, 0, 3, 0, 1, 2 * i, 2 * i + 1, b"", b""] for i in range(2000)]
    for lower in range(0, 2000, 500):
        feed(node, says([], parts[lower : lower + 500]), 0.1)
    wanted = node._members.copies["a/0"].entry(0.1, False).want
    assert wanted is not None
    assert len(wanted.missing) == MAX_MISSING
    assert isinstance(node._members.copies["a/0"].assembly, Assembly)


# --- the decoders of engines' events -----------------------------------------------------------------------


class Wire(NamedTuple):
    """One engine's decoder, fields of its events, and real payloads."""

    decode: Callable[[bytes], EngineBatch]
    batch_of: Callable[[object, int], EngineBatch]
    is_handle: Callable[[object], bool]
    fields: list[str]
    seeds: list[bytes]


VLLM_FILES = sorted((FOLDER.parent / "vllm_events").rglob("*.msgpack"))
COMMON = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
]
WIRES = {
    "vllm": Wire(
        prefixroute_vllm.decode_batch,
        prefixroute_vllm.batch_of,
        lambda handle: type(handle) is int and 0 <= handle < 1 << 64,
        [*COMMON, "group_idx", "kv_cache_spec_kind", "locality", "remaining_copy_counts"],
        [path.read_bytes() for path in VLLM_FILES],
    ),
    "sglang": Wire(
        prefixroute_sglang.decode_batch,
        prefixroute_sglang.batch_of,
        lambda handle: type(handle) in (int, bytes),
        [*COMMON, "cache_salt", "session_id", "element 8"],
        [data for name in sglang_streams.SMALL for data in sglang_streams.payloads(name) if len(data) < 20_000],
    ),
}
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "TierBlocksCleared", "X"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
INTS = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4)
PAIRS = st.lists(st.lists(st.integers(0, 2**33), min_size=2, max_size=2), max_size=4)
# Values that are nearly right get further than any.
VALUES = ANYTHING | INTS | PAIRS | st.integers(0, 4) | st.sampled_from(["GPU", "CPU", "DISK", {"cache_salt": "s"}])


def arrays() -> st.SearchStrategy[object]:
    return st.builds(lambda tag, rest: [tag, *rest], TAGS, st.lists(VALUES, max_size=12))


def maps(wire: Wire) -> st.SearchStrategy[object]:
    fields = st.dictionaries(st.sampled_from(wire.fields), VALUES)
    return st.builds(lambda tag, fields: {"type": tag, **fields}, TAGS, fields)


def assert_total(wire: Wire, payload: bytes) -> EngineBatch | None:
    """A batch of usable events, or an error of a known kind; and a residency that takes what there is."""
    try:
        batch = wire.decode(payload)
    except DecodeError as error:
        assert error.kind in {"too_large", "malformed", "depth", "shape", "timestamp", "rank"}
        return None
    for event in batch.events:
        assert isinstance(event, BlocksStored | BlocksRemoved | BlocksCleared | UnknownEvent)
        if isinstance(event, BlocksStored | BlocksRemoved):
            assert all(wire.is_handle(handle) for handle in event.handles)
            assert event.tier == event.tier.lower() != ""
        if isinstance(event, BlocksStored):
            assert isinstance(event.tokens, array) and event.tokens.typecode == "I"
            assert 0 <= event.block_size <= 1 << 20
            assert all(0 <= item.start < len(event.handles) * event.block_size for item in event.contents)
    residency = Residency(Domain("m", "t", 16))
    residency.apply(batch)
    residency._check()
    return batch


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
class TestEngineDecoder:
    @given(payload=st.binary(max_size=400))
    @settings(max_examples=300, deadline=None)
    def test_any_bytes_give_a_batch_or_a_decode_error(self, wire: Wire, payload: bytes) -> None:
        assert_total(wire, payload)

    @given(data=st.data())
    @settings(max_examples=300, deadline=None)
    def test_mutated_real_payloads_give_a_batch_or_a_decode_error(self, wire: Wire, data: st.DataObject) -> None:
        payload = bytearray(data.draw(st.sampled_from(wire.seeds)))
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, len(payload) - 1))
            payload[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
            if not payload:
                break
        assert_total(wire, bytes(payload))

    @given(data=st.data(), ts=ANYTHING, rank=ANYTHING)
    @settings(max_examples=300, deadline=None)
    def test_a_bad_event_never_drops_its_siblings(
        self, wire: Wire, data: st.DataObject, ts: object, rank: object
    ) -> None:
        good: dict[str, object] = {"type": "BlockStored", "block_hashes": [3], "token_ids": [1, 2], "block_size": 2}
        events = data.draw(st.lists(arrays() | maps(wire) | ANYTHING, max_size=5))
        assert_total(wire, msgspec.msgpack.encode([ts, events, rank]))
        batch = assert_total(wire, msgspec.msgpack.encode([1.0, [good, *events, ["BlockRemoved", [5]]]]))
        assert batch is not None
        assert batch.events[0] == BlocksStored((3,), None, array("I", [1, 2]), 2)
        assert batch.events[-1] == BlocksRemoved((5,))
        assert len(batch.events) >= len(events) + 2

    @given(
        events=st.lists(ANYTHING | st.builds(array, st.just("q"), INTS.map(lambda xs: [x % 9 for x in xs])), max_size=4)
    )
    @settings(max_examples=100, deadline=None)
    def test_any_object_gives_a_batch_or_a_decode_error(self, wire: Wire, events: list[object]) -> None:
        for batch in ([], None, ObjectBatch(None, events), ObjectBatch(1.0, None)):
            with pytest.raises(DecodeError):
                wire.batch_of(batch, 0)
        found = wire.batch_of(ObjectBatch(1.0, [*events, BlockRemoved([5])]), 0)
        assert len(found.events) == len(events) + 1
        assert found.events[-1] == BlocksRemoved((5,))


class ObjectBatch(NamedTuple):
    ts: object
    events: object


class BlockRemoved:
    """As an engine's own struct: named by its tag, its fields are attributes."""

    def __init__(self, block_hashes: list[int]) -> None:
        self.block_hashes = block_hashes
