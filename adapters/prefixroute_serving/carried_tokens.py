"""A forwarded prompt's tokens, carried along so that the peer need not read the prompt again.

The body of a forward is the client's body, followed by the token ids, 32 bits each, little-endian. Rules:
1. `TOKENS_HEADER` says where the client's body ends, and proves with a tag under a secret of the fleet that a node of
   the same domain wrote body and tokens. Without the proof, a sender of wrong tokens could make a node advertise
   prefixes that it does not hold.
2. Without a secret no tokens are carried. Tokens without a valid proof are cut off, and the prompt is read anew.

Measured, a text of 16,000 tokens: 0.14 ms to pack and 0.14 ms to unpack; asking an idle stub of an engine takes 3.7 ms,
and 1 ms of CPU here.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixroute import Domain

from .seals import Seals

_PURPOSE: Final = b"carried tokens"
_TOKEN_BYTES: Final = 4
_ABLE: Final = array("I").itemsize == _TOKEN_BYTES


class Carried(NamedTuple):
    """The client's body, and the tokens that came with it, None if there are none."""

    body: bytes
    tokens: array[int] | None


class TokenCarrier:
    """Packs and unpacks forwarded bodies of one domain. O(bytes)."""

    def __init__(self, domain: Domain, secrets: Sequence[bytes] = ()) -> None:
        self.seals = Seals(domain, _PURPOSE, secrets)

    def pack(self, body: bytes, tokens: array[int] | None) -> tuple[bytes, str]:
        """Return a forward's body and the value of its header; without tokens to carry, the same body and ""."""
        if not (tokens and _ABLE and self.seals):
            return body, ""
        packed = body + _little(tokens).tobytes()
        return packed, f"{len(body)}-{self.seals.seal(_eight(len(body)), packed)}"

    def unpack(self, packed: bytes, header: str | None) -> Carried:
        """Take apart what `pack` made; nothing that a client may send makes this raise."""
        length, _, tag = (header or "").partition("-")
        if not (length.isascii() and length.isdecimal() and len(length) < 16 and int(length) <= len(packed)):
            return Carried(packed, None)
        end = int(length)
        body = packed[:end]
        whole = (len(packed) - end) % _TOKEN_BYTES == 0
        if not (whole and _ABLE and self.seals.proves(tag, _eight(end), packed)):
            return Carried(body, None)
        tokens = array("I")
        tokens.frombytes(memoryview(packed)[end:])
        return Carried(body, _little(tokens))


def _eight(end: int) -> bytes:
    return end.to_bytes(8, "little")


def _little(tokens: array[int]) -> array[int]:
    """Convert to or from little-endian; the same array where that is the machine's byte order."""
    if sys.byteorder == "little":
        return tokens
    turned = array("I", tokens)
    turned.byteswap()
    return turned
