"""How a hybrid model's endpoint is published, whose hits end at some depths only: the ends, and where to look for them.

Rules:
1. Such a set contains the key `ENDS_ONLY`. Then a plain key says: the endpoint holds this prefix, and a hit can end
   here. The set is not closed under prefixes, and a match is the deepest key on the prompt's path.
2. A *marked* key says where to look. Marked key(1): some end is on a path through this first block. Marked key(s), s a
   multiple of 32 above 0: some end is on a path through it, at depth s + 1 to s + 32. A mark proves nothing about the
   prompt at hand.
3. A reader that does not know marks finds next to nothing: it estimates too low, never too high. So the wire did not
   have to change.
"""

from __future__ import annotations

from .chain import STRIDE

_MARK = 0x9E3779B97F4A7C15
"""Any pattern with bits set all over: a marked key must not look like the key of a path."""

ENDS_ONLY = 0xC2B2AE3D27D4EB4F
"""A 64-bit key that no path is expected to have."""


def marked(key: int) -> int:
    """Return the marked form of a 64-bit key."""
    return key ^ _MARK


def section(depth: int) -> int:
    """Return the depth whose mark tells of ends at `depth`: a multiple of 32; up to 32 it is 0, which has no mark."""
    return (depth - 1) // STRIDE * STRIDE
