"""The last batches of a tap, as frames ready to send: what a reader that comes late, or again, is served from.

Rules:
1. Entries are in sequence order. A number that is not there was dropped or has been pushed out: both are lost.
2. A position counts entries, not sequence numbers; it stays valid while older entries are pushed out.
3. Bounded by entries and by bytes, but the newest entry always stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final

MIN_ENTRIES: Final = 1024
"""An engine's ``buffer_steps`` may be 0, yet readers are served from here."""


class Ring:
    """`entries` and `max_bytes` bound what is kept. Each method O(1), amortised, but `seek`, which is O(entries)."""

    def __init__(self, entries: int, max_bytes: int) -> None:
        self._most = max(MIN_ENTRIES, entries)
        self._max_bytes = max_bytes
        self._frames: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._first = 0
        self.next_seq = 0
        """All below has been kept, or is lost."""

    @property
    def entries(self) -> int:
        """Batches that are kept."""
        return len(self._frames)

    @property
    def size(self) -> int:
        """Bytes that the entries take."""
        return self._bytes

    def add(self, seq: int, frame: bytes) -> None:
        """Keep the frame of batch `seq`, which is `next_seq` or later; push out what is too much."""
        self._frames.append((seq, frame))
        self._bytes += len(frame)
        self.next_seq = seq + 1
        while len(self._frames) > 1 and (len(self._frames) > self._most or self._bytes > self._max_bytes):
            self._bytes -= len(self._frames.popleft()[1])
            self._first += 1

    def lose(self, next_seq: int) -> None:
        """Take note that what is below `next_seq` and has not been added will not come."""
        self.next_seq = max(self.next_seq, next_seq)

    def seek(self, seq: int) -> int:
        """Return the position of the first entry numbered `seq` or later."""
        return self._first + bisect_left(self._frames, (seq, b""))

    def read(self, position: int, max_bytes: int) -> tuple[list[bytes], int, int]:
        """Return frames from `position` on, the position after them, and the sequence number after them.

        At least one if there is any, then no more than `max_bytes`. The number is -1 when there is none.
        """
        at = max(0, position - self._first)
        frames: list[bytes] = []
        size, after = 0, -1
        while at < len(self._frames):
            seq, frame = self._frames[at]
            if frames and size + len(frame) > max_bytes:
                break
            frames.append(frame)
            size += len(frame)
            at += 1
            after = seq + 1
        return frames, self._first + at, after
