"""Where an engine stores a prompt that the mirror does not find: the path that is like it, and where the two part.

Rules:
1. Only the form of the tokens is looked at: a path is like a prompt when most of what follows the fork is equal place
   by place (another date), or when a stretch of the prompt is in it (another beginning, a template).
2. No more than `PATHS` paths below the fork are looked at, the newest first, and `REACH` blocks of each.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..events import Differs
from ..keys.chain import TOKEN_BYTES

PATHS = 256
REACH = 16
_STRETCH = 12
"""Tokens that two texts have in common by chance never, and that a short prompt still has behind its beginning."""

_ALIKE = 0.75


def parting(ours: bytes, paths: Iterable[bytes], start: int) -> Differs | None:
    """Return where a prompt parts from the first path that is like it, None if none is. O(paths).

    `ours` and the paths are packed tokens from token `start` of the prompt on, which all have in common what is before.
    """
    mine = np.frombuffer(ours, "<u4")
    stretches = [ours[i : i + _STRETCH * TOKEN_BYTES] for i in _offsets(len(mine))]
    for path in paths:
        theirs = np.frombuffer(path, "<u4")
        n = min(len(mine), len(theirs))
        equal = mine[:n] == theirs[:n]
        if n < _STRETCH or equal.all():
            continue
        if equal.mean() >= _ALIKE or any(_within(stretch, path) for stretch in stretches):
            at = int(equal.argmin())
            return Differs(start + at, int(mine[at]), int(theirs[at]))
    return None


def _offsets(tokens: int) -> list[int]:
    """Where stretches of so many tokens begin, in bytes: a few that a difference cannot all hit."""
    return [i * TOKEN_BYTES for i in range(0, tokens - _STRETCH + 1, _STRETCH)][:8]


def _within(stretch: bytes, path: bytes) -> bool:
    at = path.find(stretch)
    while at > 0 and at % TOKEN_BYTES:
        at = path.find(stretch, at + 1)
    return at >= 0
