"""vLLM's events to engine-neutral ones: every version's shapes, recorded streams, doubtful content, bad bytes."""

from __future__ import annotations

import hashlib
import json
import pickle
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import msgspec
import prefixroute_vllm
import pytest
from prefixroute_vllm import ENGINE, decode_batch
from prefixroute_vllm.decode import MAX_BLOCK_SIZE, MAX_PAYLOAD_BYTES

from prefixroute.errors import DecodeError
from prefixroute.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    EngineBatch,
    Namespace,
    UnknownEvent,
)

DATA = Path(__file__).parents[1] / "data" / "vllm_events"
SYNTHETIC = sorted((DATA / "synthetic_by_version").glob("*.msgpack"))
RECORDED = sorted(path for path in DATA.rglob("*.msgpack") if path not in SYNTHETIC)
STREAMS = sorted({path.parent for path in RECORDED})

encode = msgspec.msgpack.encode
STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)


def decode_events(*events: object) -> tuple[object, ...]:
    return decode_batch(encode([1.0, list(events), 0])).events


def decode_one(event: object) -> Any:
    (decoded,) = decode_events(event)
    return decoded


def stored(**fields: object) -> dict[str, object]:
    base: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": None,
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return base | fields


def version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.removeprefix("v").split(".")[:3])


# --- versions and recorded streams -------------------------------------------------------------------------


def plain(events: list[Any]) -> list[dict[str, Any]]:
    """The independent reading: name the fields of arrays by position, leave maps as they are."""
    names = {
        "BlockStored": STORED_FIELDS,
        "BlockRemoved": ["block_hashes", "medium", "group_idx"],
        "AllBlocksCleared": [],
    }
    return [e if isinstance(e, dict) else {"type": e[0], **dict(zip(names[e[0]], e[1:], strict=False))} for e in events]


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring removals of one tier and group as one, which is how maps are decoded."""
    found: list[dict[str, Any]] = []
    for event in events:
        rest = {name: value for name, value in event.items() if name != "block_hashes"}
        if event["type"] == "BlockRemoved" and found and rest == {k: found[-1].get(k) for k in rest}:
            found[-1] = rest | {"block_hashes": found[-1]["block_hashes"] + event["block_hashes"]}
        else:
            found.append(event)
    return found


def assert_same(decoded: object, fields: dict[str, Any]) -> None:
    group = fields.get("group_idx") or 0
    tier = (fields.get("medium") or "GPU").lower()
    if fields["type"] == "AllBlocksCleared":
        assert decoded == BlocksCleared("gpu")
        return
    handles = tuple(low_64(value) for value in fields["block_hashes"])
    if fields["type"] == "BlockRemoved":
        assert decoded == BlocksRemoved(handles, tier, group)
        return
    assert isinstance(decoded, BlocksStored)
    parent = fields["parent_block_hash"]
    lora_id, lora = fields["lora_id"], fields.get("lora_name")
    first = (fields.get("extra_keys") or [None])[0] or []
    salts = [key for key in first if key != lora]
    assert decoded.handles == handles
    assert decoded.parent == (None if parent is None else low_64(parent))
    assert list(decoded.tokens) == fields["token_ids"]
    assert decoded.block_size == fields["block_size"]
    assert (decoded.tier, decoded.group) == (tier, group)
    assert decoded.group_kind == (fields.get("kv_cache_spec_kind") or "")
    assert decoded.namespace.lora == (lora or (f"id:{lora_id}" if lora_id is not None else ""))
    assert decoded.namespace.salt == "".join(salts)
    assert decoded.contents == ()
    assert decoded.mappable


def low_64(value: int | str) -> int:
    return int(value[-16:], 16) if isinstance(value, str) else value


@pytest.mark.parametrize("path", SYNTHETIC, ids=lambda path: path.stem)
def test_every_version_decodes_to_the_same_logical_batch(path: Path) -> None:
    raw = json.loads((DATA / "synthetic_by_version" / "decoded.json").read_text())[path.stem]
    batch = decode_batch(path.read_bytes())
    assert (batch.ts, batch.rank, len(batch.events)) == (1.5, 0, 4)
    for decoded, fields in zip(batch.events, plain(raw[1]), strict=True):
        assert_same(decoded, fields)
    since = version(path)
    root, child, removed, cleared = batch.events
    assert isinstance(root, BlocksStored) and isinstance(child, BlocksStored)
    assert (root.handles, root.parent, list(root.tokens)) == ((11, 2**63 + 5), None, list(range(32)))
    assert (child.handles, child.parent, list(child.tokens)) == ((77,), 2**63 + 5, list(range(16)))
    assert root.namespace == Namespace(salt="saltA" if since >= (0, 17, 0) else "")
    assert child.namespace == Namespace(lora="lo" if since >= (0, 14, 0) else "id:1")
    assert root.group_kind == ("full_attention" if since >= (0, 22, 0) else "")
    assert removed == BlocksRemoved((11,))
    assert cleared == BlocksCleared("gpu")


def test_there_are_streams_of_every_version() -> None:
    assert len(SYNTHETIC) == 36
    assert (version(SYNTHETIC[0]), max(map(version, SYNTHETIC))) == ((0, 10, 0), (0, 33, 0))
    assert len(RECORDED) == 57


@pytest.mark.parametrize("stream", STREAMS, ids=lambda path: str(path.relative_to(DATA)))
def test_recorded_stream_decodes_to_what_its_index_says(stream: Path) -> None:
    for line in (stream / "index.jsonl").read_text().splitlines():
        entry = json.loads(line)
        batch = decode_batch((stream / f"{entry['seq']:05}.msgpack").read_bytes())
        ts, events, rank = entry["msg"]
        assert (batch.ts, batch.rank) == (ts, rank)
        assert not any(isinstance(event, UnknownEvent) for event in batch.events)
        typed = all(isinstance(e, dict) and all(isinstance(h, int) for h in e.get("block_hashes", [])) for e in events)
        expected = joined(events) if typed else plain(events)
        for decoded, fields in zip(batch.events, expected, strict=True):
            assert_same(decoded, fields)


def test_the_int_form_is_the_low_64_bits_of_the_digest_read_big_endian() -> None:
    """Recompute the digests of a recorded stream from its tokens: sha256 over pickle, root = a known text."""

    def digest(value: object) -> bytes:
        return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

    digests: dict[int, bytes] = {}
    root = digest("vllm-none-hash")
    compared = 0
    for path in sorted((DATA / "v0.32.0_bs32_sha256").glob("*.msgpack")):
        for event in decode_batch(path.read_bytes()).events:
            if not isinstance(event, BlocksStored):
                continue
            parent = root if event.parent is None else digests[int(event.parent)]  # type: ignore[arg-type]
            size, salt = event.block_size, event.namespace.salt
            for number, handle in enumerate(event.handles):
                tokens = tuple(event.tokens[number * size : (number + 1) * size])
                extra = (("cache_salt", salt),) if salt and number == 0 else None
                parent = digest((parent, tokens, extra))
                digests[int(handle)] = parent  # type: ignore[arg-type]
                as_bytes = decode_one({"type": "BlockRemoved", "block_hashes": [parent], "medium": "CPU"})
                assert as_bytes.handles == (handle,)
                compared += 1
    assert compared == 140


# --- handles, tiers, groups --------------------------------------------------------------------------------

DIGEST = bytes(range(100, 132))


@pytest.mark.parametrize("gpu", [DIGEST, int.from_bytes(DIGEST[-8:], "big")], ids=["bytes", "int"])
@pytest.mark.parametrize("cpu", [DIGEST, int.from_bytes(DIGEST[-8:], "big")], ids=["bytes", "int"])
def test_tiers_join_whatever_form_each_uses(gpu: object, cpu: object) -> None:
    on_gpu, on_cpu = decode_events(
        ["BlockStored", [gpu], gpu, list(range(16)), 16, None, "GPU"],
        ["BlockStored", [cpu], None, [], 0, None, "CPU"],
    )
    assert isinstance(on_gpu, BlocksStored) and isinstance(on_cpu, BlocksStored)
    assert on_gpu.handles == on_cpu.handles == (on_gpu.parent,)
    assert (on_gpu.tier, on_cpu.tier) == ("gpu", "cpu")
    assert len(on_cpu.tokens) == on_cpu.block_size == 0


@pytest.mark.parametrize(
    ("value", "handle"),
    [
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),  # the builtin hash of 0.9 is signed
        (-(2**63), 2**63),
        (b"\x01", 1),
        (b"\xff" * 8 + b"\x00" * 7 + b"\x05", 5),
    ],
)
def test_handles_are_unsigned_64_bit_ints(value: object, handle: int) -> None:
    assert decode_one(stored(block_hashes=[value, 3], parent_block_hash=value)).handles == (handle, 3)
    assert decode_one(stored(block_hashes=[3], parent_block_hash=value)).parent == handle
    assert decode_one({"type": "BlockRemoved", "block_hashes": [3, value]}).handles == (3, handle)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", "gpu"),
        ("gpu", "gpu"),
        (None, "gpu"),
        ("CPU", "cpu"),
        ("cpu", "cpu"),
        ("CPU_PINNED", "cpu"),
        ("STORAGE", "disk"),
        ("FS", "disk"),
        ("OBJ", "disk"),
        ("Disk", "disk"),
        ("CXL", "cxl"),
        ("X" * 100, "x" * 64),
    ],
)
def test_medium_names_the_tier(medium: str | None, tier: str) -> None:
    assert decode_one(stored(medium=medium)).tier == tier
    assert decode_one({"type": "BlockRemoved", "block_hashes": [1], "medium": medium}).tier == tier
    assert decode_one({"type": "TierBlocksCleared", "medium": medium}) == BlocksCleared(tier)
    assert decode_one(["TierBlocksCleared", medium]) == BlocksCleared(tier)


def test_remote_blocks_are_kept_apart() -> None:
    assert decode_one(stored(medium="CPU", locality="LOCAL")).tier == "cpu"
    assert decode_one(stored(medium="CPU", locality="REMOTE")).tier == "remote-cpu"
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE", "locality": "REMOTE"}
    assert decode_one(removed).tier == "remote-disk"


def test_a_sparse_event_is_passed_on_as_it_is() -> None:
    kind = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128}
    event = decode_one(stored(token_ids=list(range(160)), **kind))
    assert (len(event.handles), len(event.tokens), event.block_size) == (2, 160, 16)
    assert (event.group, event.group_kind, event.window) == (1, "sliding_window", 128)


@pytest.mark.parametrize("window", [0, None, 128, 1 << 40])
def test_the_window_is_read_from_maps_and_from_arrays(window: int | None) -> None:
    array_form = ["BlockStored", [7, 8], None, list(range(32)), 16, *[None] * 4, 0, "sliding_window", window]
    map_form = stored(group_idx=0, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=window)
    assert decode_one(array_form).window == decode_one(map_form).window == (window or 0)


@pytest.mark.parametrize("window", [-1, "128", 1.5, True, (1 << 40) + 1])
def test_a_window_that_is_no_size_costs_its_event(window: object) -> None:
    event = decode_one(stored(kv_cache_spec_sliding_window=window))
    assert isinstance(event, UnknownEvent)
    assert "kv_cache_spec_sliding_window" in event.reason


def test_fields_that_are_proposed_or_unknown_do_no_harm() -> None:
    event = stored(
        block_offsets=[0, 2],
        skipped_parent_block_hash=9,
        skipped_token_ids=[1],
        skipped_extra_keys=[None],
        lookahead_token_ids=[[1], [2]],
        session_id="s",
        ownership="tier-1",
        tomorrow={"any": ["thing", None]},
    )
    assert decode_one(event) == decode_one(stored())
    assert decode_one(["BlockStored", [7, 8], None, list(range(32)), 16, *[None] * 7, "x", 1]) == decode_one(stored())
    assert decode_one(["BlockRemoved", [7], "CPU", 2, "x", []]) == BlocksRemoved((7,), "cpu", 2)
    assert decode_one({"type": "AllBlocksCleared", "why": 1}) == decode_one(["AllBlocksCleared", 1])


def test_missing_fields_are_none() -> None:
    event = decode_one({"type": "BlockStored", "block_hashes": [1]})
    assert event == BlocksStored((1,), None, array("I"), 0)
    assert decode_one(["BlockRemoved", [1]]) == BlocksRemoved((1,))
    assert decode_one({"type": "BlockRemoved", "block_hashes": []}) == BlocksRemoved(())


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ([0, 0], [BlocksRemoved((7, 8), last_copy=True)]),
        ([1, 2], [BlocksRemoved((7, 8))]),
        ([1, 0], [BlocksRemoved((7,)), BlocksRemoved((8,), last_copy=True)]),
        ([0], [BlocksRemoved((7, 8))]),
        ("none", [BlocksRemoved((7, 8))]),
        ([False, None], [BlocksRemoved((7, 8))]),
    ],
)
def test_remaining_copy_counts_name_the_last_copy(left: object, expected: list[BlocksRemoved]) -> None:
    event = {"type": "BlockRemoved", "block_hashes": [7, 8], "remaining_copy_counts": left}
    assert list(decode_events(event)) == expected


# --- namespace and contents --------------------------------------------------------------------------------


def identity(**fields: object) -> tuple[str, str, tuple[ContentSpan, ...], bool]:
    event = decode_one(stored(**fields))
    return event.namespace.lora, event.namespace.salt, event.contents, event.mappable


ROOT: dict[str, object] = {}
CHILD = {"parent_block_hash": 3}
LORA = {"lora_name": "lo", "lora_id": 1}


@pytest.mark.parametrize(
    ("fields", "keys", "expected"),
    [
        (ROOT, None, ("", "", (), True)),
        (ROOT, [None, None], ("", "", (), True)),
        (ROOT, [[], None], ("", "", (), True)),
        (ROOT, [None], ("", "", (), True)),
        (ROOT, [["s"], None], ("", "s", (), True)),
        (LORA, [["lo"], ["lo"]], ("lo", "", (), True)),
        (LORA, [["lo", "s"], ["lo"]], ("lo", "s", (), True)),
        (LORA, [["lo", "lo"], ["lo"]], ("lo", "lo", (), True)),  # a salt equal to the LoRA name
        (LORA | CHILD, [["lo"], ["lo"]], ("lo", "", (), True)),
        (ROOT, [[["img", 5]], None], ("", "", (ContentSpan("img", 5),), True)),
        (ROOT, [[["img", 5], "s"], [["img", -11]]], ("", "s", (ContentSpan("img", 5),), True)),
        (ROOT, [None, [["img", 0]]], ("", "", (ContentSpan("img", 16),), True)),
        (ROOT, [[["a", 1], ["b", 9]], [["b", -7], ["c", 15]]],
         ("", "", (ContentSpan("a", 1), ContentSpan("b", 9), ContentSpan("c", 31)), True)),
        (LORA, [["lo", ["a", 1], "s"], ["lo", ["a", -15]]], ("lo", "s", (ContentSpan("a", 1),), True)),
        (CHILD, [[["img", -20]], [["img", -36]]], ("", "", (), True)),  # began in an earlier event
        (CHILD, [[["img", 3]], None], ("", "", (ContentSpan("img", 3),), True)),
    ],
)  # fmt: skip
def test_extra_keys_name_salt_and_contents(fields: dict[str, object], keys: object, expected: object) -> None:
    assert identity(**fields, extra_keys=keys) == expected


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        (ROOT, [None, ["img"]]),  # a bare identifier, 0.17 and 0.18: start unknown
        (CHILD, [["img"], None]),
        (ROOT, [["img", "s"], None]),  # identifier and salt, which is which?
        (ROOT, [[b"digest"], None]),  # prompt embeddings: the tokens say nothing
        (CHILD, [None, [b"digest"]]),
        (ROOT, [[["img", -1]], None]),  # nothing precedes the first block
        (ROOT, [[["img", 16]], None]),  # not in its block
        (ROOT, [None, [["img", 16]]]),
        (CHILD, [[["img", 99]], None]),
        (ROOT, [[["img", 1.0]], None]),
        (ROOT, [[["img", 1, 2]], None]),
        (ROOT, [[[b"img", 1]], None]),
        (ROOT, [[["img", True]], None]),
        (ROOT, [[7], None]),
        (ROOT, [["s"]]),  # not one entry a block
        (LORA, [["other"], ["other"]]),
    ],
)
def test_content_identity_in_doubt_is_not_mappable(fields: dict[str, object], keys: object) -> None:
    event = decode_one(stored(**fields, extra_keys=keys))
    assert not event.mappable
    assert event.handles == (7, 8)


def test_the_same_placeholders_with_another_image_or_salt_differ() -> None:
    kinds = [[[["one", 4]], None], [[["two", 4]], None], [["s"], None], [["t"], None], None]
    assert len({identity(extra_keys=keys) for keys in kinds}) == len(kinds)


# --- bad events and hostile bytes --------------------------------------------------------------------------

BAD_EVENTS = [
    (None, "", "neither"),
    (7, "", "neither"),
    ([], "", "neither"),
    ([1, 2], "", "no tag"),
    ({}, "", "no tag"),
    ({"type": b"BlockStored"}, "", "no tag"),
    ({"type": ["BlockStored"]}, "", "no tag"),
    ({"type": "BlockMoved"}, "BlockMoved", "unknown tag"),
    (["T" * 500], "T" * 64, "unknown tag"),
    ({"type": "BlockStored"}, "BlockStored", "block_hashes"),
    (["BlockRemoved"], "BlockRemoved", "block_hashes"),
    (["BlockRemoved", 7], "BlockRemoved", "block_hashes"),
    (["BlockRemoved", ["7"]], "BlockRemoved", "block hash"),
    (["BlockRemoved", [1, True]], "BlockRemoved", "block hash"),
    (["BlockRemoved", [1, b""]], "BlockRemoved", "block hash"),
    (["BlockRemoved", [1.0]], "BlockRemoved", "block hash"),
    (["BlockRemoved", [1], 7], "BlockRemoved", "medium"),
    (["BlockRemoved", [1], None, -1], "BlockRemoved", "group_idx"),
    (["BlockRemoved", [1], None, False], "BlockRemoved", "group_idx"),
    (["TierBlocksCleared", {}], "TierBlocksCleared", "medium"),
    (stored(parent_block_hash="x"), "BlockStored", "block hash"),
    (stored(token_ids="x"), "BlockStored", "token_ids"),
    (stored(token_ids=b"\x00" * 128), "BlockStored", "token_ids"),
    (stored(token_ids=[1, 2.0]), "BlockStored", "token_ids"),
    (stored(token_ids=[1, None]), "BlockStored", "token_ids"),
    (stored(token_ids=[1, -1]), "BlockStored", "token_ids"),
    (stored(token_ids=[2**32]), "BlockStored", "token_ids"),
    (stored(token_ids=[float("nan")]), "BlockStored", "token_ids"),
    (stored(block_size=-1), "BlockStored", "block_size"),
    (stored(block_size=MAX_BLOCK_SIZE + 1), "BlockStored", "block_size"),
    (stored(block_size=16.0), "BlockStored", "block_size"),
    (stored(lora_id="x"), "BlockStored", "lora_id"),
    (stored(lora_name=3), "BlockStored", "lora_name"),
    (stored(kv_cache_spec_kind=3), "BlockStored", "kv_cache_spec_kind"),
    (stored(extra_keys={"a": 1}), "BlockStored", "extra_keys"),
    (stored(extra_keys=["s", None]), "BlockStored", "extra_keys"),
]


@pytest.mark.parametrize(("bad", "tag", "reason"), BAD_EVENTS)
def test_a_bad_event_is_unknown_and_its_siblings_survive(bad: object, tag: str, reason: str) -> None:
    before, unknown, after = decode_events(stored(), bad, ["BlockRemoved", [9]])
    assert before == decode_one(stored())
    assert after == BlocksRemoved((9,))
    assert isinstance(unknown, UnknownEvent)
    assert unknown.tag == tag
    assert reason in unknown.reason


UNDECODABLE = {
    "text that is not UTF-8": b"\xa2\xff\xfe",
    "map key that cannot be hashed": b"\x81\x91\x80\x01",
    "timestamp out of range": b"\xd7\xff" + b"\xff" * 8,
}


@pytest.mark.parametrize("name", UNDECODABLE)
def test_an_undecodable_event_is_unknown_and_its_siblings_survive(name: str) -> None:
    events = (
        b"\x93" + encode(stored()) + b"\x92" + encode("BlockRemoved") + UNDECODABLE[name] + encode(["AllBlocksCleared"])
    )
    batch = decode_batch(b"\x93" + encode(1.5) + events + encode(4))
    assert batch == EngineBatch((decode_one(stored()), UnknownEvent("", "undecodable"), BlocksCleared()), 4, 1.5)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x93\xcb", "malformed"),
        (encode([1.0, []]) + b"\x00", "malformed"),
        (encode([1.0, [], 0])[:-1], "malformed"),
        (b"\x91" * 100_000, "depth"),
        (encode(None), "shape"),
        (encode([]), "shape"),
        (encode([1.0]), "shape"),
        (encode({"ts": 1.0, "events": []}), "shape"),
        (encode([1.0, None]), "shape"),
        (encode([1.0, {}]), "shape"),
        (encode([None, []]), "timestamp"),
        (encode(["1", []]), "timestamp"),
        (encode([True, []]), "timestamp"),
        (encode([float("nan"), []]), "timestamp"),
        (encode([float("inf"), []]), "timestamp"),
        (encode([1.0, [], "0"]), "rank"),
        (encode([1.0, [], -1]), "rank"),
        (encode([1.0, [], True]), "rank"),
        (b"\xc4\x00" * (MAX_PAYLOAD_BYTES // 2) + b"\x00", "too_large"),
    ],
)
def test_an_unreadable_batch_is_an_error_with_a_kind(payload: bytes, kind: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_batch(payload)
    assert caught.value.kind == kind


def test_batches_of_two_elements_or_more() -> None:
    assert decode_batch(encode([1, []])) == EngineBatch((), 0, 1.0)
    assert decode_batch(encode([2.5, [], None])) == EngineBatch((), 0, 2.5)
    assert decode_batch(encode([2.5, [["AllBlocksCleared"]], 3, "more"])) == EngineBatch((BlocksCleared(),), 3, 2.5)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x93" + encode(1.0) + b"\xdd\xff\xff\xff\xff",
        b"\x93" + encode(1.0) + b"\xdf\xff\xff\xff\xff",
        b"\x93" + encode(1.0) + b"\xc6\xff\xff\xff\xff",
        b"\x93" + encode(1.0) + b"\xc9\xff\xff\xff\xff\x01",
        b"\x93" + encode(1.0) + b"\x91\x84" + encode("block_hashes") + b"\xdd\x7f\xff\xff\xff" * 200,
    ],
)
def test_nothing_is_allocated_because_a_length_claims_it(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode_batch(payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- the package -------------------------------------------------------------------------------------------


def test_the_entry_point_names_the_engine() -> None:
    assert (ENGINE.name, ENGINE.decode) == ("vllm", decode_batch)


def test_every_public_name_is_there() -> None:
    assert all(getattr(prefixroute_vllm, name) for name in prefixroute_vllm.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        prefixroute_vllm.nothing  # noqa: B018
