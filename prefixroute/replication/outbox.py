"""Datagrams on their way out: messages are encoded within their budgets, by and by, and wait for the transport.

Rules:
1. Each datagram fits `datagram_bytes` after encoding, and all datagrams of one message fit `burst_bytes`. The first one
   is what the message is; the others are ACKs, which ask for nothing.
2. A change that fits an empty datagram is not cut for want of room in this one: half of it is of no use if the other
   half is lost, and with 16 busy nodes and 30 % loss transfers then began faster than they ended.
3. A peer that asks again before all of its answer has gone gets what it lacks then, instead of the rest.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from ..events import Journal
from ..keys.domain import Domain
from .copies import Peer
from .freshness import Freshness
from .gossip_settings import GossipSettings
from .peers import Peers
from .transfer import Debt, cut, fits_whole
from .wire import Kind, Message, Parts, VectorEntry, encode, encode_part, overhead_bytes


class Datagram(NamedTuple):
    """Bytes for a transport to carry to `address`, once, with no promise of arrival."""

    address: Hashable
    data: bytes


class Outbox:
    """Encodes the messages of one node, and keeps them until the transport takes them."""

    def __init__(
        self, node: str, domain: Domain, settings: GossipSettings, peers: Peers, freshness: Freshness, journal: Journal
    ) -> None:
        self.settings = settings
        self.datagram_bytes = settings.datagram_bytes
        """The budget; a transport may carry less than the settings allow."""
        self.secret = domain.secret
        self._node = node
        self._domain = domain
        self._fingerprint = domain.fingerprint
        self._peers = peers
        self._freshness = freshness
        self._journal = journal
        self._packed: list[Datagram] = []
        self._packing: dict[tuple[str, Kind], Iterator[None]] = {}
        """Messages that are not all encoded yet; each step encodes a datagram."""
        self._bytes = 0
        """Bytes encoded so far, in all."""

    def take(self) -> list[Datagram]:
        """Return and forget the datagrams that are encoded."""
        packed, self._packed = self._packed, []
        return packed

    @property
    def packing(self) -> bool:
        """Whether there is more to send than is encoded."""
        return bool(self._packing)

    def pack(self, most_bytes: float = inf) -> None:
        """Encode what is still to be sent, until that is `most_bytes` or all."""
        end = self._bytes + most_bytes
        while self._packing and self._bytes < end:
            key, packing = next(iter(self._packing.items()))
            if key[0] not in self._peers or next(packing, self) is self:
                del self._packing[key]

    def send(
        self,
        peer: Peer,
        kind: Kind,
        vector: Iterable[VectorEntry],
        debts: Sequence[Debt] = (),
        *,
        nonce: int = 0,
        echo: int = 0,
        whole: int = -1,
    ) -> int:
        """Send a peer a vector and what it is owed, in as many datagrams as the burst allows.

        Return how many entries of the vector fitted: they all go in the first datagram, which says that it is complete
        if they are `whole`.
        """
        domain, contact = (None, "") if peer.same_domain else (self._domain.fields(), self.settings.contact)
        head = Message(self._node, nonce, echo, True, domain, contact=contact)
        burst = Burst(self, peer, kind, head)
        fitted = burst.tell(vector, whole)
        if debts:
            self._packing.pop((peer.node, kind), None)
            self._packing[peer.node, kind] = self._pack(burst, debts)
        else:
            burst.flush()
        return fitted

    def _pack(self, burst: Burst, debts: Iterable[Debt]) -> Iterator[None]:
        """Encode what a peer is owed, a datagram at each step."""
        for debt in debts:
            if not (yield from burst.owe(debt)):
                self._journal.count("bursts_cut")
                break
        else:
            burst.flush()
        if burst.too_long:
            self._journal.count("updates", "too_long", burst.too_long)

    def ask(self, address: Hashable, life: int, nonce: int) -> None:
        """Ask who is at an address, or whether this life is: a SYN of no endpoints, which is answered by as little."""
        domain, contact = self._domain.fields(), self.settings.contact
        self.put(address, life, Kind.SYN, Message(self._node, nonce, domain=domain, contact=contact))

    def challenge(self, address: Hashable, life: int, nonce: int, echo: int) -> None:
        """Ask a life to prove that it takes datagrams at an address."""
        self.put(address, life, Kind.SYN_ACK, Message(self._node, nonce, echo))

    def put(
        self, address: Hashable, life: int, kind: Kind, head: Message, entries: Parts = (), updates: Parts = ()
    ) -> int:
        """Encode a datagram for the receiver's `life`, and keep it for the transport; return its bytes."""
        stamp = self._freshness.stamp(life)
        data = encode(kind, self._fingerprint, self.secret, head, entries, updates, stamp)
        self._packed.append(Datagram(address, data))
        self._bytes += len(data)
        self._journal.count("datagrams_sent")
        self._journal.count("bytes_sent", n=len(data))
        return len(data)


class Burst:
    """Packs one message to a peer into datagrams of `outbox`."""

    def __init__(self, outbox: Outbox, peer: Peer, kind: Kind, head: Message) -> None:
        self._outbox = outbox
        self._peer = peer
        self._kind = kind
        self._head = head
        self._rest = Message(head.sender, domain=head.domain, contact=head.contact)
        datagram_bytes = outbox.datagram_bytes
        self._room = datagram_bytes - overhead_bytes(head)
        self._empty = datagram_bytes - overhead_bytes(self._rest)
        self._left = outbox.settings.burst_bytes - datagram_bytes
        self._entries: list[bytes] = []
        self._updates: list[bytes] = []
        self.too_long = 0
        """Updates that no datagram has room for: the owner's names and urls come from a node with larger datagrams."""

    def tell(self, vector: Iterable[VectorEntry], whole: int) -> int:
        """Pack what fits of a vector in the first datagram, `complete` if that is `whole` entries; return how many."""
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
                    more = self.flush()
                    yield
                    if not more:
                        return False
        return True

    def _waits(self, debt: Debt, lower: int, upper: int) -> bool:
        """Whether a change had better go in the next datagram, because it goes whole there and not here."""
        if not self._entries and not self._updates:
            return False
        return not fits_whole(debt, lower, upper, self._room) and fits_whole(debt, lower, upper, self._empty)

    def flush(self) -> bool:
        """Send what is packed and begin the next datagram; return whether the burst allows one."""
        peer = self._peer
        self._left -= self._outbox.put(peer.address, peer.life, self._kind, self._head, self._entries, self._updates)
        self._kind, self._head, self._room = Kind.ACK, self._rest, self._empty
        self._entries, self._updates = [], []
        return self._left >= 0
