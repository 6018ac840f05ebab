"""Datagrams for the decoder: one of each valid kind, and hostile ones, with what a node makes of them.

All carry a right tag, but those whose header is the fault. The receiver is node "b", which holds version 2 of "a/0"
with the keys `HELD`, and owns "b/0". Run `python tests/data/corpus/make.py --write` after a change of the table.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefixroute import Domain
from prefixroute.keys.keyset import checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.wire import KEY_LIMIT, LAST_BEAT, MAGIC

FOLDER = Path(__file__).parent
DOMAIN = Domain("m", "t", secret=b"corpus")
HELD = [10, 20, 30, 40, 50, 60]
HUGE = b"\xff\xff\xff\xff"

pack = msgspec.msgpack.encode


def tagged(body: bytes, kind: int = 3, magic: bytes = MAGIC) -> bytes:
    """A datagram with a right tag around any body."""
    front = magic + bytes([kind]) + DOMAIN.fingerprint
    return front + blake2b(front + body, digest_size=16, key=DOMAIN.secret, person=b"datagram-tag").digest() + body


def code(*values: int, universe: int = KEY_LIMIT) -> bytes:
    """A set as it is coded."""
    return encode_sorted(np.array(values, np.uint64), universe)


def sum_of(*keys: int) -> int:
    """The checksum of a set."""
    return checksum(np.array(keys, np.uint64))


def says(vector: list[Any] | None = None, updates: list[Any] | None = None, kind: int = 3, *more: Any) -> bytes:
    """A datagram of node "a"."""
    return tagged(pack(["a", 0, 0, False, None, vector or [], updates or [], *more]), kind)


def snapshot(added: bytes, lower: int = 0, upper: int = 0, total: int = 0, **other: Any) -> bytes:
    """Version 3 of "a/0"."""
    return change(0, added, other.pop("removed", b""), lower, upper, total, **other)


def change(
    since: int, added: bytes, removed: bytes, lower: int = 0, upper: int = 0, total: int = 0, **other: Any
) -> bytes:
    """A step of "a/0" to version 3."""
    head = [other.get("endpoint", "a/0"), 1, since, other.get("version", 3), total, other.get("anchor_stride", 1)]
    return says([], [[*head, lower, upper, added, removed, "http://a", "a:7"]])


def claim(n: int, m: int, rest: bytes) -> bytes:
    """A code with this header."""
    return n.to_bytes(4, "little") + m.to_bytes(4, "little") + rest


def entry(**fields: Any) -> list[Any]:
    """An entry of "a/0" that is no news."""
    names = ("endpoint", "incarnation", "heartbeat", "version", "mark", "age_ms", "revision", "load", "want")
    values = dict(zip(names, ("a/0", 1, 1, 2, sum_of(*HELD) & 0xFFFF, 0, 0, None, None), strict=True)) | fields
    return list(values.values())


def updates_of(*fields: tuple[int, Any]) -> bytes:
    """A datagram with a snapshot of which some fields are others."""
    update: list[Any] = ["a/0", 1, 0, 3, sum_of(3), 1, 0, 0, code(3), b"", "", ""]
    for at, value in fields:
        update[at] = value
    return says([], [update])


LOAD = [3, 2, 4096, 8000, 10000, 524288, 87, 1, 2000, "queue", 16, 95]
GOOD = code(3, 9, 20)
BARE = b"\x97\xa1a\x00\x00\xc2\xc0"
SHAPE = updates_of()[29:]

VALID: dict[str, bytes] = {
    "syn_first": tagged(pack(["a", 1, 0, True, DOMAIN.fields(), [], [], "10.0.0.1:7000"]), 1),
    "syn_vector": says(
        [entry(), entry(endpoint="c/0", load=LOAD, revision=4), entry(endpoint="b/0", version=1)], [], 1
    ),
    "syn_wants_all": says([entry(endpoint="b/0", version=0, want=[1, 0, 1, [[0, KEY_LIMIT]]])], [], 1),
    "syn_wants_16": says([entry(want=[1, 0, 2, [[i, i + 1] for i in range(0, 64, 4)]])], [], 1),
    "syn_wants_overlapping": says([entry(want=[1, 0, 2, [[0, 30], [20, 40], [0, KEY_LIMIT], [9, 3]]])], [], 1),
    "syn_wants_a_transfer_that_never_was": says([entry(want=[9, 7, 3, [[0, 30]]])], [], 1),
    "syn_ack": says([entry(heartbeat=7, load=LOAD, revision=9)], [], 2),
    "last_word": says([entry(heartbeat=LAST_BEAT, version=0)]),
    "last_word_of_another": says([entry(endpoint="b/0", heartbeat=LAST_BEAT, version=0)]),
    "entry_without_trailing_fields": says([["a/0", 1, 2]]),
    "entry_of_the_future": says([[*entry(), "new", [1, 2]]]),
    "snapshot": snapshot(GOOD, total=sum_of(3, 9, 20)),
    "snapshot_of_nothing": snapshot(b""),
    "snapshot_part": snapshot(code(3, universe=9), 0, 9, sum_of(3, 9, 20)),
    "snapshot_tail": snapshot(code(0, 11, universe=KEY_LIMIT - 9), 9, 0, sum_of(3, 9, 20)),
    "snapshot_wrong_checksum": snapshot(GOOD, total=1),
    "delta": change(2, code(33), code(1, universe=6), total=sum_of(10, 30, 33, 40, 50, 60)),
    "delta_part": change(2, code(8, universe=35), code(1, universe=3), 25, 60, 5),
    "delta_widest_stride": change(2, code(33), b"", total=sum_of(*HELD, 33), anchor_stride=32),
    "delta_that_does_not_fit": change(2, code(10), b"", total=sum_of(*HELD)),
    "delta_of_another_version": change(1, code(33), code(99, universe=100)),
    "delta_backwards": change(2, code(33), b"", version=1),
    "update_of_a_stranger": snapshot(GOOD, endpoint="z/0"),
    "update_of_ones_own": snapshot(GOOD, endpoint="b/0"),
    "overlapping_parts": says(
        [],
        [
            ["a/0", 1, 0, 3, 0, 1, 0, 30, code(3, 9, 20, universe=30), b""],
            ["a/0", 1, 0, 3, 7, 2, 10, 40, code(11, universe=30), b""],
            ["a/0", 1, 0, 3, 0, 1, 5, 6, code(0, universe=1), b""],
        ],
    ),
    "parts_without_keys": says([], [["a/0", 1, 0, 3, 0, 1, 2 * i, 2 * i + 1, b"", b""] for i in range(40)]),
}

KEYS: dict[str, bytes] = {
    "count_of_2_32": snapshot(claim(2**32 - 1, 4, bytes(32))),
    "unary_of_2_32": snapshot(claim(4, 2**32 - 1, bytes(32))),
    "both_of_2_32": snapshot(HUGE + HUGE + bytes(32)),
    "count_0": snapshot(claim(0, 0, b"")),
    "header_alone": snapshot(claim(3, 1, b"")),
    "half_a_header": snapshot(GOOD[:5]),
    "no_remainders": snapshot(GOOD[:9]),
    "torn_remainders": snapshot(GOOD[:-1]),
    "a_byte_more": snapshot(GOOD + b"\0"),
    "padding_set": snapshot(GOOD[:-1] + bytes([GOOD[-1] | 1])),
    "fewer_ones_than_claimed": snapshot(GOOD[:8] + b"\xc0" + GOOD[9:]),
    "more_ones_than_claimed": snapshot(GOOD[:8] + b"\xf0" + GOOD[9:]),
    "unary_of_zeros": snapshot(claim(1, 200, bytes(206))),
    "a_key_twice": snapshot(claim(2, 1, b"\xc0" + bytes(12))),
    "a_key_beyond_all": snapshot(code(KEY_LIMIT, universe=KEY_LIMIT + 1)),
    "a_key_beyond_the_range": snapshot(code(9, universe=10), 0, 9),
    "fixed_width_keys": snapshot(b"".join(key.to_bytes(6, "little") for key in (3, 9, 20))),
    "range_empty": snapshot(b"", 9, 9),
    "range_backwards": snapshot(b"", 9, 3),
    "range_at_the_end": snapshot(b"", KEY_LIMIT, 0),
    "removed_in_a_snapshot": snapshot(GOOD, removed=code(0, universe=6)),
    "rank_beyond_the_held": change(2, b"", code(6, universe=7)),
    "rank_beyond_the_range": change(2, b"", code(3, universe=6), 25, 60),
    "rank_where_nothing_is": change(2, b"", code(0, universe=1), 61, 99),
    "ranks_of_2_32": change(2, b"", claim(2**32 - 1, 2**31, bytes(40))),
    "more_ranks_than_keys": change(2, b"", code(*range(60), universe=60)),
}

MALFORMED: dict[str, bytes] = {
    "no_body": tagged(b""),
    "a_map": tagged(pack({"sender": "a"})),
    "a_number": tagged(b"\x07"),
    "reserved_byte": tagged(b"\xc1"),
    "two_values": tagged(pack(["a"]) * 2),
    "cut": tagged(SHAPE[:-3]),
    "array_of_2_32": tagged(b"\xdd" + HUGE),
    "vector_of_2_32": tagged(BARE + b"\xdd" + HUGE),
    "updates_of_2_32": tagged(BARE + b"\x90\xdd" + HUGE),
    "keys_of_2_32": tagged(BARE + b"\x90\x91\x9c\xa3a/0\x01\x00\x03\x00\x01\x00\x00\xc6" + HUGE),
    "extension_of_2_32": tagged(b"\x97\xc9" + HUGE + b"\x01"),
    "timestamp": tagged(b"\x97\xd6\xff\x00\x00\x00\x00"),
    "arrays_3000_deep": tagged(BARE + b"\x90\x90\xa0" + b"\x91" * 3000),
    "maps_1500_deep": tagged(b"\x99" + BARE[1:] + b"\x90\x90\xa0" + b"\x81\xa0" * 1500),
    "bad_utf8": tagged(b"\x91\xa2\xc3\x28"),
    "sender_as_bytes": tagged(b"\x91\xc4\x01a"),
    "nonce_nan": tagged(b"\x92\xa1a\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
    "endpoint_empty": updates_of((0, "")),
    "incarnation_0": updates_of((1, 0)),
    "version_negative": updates_of((3, -1)),
    "checksum_a_float": tagged(SHAPE.replace(pack(sum_of(3)), b"\xcb" + bytes(8))),
    "stride_0": updates_of((5, 0)),
    "stride_33": updates_of((5, 33)),
    "upper_past_the_keys": updates_of((7, KEY_LIMIT + 1)),
    "keys_as_text": updates_of((8, "3")),
    "keys_as_numbers": updates_of((8, [3, 9, 20])),
    "contact_long": updates_of((11, "x" * 257)),
    "mark_2_16": says([entry(mark=2**16)]),
    "load_text": says([entry(load="busy")]),
    "want_no_ranges": says([entry(want=[1, 0, 2, []])]),
    "want_17_ranges": says([entry(want=[1, 0, 2, [[0, 1]] * 17])]),
    "want_half_a_range": says([entry(want=[1, 0, 2, [[5]]])]),
}

HEADERS: dict[str, tuple[str, bytes]] = {
    "empty": ("truncated", b""),
    "header_short": ("truncated", VALID["snapshot"][:28]),
    "another_magic": ("magic", tagged(SHAPE, magic=b"HTTP")),
    "wire_version_1": ("version", tagged(SHAPE, magic=b"PRT1")),
    "kind_9": ("kind", tagged(SHAPE, kind=9)),
    "tag_torn": ("forged", VALID["snapshot"][:-1] + b"!"),
}

CORPUS: dict[str, tuple[str, bytes]] = {
    **{f"valid_{name}": ("", data) for name, data in VALID.items()},
    **{f"keys_{name}": ("keys", data) for name, data in KEYS.items()},
    **{f"malformed_{name}": ("malformed", data) for name, data in MALFORMED.items()},
    **{f"header_{name}": case for name, case in HEADERS.items()},
}
"""By name: the kind under which the receiver refuses it, "" if it does not; and the datagram."""


def write() -> None:
    """Write every file, and remove those that are no longer in the table."""
    for path in FOLDER.glob("*.bin"):
        if path.stem not in CORPUS:
            path.unlink()
    for name, (_, data) in CORPUS.items():
        (FOLDER / f"{name}.bin").write_bytes(data)
    print(f"{len(CORPUS)} files, {sum(len(data) for _, data in CORPUS.values())} bytes")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
