"""The datagrams that pin the wire format, and the script that wrote them.

The test run compares, and never writes: a file that no longer matches means that nodes of two releases cannot talk.
Run `python tests/data/golden/make.py --write` for a new wire version only: it writes what is missing and leaves the
rest alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from prefixroute import Domain
from prefixroute.digest import (
    KEY_LIMIT,
    Keys,
    Kind,
    LoadWire,
    Message,
    Update,
    VectorEntry,
    Want,
    checksum,
    encode,
    encode_part,
    pack_keys,
)

FOLDER = Path(__file__).parent
DOMAIN = Domain("org/model-7b", "sha256:0011", block_size=16, secret=b"golden")


def keys(*values: int) -> Keys:
    """Wire keys as an array."""
    return np.array(values, np.uint64)


LOAD = LoadWire(3, 2, 4096, 8000, 10000, 524288, 87, 1, 2000, "queue of 4.1 s", 16, 95)

SNAPSHOT = Update(
    *("a/0", 1, 0, 2, checksum(keys(3, 9, 20)), 0, KEY_LIMIT),
    *(pack_keys(keys(3, 9, 20)), b"", "http://a:8000"),
)
SNAPSHOT_PART = Update(
    *("b/1", 1_700_000_000_000_000_000, 0, 77, checksum(keys(1, 2**47, 2**48 - 1)), 2, 2**48 - 1),
    *(pack_keys(keys(2**47)), b"", "http://b:8000"),
)
DELTA = Update(
    *("b/1", 1_700_000_000_000_000_000, 77, 79, checksum(keys(1, 5, 2**47)), 0, KEY_LIMIT),
    *(pack_keys(keys(5)), pack_keys(keys(2**48 - 1))),
)

MESSAGES: dict[str, tuple[Kind, Message]] = {
    "syn_first_contact": (Kind.SYN, Message("a", 1, 0, True, DOMAIN.fields())),
    "syn_vector": (
        Kind.SYN,
        Message(
            *("a", 2**40, 0, True, None),
            [
                VectorEntry("a/0", 1, 12, 2, 0, LoadWire()),
                VectorEntry("b/1", 1_700_000_000_000_000_000, 900, 77, 1500, LOAD),
                VectorEntry("c/0", 5, 6, 0, 250, None, Want(5, 0, 40, 2**47)),
            ],
        ),
    ),
    "syn_ack_delta": (
        Kind.SYN_ACK,
        Message("b", 0, 2**40, False, None, [VectorEntry("a/0", 1, 11, 1, 180, LoadWire())], [DELTA]),
    ),
    "ack_snapshot": (Kind.ACK, Message("a", updates=[SNAPSHOT])),
    "ack_snapshot_part": (Kind.ACK, Message("b", updates=[SNAPSHOT_PART])),
}


def datagram(name: str) -> bytes:
    """Encode a message as a node would."""
    kind, message = MESSAGES[name]
    vector = [encode_part(entry) for entry in message.vector]
    updates = [encode_part(update) for update in message.updates]
    return encode(kind, DOMAIN.fingerprint, DOMAIN.secret, message, vector, updates)


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
