"""The datagrams that pin the wire format, and the script that wrote them.

The test run compares, and never writes: a file that no longer matches means that nodes of two releases cannot talk.
Run `python tests/data/golden/make.py --write` for a new wire version or an appended field only: it writes what is
missing and leaves the rest alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from prefixroute import Domain
from prefixroute.keys.keyset import Keys, checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.wire import (
    KEY_LIMIT,
    LAST_BEAT,
    MARK_MASK,
    Kind,
    LoadWire,
    Message,
    Stamp,
    Update,
    VectorEntry,
    Want,
    encode,
    encode_part,
)

FOLDER = Path(__file__).parent
DOMAIN = Domain("org/model-7b", "sha256:0011", block_size=16, secret=b"golden")
LIFE = 1_700_000_000_000_000_000


def keys(*values: int) -> Keys:
    """Wire keys as an array."""
    return np.array(values, np.uint64)


def mark(*values: int) -> int:
    """The mark of a set."""
    return checksum(keys(*values)) & MARK_MASK


LOAD = LoadWire(3, 2, 4096, 8000, 10000, 524288, 87, 1, 2000, "queue of 4.1 s", 16, 95, 400000, 61000, 1250)

SNAPSHOT = Update(
    *("a/0", 1, 0, 2, checksum(keys(3, 9, 20)), 1, 0, 0),
    *(encode_sorted(keys(3, 9, 20), KEY_LIMIT), b"", "http://a:8000"),
)
ZONED = Update(
    *("a/0", 1, 0, 1, 0, 1, 0, 0, b"", b"", "http://a:8000", "10.0.0.1:7000", "eu"),
)
# The range [2, 2^48 - 1) of the set 1, 2^47, 2^48 - 1; anchors at every fourth depth.
SNAPSHOT_PART = Update(
    *("b/1", LIFE, 0, 77, checksum(keys(1, 2**47, 2**48 - 1)), 4, 2, 2**48 - 1),
    *(encode_sorted(keys(2**47 - 2), 2**48 - 3), b"", "http://b:8000", "10.0.0.2:7000"),
)
# That set gains 5 and loses 2^48 - 1, which is number 2 of 3.
DELTA = Update(
    *("b/1", LIFE, 77, 79, checksum(keys(1, 5, 2**47)), 4, 0, 0),
    *(encode_sorted(keys(5), KEY_LIMIT), encode_sorted(keys(2), 3)),
)
# The set 10, 20, 30, 40, 50, 60 gains 33 and loses 10 and 40. In [25, 60) the receiver has 30, 40, 50.
DELTA_PART = Update(
    *("c/0", 5, 40, 41, checksum(keys(20, 30, 33, 50, 60)), 1, 25, 60),
    *(encode_sorted(keys(33 - 25), 60 - 25), encode_sorted(keys(1), 3)),
)

MESSAGES: dict[str, tuple[Kind, Message]] = {
    "syn_first_contact": (Kind.SYN, Message("a", 1, 0, True, DOMAIN.fields())),
    "syn_contact": (Kind.SYN, Message("a", 2, 0, True, DOMAIN.fields(), contact="10.0.0.1:7000")),
    "syn_vector": (
        Kind.SYN,
        Message(
            *("a", 2**40, 0, True, None),
            [
                VectorEntry("a/0", 1, 12, 2, mark(3, 9, 20), 0, 1, LoadWire()),
                VectorEntry("b/1", LIFE, 900, 77, mark(1, 2**47, 2**48 - 1), 1500, 31, None),
            ],
        ),
    ),
    "syn_want": (
        Kind.SYN,
        Message(
            *("a", 2**40 + 1, 0, False, None),
            [
                VectorEntry("c/0", 5, 6, 0, 0, 250, 0, None, Want(5, 0, 40, [(2**47, KEY_LIMIT)])),
                VectorEntry("d/0", 7, 8, 3, 0xBEEF, 0, 2, None, Want(7, 3, 9, [(0, 2**40), (2**44, 2**45 + 1)])),
            ],
        ),
    ),
    "syn_ack_delta": (
        Kind.SYN_ACK,
        Message(
            "b", 0, 2**40, False, None, [VectorEntry("b/1", LIFE, 901, 79, mark(1, 5, 2**47), 0, 32, LOAD)], [DELTA]
        ),
    ),
    "ack_snapshot": (Kind.ACK, Message("a", updates=[SNAPSHOT])),
    "ack_snapshot_zone": (Kind.ACK, Message("a", updates=[ZONED])),
    "ack_snapshot_part": (Kind.ACK, Message("b", updates=[SNAPSHOT_PART])),
    "ack_delta_part": (Kind.ACK, Message("c", updates=[DELTA_PART])),
    "ack_last_word": (Kind.ACK, Message("a", vector=[VectorEntry("a/0", 1, LAST_BEAT)])),
    "syn_stamped": (
        Kind.SYN,
        Message("a", 2**61, vector=[VectorEntry("a/0", 1, 12)], life=0xFEDCBA98, sequence=70000, to=77),
    ),
    "syn_ack_challenge": (Kind.SYN_ACK, Message("b", 2**62, 2**61, life=77, sequence=5, to=0xFEDCBA98)),
}


def datagram(name: str) -> bytes:
    """Encode a message as a node would."""
    kind, message = MESSAGES[name]
    vector = [encode_part(entry) for entry in message.vector]
    updates = [encode_part(update) for update in message.updates]
    stamp = Stamp(message.life, message.sequence, message.to) if message.life else None
    return encode(kind, DOMAIN.fingerprint, DOMAIN.secret, message, vector, updates, stamp)


def write() -> None:
    """Write what is not there yet, and say what differs."""
    for name in MESSAGES:
        path = FOLDER / f"{name}.bin"
        if not path.exists():
            path.write_bytes(datagram(name))
            print(f"{path.name}: written, {path.stat().st_size} bytes")
        else:
            print(f"{path.name}: {'equal' if path.read_bytes() == datagram(name) else 'DIFFERS; remove it first'}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
