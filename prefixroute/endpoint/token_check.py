"""Do the engine's tokens of a prompt equal those that this node hashed: told where they never do.

| a served prompt | says |
|---|---|
| is found in the mirror as far as the engine reused it | they are equal |
| was reused further than the mirror finds it, and a path like it is there | they differ where the two part |
| was reused further, and nothing is like it | nothing: events may be under way |
| told no cached tokens, is not found, and a path like it is there | the same, but `UNCOUNTED` times in a row |

Rules:
1. A prompt is looked up when some more were served: its events come meanwhile. Only an exact mirror says anything.
2. What is found `IN_ROW` times in a row at one place is told, once for each place (sglang#27386).
"""

from __future__ import annotations

from collections import deque

from ..events import Differs
from ..keys.chain import TokenChain, reusable_depth
from ..residency.mirror import Residency

IN_ROW = 2
"""Prompts in a row that were reused, and stored otherwise, before it is told."""

UNCOUNTED = 8
"""The same where the engine does not tell what it reused: what is not found may have been evicted."""

_LATER = 2
"""Prompts that are served before one is looked up."""


class TokenCheck:
    """Follows the prompts that one engine serves."""

    def __init__(self) -> None:
        self.found: Differs | None = None
        """Where prompts differ now; None while they are equal, as far as is known."""
        self._waiting: deque[tuple[TokenChain, int | None]] = deque()
        self._in_row = self._skip = self._position = 0
        self._told: set[int] = set()

    def forget(self) -> None:
        """Forget what was served: the engine began anew."""
        self.__init__()  # type: ignore[misc]

    def served(
        self, chain: TokenChain, cached_tokens: int | None, unit: int, residency: Residency
    ) -> tuple[bool, bool]:
        """Take a served prompt, and look an earlier one up; return whether that one differs, and whether to say so.

        O(1) as a rule; O(paths) for a prompt that is not found.
        """
        if chain.depth and not chain.extras:
            self._waiting.append((chain, cached_tokens))
        if len(self._waiting) <= _LATER:
            return False, False
        return self._look_up(*self._waiting.popleft(), unit, residency)

    def _look_up(self, chain: TokenChain, cached: int | None, unit: int, residency: Residency) -> tuple[bool, bool]:
        block, whole = chain.spec.block_tokens, reusable_depth(chain.n_tokens, unit, chain.spec.block_tokens)
        if cached is not None:
            whole = min(whole, (cached - cached % (unit or block)) // block)
        if not whole:
            return False, False
        if residency.holds(chain, whole):
            self._in_row, self.found = 0, None
            return False, False
        if cached is None and self._skip:
            self._skip -= 1
            return False, False
        found = residency.stray(chain, residency.depth(chain))
        if found is None:
            # The longer nothing is found where nobody says that there is anything, the less often it is looked for.
            self._in_row, self._skip = 0, min(2 * self._skip + 1, 63) if cached is None else 0
            return False, False
        self._in_row = self._in_row + 1 if found.position == self._position else 1
        self._position = found.position
        if self._in_row < (UNCOUNTED if cached is None else IN_ROW):
            return False, False
        self.found = found
        new = found.position not in self._told and len(self._told) < 16
        self._told.add(found.position)
        return True, new
