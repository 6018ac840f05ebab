"""SGLang's events to engine-neutral ones: every encoding, recorded streams, bigrams, in-process objects, bad events."""

from __future__ import annotations

import random
from array import array
from enum import Enum
from itertools import pairwise
from typing import Any

import msgspec
import prefixroute_sglang
import prefixroute_vllm
import pytest
import sglang_streams as recorded
from matching import matched, trees_of
from prefixroute_sglang import ENGINE, batch_of, decode_batch
from sglang_streams import domain, prompt_of

from prefixroute import Namespace, Residency
from prefixroute.errors import DecodeError
from prefixroute.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    EngineBatch,
    StreamGap,
    UnknownEvent,
)

encode = msgspec.msgpack.encode


def decode_events(*events: object) -> tuple[Any, ...]:
    return decode_batch(encode([1.0, list(events), 0])).events


def decode_one(event: object) -> Any:
    (decoded,) = decode_events(event)
    return decoded


def stored(**fields: object) -> dict[str, object]:
    base: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [-7, 8],
        "parent_block_hash": None,
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
    }
    return base | fields


# --- bigrams -----------------------------------------------------------------------------------------------


def pairs(tokens: list[int]) -> list[list[int]]:
    return [list(pair) for pair in pairwise(tokens)]


def bigram_store(path: list[int], pages: range, size: int, base: int, parent: int | None) -> dict[str, object]:
    return stored(
        block_hashes=[base + page for page in pages],
        parent_block_hash=parent,
        token_ids=pairs(path)[pages.start * size : pages.stop * size],
        block_size=size,
    )


def test_a_bigram_page_is_the_tokens_whose_kv_it_holds() -> None:
    event = decode_one(bigram_store(list(range(1, 14)), range(3), 4, 100, None))
    assert (list(event.tokens), event.block_size, event.mappable) == (list(range(1, 13)), 4, True)


@pytest.mark.parametrize("size", [1, 2, 4, 16, 64])
def test_bigram_chains_are_never_estimated_high_by_more_than_a_page(size: int) -> None:
    """A model engine: sets of pages of pairs; two paths that part at a random token; random prompts."""
    rng = random.Random(size)
    for _ in range(30):
        trunk = [rng.randrange(1000) for _ in range(rng.randint(size + 1, 300))]
        fork = rng.randrange(1, len(trunk))
        other = [*trunk[:fork], *(token + 1000 for token in trunk[fork:]), 7]
        residency = Residency(domain(16))
        held: set[tuple[tuple[int, ...], ...]] = set()
        handles: dict[tuple[tuple[int, ...], ...], int] = {}
        for path in (trunk, other):
            chain = [tuple(pair) for pair in pairs(path)]
            above: int | None = None
            for end in range(size, len(chain) + 1, size):
                page = tuple(chain[:end])
                if page not in held:
                    held.add(page)
                    handles[page] = len(handles)
                    event = stored(
                        block_hashes=[handles[page]],
                        parent_block_hash=above,
                        token_ids=chain[end - size : end],
                        block_size=size,
                    )
                    residency.apply(EngineBatch(decode_events(event)))
                above = handles[page]
        residency._check()
        assert residency.counts.hash_only == residency.counts.orphans == 0
        for path in (trunk, other):
            for n in {rng.randint(1, len(path)) for _ in range(12)} | {len(path)}:
                prompt = [*path[:n], 5000, 5001]
                chain = [tuple(pair) for pair in pairs(prompt)]
                hit = max((end for end in range(size, len(chain) + 1, size) if tuple(chain[:end]) in held), default=0)
                reused = sum(16 * matched(tree, prompt_of(("", ""), prompt, 16)) for tree in trees_of(residency))
                estimate = reused - reused % residency.hit_unit if residency.hit_unit else 0
                assert estimate <= hit + size
                # Low by no more than what any prompt loses to the coarser of the two units.
                assert estimate > hit - max(16, size)


def test_bigram_pages_go_on_over_events_and_go_one_by_one() -> None:
    path = list(range(40))
    residency = Residency(domain(16))
    residency.apply(EngineBatch(decode_events(bigram_store(path, range(5), 4, 100, None))))
    assert residency.canonical_blocks == 1
    residency.apply(EngineBatch(decode_events(bigram_store(path, range(5, 9), 4, 100, 104))))
    assert residency.canonical_blocks == 2
    residency.apply(EngineBatch(decode_events({"type": "BlockRemoved", "block_hashes": [108], "medium": "GPU"})))
    assert residency.canonical_blocks == 2
    residency.apply(EngineBatch(decode_events({"type": "BlockRemoved", "block_hashes": [107], "medium": "GPU"})))
    assert residency.canonical_blocks == 1


def test_pairs_that_do_not_chain_are_counted_and_not_matched() -> None:
    event = decode_one(stored(token_ids=[[i, i + 2] for i in range(32)]))
    assert not event.mappable
    residency = Residency(domain(16))
    residency.apply(EngineBatch((event,)))
    assert (residency.counts.hash_only, residency.canonical_blocks, residency.live_blocks) == (2, 0, 2)


# --- fields ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-(2**63), -1, 0, 2**63 - 1, 2**64 - 1, b"\x01" * 32])
def test_handles_are_opaque(value: object) -> None:
    event = decode_one(stored(block_hashes=[value, 3], parent_block_hash=value))
    assert (event.handles, event.parent) == ((value, 3), value)
    assert decode_one({"type": "BlockRemoved", "block_hashes": [3, value]}) == BlocksRemoved((3, value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", "gpu"), (None, "gpu"), ("CPU_PINNED", "cpu"), ("CPU", "cpu"), ("DISK", "disk"), ("EXTERNAL", "external")],
)
def test_medium_names_the_tier(medium: str | None, tier: str) -> None:
    assert decode_one(stored(medium=medium)).tier == tier
    assert decode_one(["BlockStored", [1], None, [], 0, None, medium]).tier == tier
    assert decode_one({"type": "BlockRemoved", "block_hashes": [1], "medium": medium}).tier == tier
    assert decode_one(["BlockRemoved", [1], medium]).tier == tier


def test_a_clear_is_of_every_tier() -> None:
    assert decode_events({"type": "AllBlocksCleared"}, ["AllBlocksCleared"], ["AllBlocksCleared", 1]) == (
        BlocksCleared(None),
        BlocksCleared(None),
        BlocksCleared(None),
    )


def test_the_hierarchy_of_caches_is_followed_tier_by_tier() -> None:
    """Written through, demoted, loaded back, evicted from the host: the order in which HiCache says it."""
    gpu, cpu = stored(), stored(medium="CPU_PINNED")
    steps = [
        ([gpu], {("gpu", 2)}),
        ([cpu], {("gpu", 2), ("cpu", 2)}),
        ([{"type": "BlockRemoved", "block_hashes": [-7, 8], "medium": "GPU"}], {("cpu", 2)}),
        ([gpu], {("gpu", 2), ("cpu", 2)}),
        ([{"type": "BlockRemoved", "block_hashes": [-7, 8], "medium": "CPU_PINNED"}], {("gpu", 2)}),
        ([cpu, {"type": "AllBlocksCleared"}], set()),
    ]
    residency = Residency(domain(16))
    for told, expected in steps:
        residency.apply(EngineBatch(decode_events(*told)))
        residency._check()
        assert {(row.tier, row.copies) for row in residency.live()} == expected
        assert residency.canonical_blocks == (2 if expected else 0)


@pytest.mark.parametrize(
    ("event", "namespace"),
    [
        (stored(), Namespace()),
        (stored(cache_salt="s"), Namespace(salt="s")),
        (stored(cache_salt="s", session_id="x"), Namespace(salt="s")),
        (stored(lora_name="lo"), Namespace("lo")),
        (stored(lora_name="lo", cache_salt="s", lora_id=3), Namespace("lo", "s")),
        (stored(lora_id=3), Namespace("id:3")),
        (["BlockStored", [-7, 8], None, list(range(32)), 16, None, "GPU"], Namespace()),
        (["BlockStored", [-7, 8], None, list(range(32)), 16], Namespace()),
        (["BlockStored", [-7, 8], None, list(range(32)), 16, None, "GPU", None], Namespace()),
        (["BlockStored", [-7, 8], None, list(range(32)), 16, None, "GPU", {"cache_salt": "s"}], Namespace(salt="s")),
        (
            ["BlockStored", [-7, 8], None, list(range(32)), 16, None, "GPU", {"lora_name": "lo", "new": 1}, "more"],
            Namespace("lo"),
        ),
    ],
)
def test_salt_and_adapter_are_the_namespace(event: object, namespace: Namespace) -> None:
    expected = BlocksStored((-7, 8), None, array("I", range(32)), 16, namespace=namespace)
    assert decode_one(event) == expected


def test_unknown_fields_do_no_harm_and_missing_ones_are_none() -> None:
    assert decode_one(stored(metadata=7, tomorrow={"any": [None]}, group_idx="x")) == decode_one(stored())
    assert decode_one({"type": "BlockStored", "block_hashes": [1]}) == BlocksStored((1,), None, array("I"), 0)
    assert decode_one({"type": "BlockRemoved", "block_hashes": [], "why": "evicted"}) == BlocksRemoved(())


@pytest.mark.parametrize(
    ("fields", "salt", "contents", "mappable"),
    [
        ({"extra_keys": [None, None]}, "", (), True),
        ({"extra_keys": [["s"], None]}, "s", (), True),
        ({"extra_keys": [["s"], None], "cache_salt": "s"}, "s", (), True),
        ({"extra_keys": [["x"], None], "cache_salt": "s"}, "s", (), False),
        ({"extra_keys": [[["img", 5]], [["img", -11]]]}, "", (ContentSpan("img", 5),), True),
        ({"extra_keys": [["s"]]}, "", (), False),
    ],
)
def test_extra_keys_are_read_when_they_come(
    fields: dict[str, object], salt: str, contents: tuple[ContentSpan, ...], mappable: bool
) -> None:
    event = decode_one(stored(**fields))
    assert (event.namespace.salt, event.contents, event.mappable) == (salt, contents, mappable)


# --- bad events --------------------------------------------------------------------------------------------

BAD_EVENTS = [
    (None, "", "neither"),
    ({}, "", "no tag"),
    (["BlockMoved"], "BlockMoved", "unknown tag"),
    (stored(block_hashes=None), "BlockStored", "block_hashes"),
    (stored(block_hashes=[1, "2"]), "BlockStored", "block hash"),
    (stored(block_hashes=[True]), "BlockStored", "block hash"),
    (stored(parent_block_hash="x"), "BlockStored", "block hash"),
    (stored(parent_block_hash=1.0), "BlockStored", "block hash"),
    (stored(token_ids=7), "BlockStored", "token_ids"),
    (stored(token_ids=[1, [2, 3]]), "BlockStored", "token_ids"),
    (stored(token_ids=[[1, 2], 3]), "BlockStored", "token_ids"),
    (stored(token_ids=[[1, 2], [2]]), "BlockStored", "token_ids"),
    (stored(token_ids=[[1, 2, 3]]), "BlockStored", "token_ids"),
    (stored(token_ids=[[1, "x"]]), "BlockStored", "token_ids"),
    (stored(token_ids=[[1, 2**32]]), "BlockStored", "token_ids"),
    (stored(token_ids=[-1]), "BlockStored", "token_ids"),
    (stored(block_size=-1), "BlockStored", "block_size"),
    (stored(cache_salt=3), "BlockStored", "cache_salt"),
    (stored(lora_name=3), "BlockStored", "lora_name"),
    (stored(lora_id="x"), "BlockStored", "lora_id"),
    (stored(medium=3), "BlockStored", "medium"),
    (stored(extra_keys=3), "BlockStored", "extra_keys"),
    # vLLM has a text in this place: its stream is not read as if it were SGLang's.
    (["BlockStored", [1], None, [], 0, None, "GPU", "adapter"], "BlockStored", "element 8"),
    (["BlockStored", [1], None, [], 0, None, "GPU", {"cache_salt": []}], "BlockStored", "cache_salt"),
    (["BlockRemoved"], "BlockRemoved", "block_hashes"),
]


@pytest.mark.parametrize(("bad", "tag", "reason"), BAD_EVENTS)
def test_a_bad_event_is_unknown_and_its_siblings_survive(bad: object, tag: str, reason: str) -> None:
    before, unknown, after = decode_events(stored(), bad, ["BlockRemoved", [9]])
    assert (before, after) == (decode_one(stored()), BlocksRemoved((9,)))
    assert isinstance(unknown, UnknownEvent)
    assert unknown.tag == tag
    assert reason in unknown.reason


# --- objects of a publisher inside the engine --------------------------------------------------------------


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class Stored(msgspec.Struct, tag="BlockStored", kw_only=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Any
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class OldStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    whatever_its_name: Any = None


def objects_of(payload: bytes) -> Batch:
    """The structs that an engine would have encoded into this payload."""
    ts, events, _ = msgspec.msgpack.decode(payload)
    made: list[Any] = []
    for event in events:
        if isinstance(event, list):
            kind = {"BlockStored": OldStored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}[event[0]]
            made.append(kind(*event[1:]))
        else:
            fields = {name: value for name, value in event.items() if name != "type"}
            kind = {"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}[event["type"]]
            made.append(kind(**fields))
    return Batch(ts, made)


@pytest.mark.parametrize("name", recorded.SMALL)
def test_objects_decode_to_what_their_bytes_decode_to(name: str) -> None:
    for payload in recorded.payloads(name):
        assert batch_of(objects_of(payload)) == decode_batch(payload)


def test_the_rank_counts_when_the_batch_names_none() -> None:
    assert batch_of(Batch(1.0, [Cleared()]), 3) == EngineBatch((BlocksCleared(None),), 3, 1.0)
    assert batch_of(Batch(1.0, [Cleared()], 2), 3) == EngineBatch((BlocksCleared(None),), 2, 1.0)
    assert batch_of(Batch(1.0, [])).rank == 0


class Medium(str, Enum):
    HOST = "CPU_PINNED"


class Salted(msgspec.Struct):
    cache_salt: str


def test_what_python_adds_to_the_wire_is_read_as_the_encoder_would() -> None:
    whole = Stored(block_hashes=[1], parent_block_hash=None, token_ids=array("q", range(4)), block_size=4)
    whole.medium = Medium.HOST
    old = OldStored([1], None, list(range(4)), 4, None, "GPU", Salted("s"))
    bigram = Stored(block_hashes=[1], parent_block_hash=None, token_ids=[(1, 2), (2, 3)], block_size=2)
    events = batch_of(Batch(1.0, (whole, old, bigram))).events  # type: ignore[arg-type]
    assert events == (
        BlocksStored((1,), None, array("I", range(4)), 4, tier="cpu"),
        BlocksStored((1,), None, array("I", range(4)), 4, namespace=Namespace(salt="s")),
        BlocksStored((1,), None, array("I", [1, 2]), 2),
    )


def test_nothing_of_an_object_is_kept() -> None:
    event = Stored(block_hashes=[1], parent_block_hash=None, token_ids=[5, 6], block_size=2)
    decoded = batch_of(Batch(1.0, [event]))
    event.block_hashes.append(9)
    event.token_ids.clear()
    assert decoded.events == (BlocksStored((1,), None, array("I", [5, 6]), 2),)


class Explosive:
    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


class BlockRemoved:
    def __init__(self) -> None:
        self.block_hashes = [4]


def test_a_bad_object_is_unknown_and_its_siblings_survive() -> None:
    bad = Stored(block_hashes=[1], parent_block_hash=None, token_ids="x", block_size=2)
    events = batch_of(Batch(1.0, [Explosive(), None, 7, bad, Removed([2]), BlockRemoved()])).events
    assert [type(event) for event in events] == [UnknownEvent] * 4 + [BlocksRemoved] * 2
    assert events[4:] == (BlocksRemoved((2,)), BlocksRemoved((4,)))


@pytest.mark.parametrize(
    ("batch", "kind"),
    [(None, "shape"), (Batch(1.0, None), "shape"), (Batch("x", []), "timestamp"), (Batch(1.0, [], "x"), "rank")],  # type: ignore[arg-type]
)
def test_an_object_that_is_no_batch_is_an_error_with_a_kind(batch: object, kind: str) -> None:
    with pytest.raises(DecodeError) as caught:
        batch_of(batch)
    assert caught.value.kind == kind


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class VllmStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    extra_keys: list[tuple[Any, ...] | None]


def test_objects_of_vllm_are_read_in_the_same_way() -> None:
    batch = VllmBatch(1.0, [VllmStored([b"\1" * 32], None, [1, 2], 2, [(("img", 1), "s")])], 4)
    assert prefixroute_vllm.batch_of(batch) == prefixroute_vllm.decode_batch(encode(batch))
    (event,) = prefixroute_vllm.batch_of(batch).events
    assert isinstance(event, BlocksStored)
    assert (event.namespace.salt, event.contents) == ("s", (ContentSpan("img", 1),))


# --- the package -------------------------------------------------------------------------------------------


def test_the_entry_point_names_the_engine() -> None:
    assert (ENGINE.name, ENGINE.decode) == ("sglang", decode_batch)
    pyproject = (recorded.DATA.parent.parent.parent / "pyproject.toml").read_text()
    assert 'sglang = "prefixroute_sglang:ENGINE"' in pyproject


@pytest.mark.parametrize("adapter", [prefixroute_vllm, prefixroute_sglang])
def test_every_public_name_is_there(adapter: Any) -> None:
    assert all(getattr(adapter, name) for name in adapter.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        adapter.nothing  # noqa: B018


def test_a_gap_is_no_event_of_the_wire() -> None:
    assert decode_events({"type": "StreamGap"}) == (UnknownEvent("StreamGap"),)
    assert StreamGap not in map(type, decode_events(stored()))
