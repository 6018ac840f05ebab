"""The wire: golden bytes, round trips at every bound, and any bytes whatever into the decoder."""

from __future__ import annotations

import random
import runpy
import tracemalloc
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_values import ints, messages

from prefixroute import DecodeError, LoadReport, PushBackState
from prefixroute.keys.keyset import checksum
from prefixroute.load import Advert
from prefixroute.replication.wire import (
    HEADER_BYTES,
    KEY_LIMIT,
    LAST_BEAT,
    MAX_DATAGRAM_BYTES,
    MAX_MISSING,
    Envelope,
    Kind,
    LoadWire,
    Message,
    Stamp,
    Update,
    VectorEntry,
    Want,
    decode,
    encode,
    encode_part,
    load_from_wire,
    load_to_wire,
    overhead_bytes,
)

GOLDEN_FOLDER = Path(__file__).parents[1] / "data" / "golden"
GOLDEN = runpy.run_path(str(GOLDEN_FOLDER / "make.py"))
MESSAGES: dict[str, tuple[Kind, Message]] = GOLDEN["MESSAGES"]
DOMAIN = GOLDEN["DOMAIN"]
SECRET = DOMAIN.secret
KINDS = {"oversized", "truncated", "magic", "version", "forged", "kind", "malformed"}
QUICK = settings(derandomize=True, deadline=None, max_examples=150)

pack = msgspec.msgpack.encode


def golden(name: str) -> bytes:
    return (GOLDEN_FOLDER / f"{name}.bin").read_bytes()


def tagged(body: bytes, kind: int = 1, secret: bytes = SECRET) -> bytes:
    """A datagram with a right tag around any body, written from docs/wire.md and not from the code."""
    front = b"PRT2" + bytes([kind]) + DOMAIN.fingerprint
    return front + blake2b(front + body, digest_size=16, key=secret, person=b"datagram-tag").digest() + body


def refusal(data: bytes, secret: bytes = SECRET) -> str:
    """The kind of error that `data` gives; "" when it decodes."""
    try:
        envelope = decode(data, secret)
    except DecodeError as error:
        return error.kind
    assert isinstance(envelope, Envelope)
    return ""


# --- golden files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_datagram_decodes_to_its_message(name: str) -> None:
    kind, message = MESSAGES[name]
    assert decode(golden(name), SECRET) == Envelope(kind, DOMAIN.fingerprint, message)


@pytest.mark.parametrize("name", MESSAGES)
def test_message_encodes_to_its_golden_bytes(name: str) -> None:
    assert GOLDEN["datagram"](name) == golden(name)


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN_FOLDER.glob("*.bin")} == set(MESSAGES)


def test_golden_files_cover_every_kind_and_every_optional_field() -> None:
    messages = [message for _, message in MESSAGES.values()]
    assert {kind for kind, _ in MESSAGES.values()} == set(Kind)
    assert any(message.domain for message in messages)
    assert any(entry.load and entry.load.reason for message in messages for entry in message.vector)
    assert any(entry.want for message in messages for entry in message.vector)
    assert any(entry.heartbeat == LAST_BEAT for message in messages for entry in message.vector)
    assert any(message.contact for message in messages)
    kinds = {(update.since == 0, update.whole) for message in messages for update in message.updates}
    assert kinds == {(snapshot, whole) for snapshot in (True, False) for whole in (True, False)}
    updates = [update for message in messages for update in message.updates]
    assert all(update.removed for update in updates if update.since)
    assert any(update.anchor_stride > 1 for update in updates)
    assert any(update.contact for update in updates)
    assert {bool(update.zone) for update in updates if not update.since} == {True, False}


# --- round trips -------------------------------------------------------------------------------------------


@QUICK
@given(st.sampled_from(Kind), messages)
def test_every_message_comes_back(kind: Kind, message: Message) -> None:
    parts = [encode_part(entry) for entry in message.vector], [encode_part(update) for update in message.updates]
    stamp = Stamp(message.life, message.sequence, message.to) if message.life else None
    if stamp is None:
        message = msgspec.structs.replace(message, sequence=0, to=0)
    data = encode(kind, DOMAIN.fingerprint, SECRET, message, *parts, stamp)
    # What says nothing at the end is left out, of a message and of an update.
    fields = list(msgspec.structs.astuple(message))
    told = [msgspec.structs.astuple(update) for update in message.updates]
    fields[6] = [one if one[-1] else one[:-1] for one in told]
    assert data == tagged(pack(fields[: 11 if stamp else 8 if message.contact else 7]), kind)
    assert decode(data, SECRET) == Envelope(kind, DOMAIN.fingerprint, message)


@QUICK
@given(messages)
def test_overhead_bounds_what_a_datagram_costs_beside_its_parts(message: Message) -> None:
    parts = [encode_part(entry) for entry in message.vector], [encode_part(update) for update in message.updates]
    data = encode(Kind.SYN, DOMAIN.fingerprint, SECRET, message, *parts)
    assert len(data) <= overhead_bytes(message) + sum(len(part) for group in parts for part in group)


def test_overhead_bounds_a_datagram_of_many_parts() -> None:
    part = encode_part(VectorEntry("a/0", 1, 1))
    data = encode(Kind.SYN, DOMAIN.fingerprint, SECRET, Message("a"), [part] * 500, [])
    assert len(data) <= overhead_bytes(Message("a")) + 500 * len(part)


ENTRY = ["a/0", 1, 1, 1, 0, 0, 0, None, None]
LOAD = [0, 0, 0, 0, 0, 0, 0, 0, 0, "", 0, 100, 0, 0, 0, 0, 0]
WANT = [1, 0, 1, [[0, 9]]]
UPDATE = ["a/0", 1, 0, 1, 0, 1, 0, KEY_LIMIT, b"", b"", "", "", ""]
HEAD = ["a", 0, 0, False, None, [], []]


def with_field(fields: list[Any], at: int, value: Any) -> list[Any]:
    return [*fields[:at], value, *fields[at + 1 :]]


def in_entry(entry: list[Any]) -> list[Any]:
    return with_field(HEAD, 5, [entry])


OUT_OF_BOUNDS = {
    "sender empty": with_field(HEAD, 0, ""),
    "sender long": with_field(HEAD, 0, "x" * 81),
    "nonce 2^63": with_field(HEAD, 1, 2**63),
    "nonce -1": with_field(HEAD, 1, -1),
    "echo 2^63": with_field(HEAD, 2, 2**63),
    "complete 1": with_field(HEAD, 3, 1),
    "domain of 17": with_field(HEAD, 4, {str(i): "" for i in range(17)}),
    "domain field long": with_field(HEAD, 4, {"model": "x" * 257}),
    "domain field no text": with_field(HEAD, 4, {"model": 7}),
    "vector no list": with_field(HEAD, 5, {}),
    "no fields": [],
    "a map": {"sender": "a"},
    "contact long": [*HEAD, "x" * 257],
    "contact no text": [*HEAD, None],
    **{
        f"entry field {at} = {value!r}": in_entry(with_field(ENTRY, at, value))
        for at, value in (
            *((0, ""), (1, 0), (1, 2**63), (2, 2**63), (2, 1.5), (3, -1), (3, 2**63), (4, -1), (4, 2**16)),
            *((5, -1), (5, 2**32), (6, -1), (6, 2**63), (7, 1), (7, {}), (8, 0), (8, "")),
        )
    },
    "entry short": in_entry(ENTRY[:2]),
    **{
        f"load field {at} = {value!r}": in_entry(with_field(ENTRY, 7, with_field(LOAD, at, value)))
        for at, value in (
            *((0, 2**32), (1, 2**32), (2, 2**63), (3, 2**32), (4, 2**32), (5, 2**63), (6, 101), (7, 3)),
            *((8, 2**32), (9, "x" * 65), (10, 2**32), (11, 101), (11, -1)),
        )
    },
    **{
        f"want field {at} = {value!r}": in_entry(with_field(ENTRY, 8, with_field(WANT, at, value)))
        for at, value in (
            *((0, 0), (1, -1), (2, 0), (3, []), (3, [[0, 9]] * (MAX_MISSING + 1)), (3, [[0]]), (3, [[0, 1, 2]])),
            *((3, [0, 9]), (3, [[0, KEY_LIMIT + 1]]), (3, [[KEY_LIMIT + 1, 0]]), (3, [[-1, 9]]), (3, [[0, "9"]])),
        )
    },
    "want short": in_entry(with_field(ENTRY, 8, WANT[:3])),
    **{
        f"update field {at} = {value!r}": with_field(HEAD, 6, [with_field(UPDATE, at, value)])
        for at, value in (
            *((0, "x" * 81), (1, 0), (1, 2**63), (2, -1), (2, 2**63), (3, 0), (3, 2**63), (4, "7"), (5, 0), (5, 33)),
            *((6, -1), (6, KEY_LIMIT + 1), (7, -1), (7, KEY_LIMIT + 1), (8, "text"), (8, [1]), (9, None)),
            *((10, "x" * 257), (11, "x" * 257), (11, b""), (12, "x" * 41), (12, None)),
        )
    },
    "update short": with_field(HEAD, 6, [UPDATE[:9]]),
}


@pytest.mark.parametrize("what", OUT_OF_BOUNDS)
def test_a_field_out_of_bounds_is_malformed(what: str) -> None:
    assert refusal(tagged(pack(OUT_OF_BOUNDS[what]))) == "malformed"


def test_the_fields_around_which_bounds_were_tried_are_good() -> None:
    good = [HEAD, [*HEAD, ""], in_entry(ENTRY), in_entry(with_field(ENTRY, 7, LOAD))]
    wants = [WANT, with_field(WANT, 3, [[0, KEY_LIMIT]] * MAX_MISSING)]
    good += [in_entry(with_field(ENTRY, 8, want)) for want in wants]
    good += [in_entry(with_field(ENTRY, 2, LAST_BEAT)), with_field(HEAD, 6, [with_field(UPDATE, 5, 32)])]
    good += [with_field(HEAD, 6, [with_field(UPDATE, 12, "x" * 40)])]
    for body in (*good, with_field(HEAD, 6, [UPDATE])):
        assert refusal(tagged(pack(body))) == ""


def test_a_later_release_may_append_fields() -> None:
    entry = [*ENTRY[:7], [*LOAD, "new"], [*WANT, "new"], "new"]
    body = [*HEAD[:5], [entry], [[*UPDATE, "new"]], "contact", 7, 8, 9, {"new": [1, 2]}]
    message = decode(tagged(pack(body)), SECRET).message
    assert message.vector == [VectorEntry("a/0", 1, 1, 1, 0, 0, 0, LoadWire(), Want(1, 0, 1, [(0, 9)]))]
    assert message.updates == [Update("a/0", 1, 0, 1, 0, 1, 0, KEY_LIMIT, b"", b"")]
    assert (message.contact, message.life, message.sequence, message.to) == ("contact", 7, 8, 9)


def test_fields_that_an_earlier_release_lacks_take_their_defaults() -> None:
    assert decode(tagged(pack(["a"])), SECRET).message == Message("a")
    message = decode(tagged(pack(in_entry(["a/0", 3, 4]))), SECRET).message
    assert message.vector == [VectorEntry("a/0", 3, 4, 0, 0, 0, 0, None, None)]
    message = decode(tagged(pack(in_entry([*ENTRY[:7], LOAD[:15]]))), SECRET).message
    assert message.vector[0].load == LoadWire()
    message = decode(tagged(pack(with_field(HEAD, 6, [UPDATE[:10]]))), SECRET).message
    assert (message.updates[0].url, message.updates[0].contact) == ("", "")
    message = decode(tagged(pack(with_field(HEAD, 6, [UPDATE[:12]]))), SECRET).message
    assert message.updates == [Update("a/0", 1, 0, 1, 0, 1, 0, KEY_LIMIT, b"", b"")]


@pytest.mark.parametrize("state", PushBackState)
def test_an_advert_of_any_size_fits_its_fields(state: PushBackState) -> None:
    report = LoadReport(2**40, 2**40, 2**62, 1e12, 1e6, 1.0, 2**62, True, "é" * 300)
    wire = load_to_wire(Advert(report, state, 1e8, 2**40, 1.0))
    body = pack(Message("a", vector=[VectorEntry("a/0", 1, 1, load=wire)]))
    entry = decode(tagged(body), SECRET).message.vector[0]
    assert entry.load == wire
    assert load_from_wire(wire).state is state


def test_an_older_release_reads_an_update_with_a_zone() -> None:
    """Its structure ends before the zone; what it passes on has none."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(Update)[:-1]]
    assert fields[-1][0] == "contact"
    older = msgspec.defstruct("Update", fields, frozen=True, array_like=True)
    zoned = MESSAGES["ack_snapshot_zone"][1].updates[0]
    assert zoned.zone
    read = msgspec.msgpack.decode(encode_part(zoned), type=older)
    assert msgspec.structs.astuple(read) == msgspec.structs.astuple(zoned)[:-1]
    assert msgspec.msgpack.encode(read) == encode_part(msgspec.structs.replace(zoned, zone=""))


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data"),
    {
        "truncated": b"",
        "magic": b"HTTP" + bytes(40),
        "version": b"PRT1" + golden("ack_snapshot")[4:],
        "forged": golden("ack_snapshot")[:-1] + b"9",
        "oversized": golden("ack_snapshot") + bytes(MAX_DATAGRAM_BYTES),
        "kind": tagged(pack(HEAD), kind=4),
        "malformed": tagged(b"\xc1"),
    }.items(),
)
def test_refusal_names_its_kind(kind: str, data: bytes) -> None:
    assert refusal(data) == kind


def test_kind_0_is_unknown_and_1_to_3_are_known() -> None:
    assert [refusal(tagged(pack(HEAD), kind)) for kind in range(5)] == ["kind", "", "", "", "kind"]


def test_another_secret_is_forged() -> None:
    data = golden("syn_vector")
    assert refusal(data, b"") == refusal(data, b"goldeN") == "forged"
    assert refusal(tagged(pack(HEAD), secret=b""), b"") == ""


def test_the_largest_datagram_is_taken_and_a_byte_more_is_not() -> None:
    front = len(pack(with_field(HEAD, 6, [with_field(UPDATE, 8, bytes(60000))]))) - 60000
    added = bytes(MAX_DATAGRAM_BYTES - HEADER_BYTES - front)
    data = tagged(pack(with_field(HEAD, 6, [with_field(UPDATE, 8, added)])))
    assert len(data) == MAX_DATAGRAM_BYTES
    assert refusal(data) == ""
    assert refusal(data + b"\0") == "oversized"


@pytest.mark.parametrize("name", MESSAGES)
def test_every_truncation_is_refused(name: str) -> None:
    data = golden(name)
    for n in range(len(data)):
        expected = "truncated" if n < HEADER_BYTES else "forged"
        assert refusal(data[:n]) == expected
        if n >= HEADER_BYTES:
            assert refusal(tagged(data[HEADER_BYTES:n], data[4])) == "malformed"
    assert refusal(data + b"\0") == "forged"
    assert refusal(tagged(data[HEADER_BYTES:] + b"\0")) == "malformed"


@pytest.mark.parametrize("name", MESSAGES)
def test_every_flipped_bit_is_refused(name: str) -> None:
    data = golden(name)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        expected = "magic" if bit < 24 else "version" if bit < 32 else "forged"
        assert refusal(bytes(flipped)) == expected


# --- any bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MESSAGES)
def test_a_flipped_bit_under_a_right_tag_gives_a_value_or_malformed(name: str) -> None:
    body = golden(name)[HEADER_BYTES:]
    seen = set()
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(refusal(tagged(bytes(flipped))))
    assert seen == {"", "malformed"}


def test_random_mutations_under_a_right_tag_give_a_value_or_malformed() -> None:
    rng = random.Random(11)
    bodies = [golden(name)[HEADER_BYTES:] for name in MESSAGES]
    for _ in range(4000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(body))
            match rng.randrange(3):
                case 0:
                    body[at] = rng.choice((0xC1, 0xC6, 0xCF, 0xDB, 0xDC, 0xDD, 0xDF, 0xFF, rng.randrange(256)))
                case 1:
                    del body[at : at + rng.randrange(4)]
                case _:
                    other = rng.choice(bodies)
                    body[at:at] = other[: rng.randrange(12)]
            if not body:
                break
        assert refusal(tagged(bytes(body))) in ("", "malformed")


@settings(QUICK, max_examples=500)
@given(st.binary(max_size=300))
@example(b"PRT2")
def test_any_bytes_give_a_value_or_an_error(data: bytes) -> None:
    assert refusal(data) in KINDS
    assert refusal(tagged(data)) in ("", "malformed")


shapes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@QUICK
@given(st.lists(shapes, min_size=5, max_size=9), st.data())
def test_any_shape_gives_a_value_or_malformed(fields: list[Any], data: st.DataObject) -> None:
    good = [HEAD, in_entry(with_field(with_field(ENTRY, 7, LOAD), 8, WANT)), with_field(HEAD, 6, [UPDATE])]
    for at, field in enumerate(fields):
        if at < len(HEAD) and data.draw(st.booleans()):
            fields[at] = data.draw(st.sampled_from(good))[at]
        elif at in (5, 6) and isinstance(field, list):
            fields[at] = [[*field, *ENTRY]]
    assert refusal(tagged(pack(fields))) in ("", "malformed")


def bombs() -> Iterator[tuple[str, bytes]]:
    """Bodies that claim far more than they carry."""
    head = b"\x97\xa1a\x00\x00\xc2"
    huge = b"\xff\xff\xff\xff"
    update = b"\x91\x9c\xa3a/0\x01\x00\x01\x00\x01\x00\xce" + huge
    entry = head + b"\xc0\x91\x99\xa3a/0\x01\x01\x00\x00\x00\x00"
    yield "array of 2^32", b"\xdd" + huge
    yield "sender of 2^32", b"\x97\xdb" + huge
    yield "domain of 2^32", head + b"\xdf" + huge
    yield "domain field of 2^32", head + b"\x81\xa1m\xdb" + huge
    yield "vector of 2^32", head + b"\xc0\xdd" + huge
    yield "vector of 2^24, five there", head + b"\xc0\xdd\x01\x00\x00\x00" + b"\x93\xa3a/0\x01\x01" * 5
    yield "entry of 2^32 fields", head + b"\xc0\x91\xdd" + huge + b"\xa3a/0\x01\x01\x00\x00\xc0\xc0" + b"\xc0" * 40
    yield "load of 2^32 fields", entry + b"\xdd" + huge + bytes(40)
    yield "want of 2^32 ranges", entry + b"\xc0\x94\x01\x00\x01\xdd" + huge
    yield "want of 2^32 ranges, forty there", entry + b"\xc0\x94\x01\x00\x01\xdd" + huge + b"\x92\x00\x01" * 40
    yield "range of 2^32", entry + b"\xc0\x94\x01\x00\x01\x91\xdd" + huge + bytes(40)
    yield "updates of 2^32", head + b"\xc0\x90\xdd" + huge
    yield "keys of 2^32", head + b"\xc0\x90" + update + b"\xc6" + huge
    yield "url of 2^32", head + b"\xc0\x90" + update + b"\xc4\x00\xc4\x00\xdb" + huge
    yield "contact of 2^32", b"\x98\xa1a\x00\x00\xc2\xc0\x90\x90\xdb" + huge
    yield "extension of 2^32", b"\x97\xc9" + huge + b"\x01"
    yield "extra field of 2^32", b"\x99\xa1a\x00\x00\xc2\xc0\x90\x90\xa0\xdd" + huge
    yield "arrays 60,000 deep", b"\x91" * 60000
    yield "extra arrays 60,000 deep", b"\x99\xa1a\x00\x00\xc2\xc0\x90\x90\xa0" + b"\x91" * 60000
    yield "extra maps 30,000 deep", b"\x99\xa1a\x00\x00\xc2\xc0\x90\x90\xa0" + b"\x81\xa0" * 30000


BOMBS = dict(bombs())


@pytest.mark.parametrize("what", BOMBS)
def test_nothing_is_allocated_by_a_claim(what: str) -> None:
    data = tagged(BOMBS[what])
    refusal(data)
    tracemalloc.start()
    try:
        assert refusal(data) == "malformed"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The slices of header and body, the tag's input, and the error.
    assert peak <= 3 * len(data) + 16384


# --- checksum ----------------------------------------------------------------------------------------------

key_sets = st.sets(ints(0, KEY_LIMIT - 1), max_size=60)


def sorted_keys(keys: set[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(sorted(keys), np.uint64)


def mixed(key: int) -> int:
    """The splitmix64 finaliser in plain Python."""
    x = (key + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@QUICK
@given(key_sets, key_sets)
def test_checksum_is_the_sum_of_the_mixes_in_any_order(keys: set[int], more: set[int]) -> None:
    assert checksum(sorted_keys(keys)) == sum(map(mixed, keys)) % 2**64
    assert checksum(sorted_keys(keys)[::-1]) == checksum(sorted_keys(keys))
    new = more - keys
    assert (checksum(sorted_keys(keys)) + checksum(sorted_keys(new))) % 2**64 == checksum(sorted_keys(keys | new))


def test_the_mix_is_splitmix64s() -> None:
    # The first output of the reference generator for seed 0.
    assert mixed(0) == 0xE220A8397B1DCDAF
    assert checksum(sorted_keys({0})) == 0xE220A8397B1DCDAF
    assert checksum(sorted_keys(set())) == 0


# --- the document ------------------------------------------------------------------------------------------


def test_the_documents_examples_are_golden_files() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text("utf-8")
    examples = [bytes.fromhex(block.split("```")[0]) for block in text.split("```hex\n")[1:]]
    assert examples == [golden("ack_snapshot"), golden("ack_delta_part")]
    for key in (3, 9, 20):
        assert f"{mixed(key):016x}" in text


STRUCTURES = {"Message": Message, "Entry": VectorEntry, "Load": LoadWire, "Want": Want, "Update": Update}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_document_lists_every_field_in_its_place(structure: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text("utf-8")
    lines = text.split(f"**{structure}**")[1].split("**")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and line[2].isdigit()]
    assert [row[1] for row in rows] == list(STRUCTURES[structure].__struct_fields__)
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
