"""One answer being packed: a vector, then updates, in as many datagrams as the burst allows.

Rules:
1. Each datagram fits `datagram_bytes` after encoding, and all together fit `burst_bytes`.
2. The first one is what the message is; what goes on is an ACK, which asks for nothing.
3. A change that fits an empty datagram is not cut for want of room in this one: half of it is of no use if the other
   half is lost, and with 16 busy nodes and 30 % loss transfers then began faster than they ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import msgspec

from .transfer import Debt, cut, fits_whole
from .wire import Kind, Message, VectorEntry, encode_part, overhead_bytes


class Burst:
    """Packs one answer. `put(kind, head, entries, updates)` takes a datagram that is full; it returns its bytes."""

    def __init__(
        self,
        kind: Kind,
        head: Message,
        datagram_bytes: int,
        burst_bytes: int,
        put: Callable[[Kind, Message, list[bytes], list[bytes]], int],
    ) -> None:
        self._kind = kind
        self._head = head
        self._rest = Message(head.sender, domain=head.domain, contact=head.contact)
        self._room = datagram_bytes - overhead_bytes(head)
        self._empty = datagram_bytes - overhead_bytes(self._rest)
        self._left = burst_bytes - datagram_bytes
        self._put = put
        self._entries: list[bytes] = []
        self._updates: list[bytes] = []
        self.too_long = 0
        """Updates that no datagram has room for: names and urls of a node that may send larger ones."""

    def tell(self, vector: Iterable[VectorEntry], whole: int) -> int:
        """Pack what fits of a vector; return how many entries that is. All go in the first datagram.

        `whole` entries list everything that the sender knows, and the message then says so.
        """
        for entry in vector:
            encoded = encode_part(entry)
            if len(encoded) > self._room:
                break
            self._entries.append(encoded)
            self._room -= len(encoded)
        self._head = msgspec.structs.replace(self._head, complete=len(self._entries) == whole)
        return len(self._entries)

    def owe(self, debt: Debt) -> Generator[None, None, bool]:
        """Pack a debt, all its ranges, a datagram at each step; return False when the burst is used up."""
        for lower, upper in debt.ranges:
            at = lower
            while at < upper:
                part, end = (None, at) if self._waits(debt, at, upper) else cut(debt, at, upper, self._room)
                if part is not None:
                    self._updates.append(part)
                    self._room -= len(part)
                    at = end
                elif not self._entries and not self._updates:
                    self.too_long += 1
                    break
                else:
                    more = self._flush()
                    yield
                    if not more:
                        return False
        return True

    def end(self) -> None:
        """Send what is packed."""
        self._flush()

    def _waits(self, debt: Debt, lower: int, upper: int) -> bool:
        """Whether a change goes whole in the next datagram."""
        packed = self._entries or self._updates
        return (
            bool(packed)
            and not fits_whole(debt, lower, upper, self._room)
            and fits_whole(debt, lower, upper, self._empty)
        )

    def _flush(self) -> bool:
        """Send what is packed and begin the next datagram; return whether the burst allows one."""
        self._left -= self._put(self._kind, self._head, self._entries, self._updates)
        self._kind, self._head, self._room = Kind.ACK, self._rest, self._empty
        self._entries, self._updates = [], []
        return self._left >= 0
