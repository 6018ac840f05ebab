"""Anti-entropy: exchanges, vectors and budgets. Bytes come in and go out; nobody waits for anybody.

An exchange begins with SYN(vector) to one peer. The answer, SYN-ACK, carries what the sender of the SYN lacks and the
entries in which the two differ; the last message, ACK, carries what the answerer lacks. An entry is (endpoint,
incarnation, version, heartbeat, age, load), so load spreads as fast as gossip does. Any node relays any endpoint's
updates.

Rules:
1. Each message fits `datagram_bytes` after encoding, and an answer as a whole fits `burst_bytes`. What does not fit is
   cut by key range and goes on from what the receiver then lacks.
2. Nothing that arrives raises: it is counted by kind, and an event tells, at a bounded pace. `limits` says how much
   of it is looked at.
3. A load travels when the receiver has not got its revision, keys when it has not got their version, and a heartbeat
   always: so a quiet fleet exchanges bare entries, and those rarely.
4. Nobody is sent the keys of an endpoint that is suspected: who needs them will hear of it when it is back.
5. What a peer is owed is packed by and by (`pack`). Who asks again before all of it has gone gets what it lacks then
   instead of the rest.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from math import inf
from typing import NamedTuple

import msgspec
from cachetools import LRUCache

from ..errors import DecodeError, UsageError
from ..events import DatagramRejected, DomainMismatch, NodeEvent
from ..keys.domain import Domain
from ..keys.keyset import Keys
from ..keys.names import owner_of
from .copies import Copy, Peer
from .freshness import Freshness, Verdict
from .gossip_settings import GossipSettings
from .limits import BYTE_S, COPY_S, ENTRY_S, HELD_S, UPDATE_S
from .members import Members
from .receiving import Receiver
from .sending import Burst, Debt, least_room, owed
from .tempo import Tempo
from .wire import Envelope, Kind, Message, VectorEntry, decode, encode, overhead_bytes, verify
from .writer_set import OwnedSet

REFUSAL_TOLD_S = 60.0
"""The same refusal of a foreign domain is told once in so long."""


class Datagram(NamedTuple):
    """Bytes for a transport to carry to `address`, once, with no promise of arrival."""

    address: Hashable
    data: bytes


class Gossip:
    """The replication state of one node. `on_update(endpoint, added, removed)` tells every change of a replica."""

    def __init__(
        self,
        node: str,
        domain: Domain,
        settings: GossipSettings,
        rng: random.Random,
        now: float,
        emit: Callable[[NodeEvent], None],
        counters: Counter[str],
        on_update: Callable[[str, Keys, Keys], None],
    ) -> None:
        self.node = node
        self.settings = settings
        self.tempo = Tempo(settings, now)
        self.members = Members(node, settings, self.tempo, emit, counters, on_update)
        self.intake = Receiver(self.members, settings, self.tempo, emit, self._reject, counters, on_update)
        front = overhead_bytes(Message(node, 2**63 - 1, 2**63 - 1, True, domain.fields(), contact=settings.contact))
        least = front + least_room(bool(settings.zone))
        if settings.datagram_bytes < least:
            raise UsageError(f"datagram_bytes must be at least {least} with names as long as this domain's")
        self._domain = domain
        self._fingerprint = domain.fingerprint
        self.secrets: tuple[bytes, ...] = (domain.secret,)
        """What authenticates datagrams: the first signs, each is good."""
        self._rng = rng
        self._emit = emit
        self._counters = counters
        self._outbox: list[Datagram] = []
        self._packing: dict[tuple[str, Kind], Iterator[None]] = {}
        """Bursts that are not encoded yet, each step a datagram."""
        # A generator that is seeded the same in every run must not bring a former life back.
        self.freshness = Freshness(node, settings, f"{rng.getrandbits(64)} {now!r}".encode())
        self._turns: Counter[bool] = Counter()
        self._partners: deque[str] = deque()
        self._refused: LRUCache[tuple[Hashable, str], float] = LRUCache(256)
        self._now = now

    # --- what the node calls -------------------------------------------------------------------------------

    @property
    def peers(self) -> dict[str, Peer]:
        """The nodes that this one talks to, by name."""
        return self.members.peers

    @property
    def copies(self) -> dict[str, Copy]:
        """What this node knows of every endpoint, its own included."""
        return self.members.copies

    def take_touched(self) -> set[str]:
        """Return and forget the endpoints of others whose load, liveness or keys changed."""
        touched, self.members.touched = self.members.touched, set()
        return touched

    @property
    def packing(self) -> bool:
        """Whether there is more to send than was packed."""
        return bool(self._packing)

    def pack(self, most_bytes: float = inf) -> None:
        """Encode what is to be sent, until that are `most_bytes` or it is all."""
        counters = self._counters
        end = counters["bytes_sent"] + most_bytes
        while self._packing and counters["bytes_sent"] < end:
            key, packing = next(iter(self._packing.items()))
            if key[0] not in self.peers or next(packing, self) is self:
                del self._packing[key]

    def take_outbox(self) -> list[Datagram]:
        """Return and forget the datagrams that are packed."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def exchange(self, now: float) -> bool:
        """Begin the exchange that is due: publish, send SYN to one peer; when a round begins beat and sweep as well.

        Return whether a round began. O(endpoints).
        """
        self.members.watch(now)
        beats = self.tempo.beats(now)
        if beats:
            self.members.sweep(now)
            self._counters["rounds"] += 1
        for copy in self.copies.values():
            if isinstance(copy.keys, OwnedSet):
                self._speak(copy, copy.keys, beats, now)
        peer = self._partner()
        if peer is not None:
            if len(peer.probes) >= 8:
                peer.probes.pop(next(iter(peer.probes)))
            peer.probes[self.freshness.nonce()] = now
            copies = self._rotated()
            left = (gone.entry(endpoint, now) for endpoint, gone in self.members.left.items())
            entries = chain((copy.entry(now, copy.mine) for copy in copies), left)
            sent = self._send(peer, Kind.SYN, 0, entries, [])
            self._turns.update(copy.mine for copy in copies[:sent])
        self.tempo.went(len(self.peers), now)
        return beats

    def farewell(self, now: float) -> None:
        """Tell all peers that are there what has left. O(peers x left)."""
        entries = [left.entry(endpoint, now) for endpoint, left in self.members.left.items()]
        for peer in self.peers.values():
            if entries and peer.state == "heard":
                self._send(peer, Kind.ACK, 0, entries, [])

    def receive(self, data: bytes, source: Hashable, now: float) -> bool:
        """Take one datagram from a transport; return whether it was of use. Never raises for its content."""
        self._now = now
        self._counters["datagrams_received"] += 1
        self._counters["bytes_received"] += len(data)
        if not self.members.limits.admits(source, len(data), now):
            self._reject(source, "limited", "more than is looked at of one address, or of all that nothing proves")
            return False
        try:
            envelope = decode(data, *self.secrets)
        except DecodeError as error:
            self._reject(source, error.kind, str(error))
            return False
        return self._take(envelope, source, len(data), now)

    def screen(self, data: bytes, source: Hashable, now: float) -> bool:
        """Whether a datagram has a right tag; one that has not is counted and told here. O(bytes)."""
        try:
            verify(data, *self.secrets)
        except DecodeError as error:
            self._now = now
            self._counters["datagrams_received"] += 1
            self._counters["bytes_received"] += len(data)
            self._reject(source, error.kind, str(error))
            return False
        return True

    def _take(self, envelope: Envelope, source: Hashable, size: int, now: float) -> bool:
        """Take a datagram whose tag is right."""
        if envelope.signed:
            self._counters["datagrams_signed_otherwise"] += 1
        self.members.watch(now)
        message = envelope.message
        if envelope.fingerprint != self._fingerprint:
            self._refuse_domain(source, message, now)
            return False
        if message.sender == self.node:
            self._reject(source, "self", "a datagram from a node of this node's own name")
            return False
        peer = self.peers.get(message.sender)
        contact = message.contact or self.freshness.contact_of(message)
        if peer is None and not self.members.would_learn(message.sender, contact):
            self._reject(source, "stranger", f"node {message.sender!r} is no peer: add_peer it first")
            return False
        if peer is not None and not peer.meter.take(size, now):
            self._reject(source, "limited", f"node {peer.node!r} sends more than an honest one does")
            return False
        verdict, waiting = self.freshness.judge(peer, envelope.kind, message, now)
        if verdict is not Verdict.FRESH:
            self._counters[f"datagrams_{verdict.value}"] += 1
            if verdict is Verdict.CHALLENGE:
                self._challenge(peer, message, size, now)
            elif envelope.kind is Kind.SYN_ACK and message.nonce and message.to != self.freshness.life:
                reason = (
                    "a SYN in this node's name was none of it: the name is used twice, or a recording is played back"
                )
                self._reject(source, "namesake", reason)
            return False
        self.members.limits.proved(source)
        if peer is None:
            peer = self.members.learn_peer(message.sender, contact, now)
            assert peer is not None, "a node that would not be learnt is a stranger"
        if waiting is not None:
            self.freshness.prove(peer, waiting.message, message)
            self._time(peer, now - waiting.at)
            self._hear(peer, Kind.SYN, waiting.message, now)
        self._hear(peer, envelope.kind, message, now)
        return True

    def _challenge(self, peer: Peer | None, message: Message, size: int, now: float) -> None:
        """Ask who sent a SYN for a proof that it is there now."""
        answers = self.members.limits.challenges if peer is None else peer.answers
        if not answers.take(1, now):
            self._counters["limited_answers"] += 1
            return
        head = msgspec.structs.replace(self.freshness.challenge(message, size, now), sender=self.node)
        stamp = self.freshness.stamp(message.life)
        data = encode(Kind.SYN_ACK, self._fingerprint, self.secrets[0], head, stamp=stamp)
        self._out(message.contact if peer is None else peer.address, data)

    def _hear(self, peer: Peer, kind: Kind, message: Message, now: float) -> None:
        """Take a peer's own and fresh word."""
        self.members.heard_from(peer, now)
        self._measure(peer, message.echo, now)
        for entry in message.vector:
            self.members.learn(entry, peer.node, now)
        for update in message.updates:
            copy = self.copies.get(update.endpoint)
            held = len(copy.keys) if copy is not None else 0
            if not peer.work.take(UPDATE_S + BYTE_S * len(update.added) + HELD_S * held, now):
                self._counters["limited_updates"] += 1
                break
            self.intake.take(update, peer.node, now)
        if kind is Kind.ACK:
            return
        if peer.answers.take(1, now) and peer.work.take(ENTRY_S * len(message.vector) + COPY_S * len(self.copies), now):
            self._answer(peer, kind, message, now)
        else:
            self._counters["limited_answers"] += 1

    # --- sending -------------------------------------------------------------------------------------------

    def _speak(self, copy: Copy, keys: OwnedSet, beats: bool, now: float) -> None:
        """Bring up to date what this node says of an endpoint of its own."""
        if keys.due(self.settings.publish_share, self.settings.publish_within_s, now):
            keys.publish(now)
            self.tempo.stir(now)
        if copy.renew_load():
            self.tempo.stir(now)
        if beats:
            copy.heartbeat += 1

    def _partner(self) -> Peer | None:
        """The next peer to talk to: all in turn, in a new order each time around.

        Of those that do not answer a quarter as many as of the others are tried, so that a fleet of dead addresses
        costs next to nothing.
        """
        while True:
            if not self._partners:
                live = [peer.node for peer in self.peers.values() if peer.state != "suspected"]
                dead = [peer.node for peer in self.peers.values() if peer.state == "suspected"]
                turn = live + self._rng.sample(dead, min(len(dead), max(1, len(live) // 4)))
                if not turn:
                    return None
                self._rng.shuffle(turn)
                self._partners.extend(turn)
            peer = self.peers.get(self._partners.popleft())
            if peer is not None:
                return peer

    def _rotated(self) -> list[Copy]:
        """Own endpoints and others in turn, each from where the last vector ended: what does not fit comes next."""
        copies: list[Copy] = []
        for mine in (True, False):
            these = self._in_turn([copy for copy in self.copies.values() if copy.mine is mine], self._turns[mine])
            # One to one while there are both, so that neither keeps the other out of a vector.
            both = min(len(copies), len(these))
            copies = [copy for two in zip(copies, these, strict=False) for copy in two] + copies[both:] + these[both:]
        return copies

    def _in_turn(self, copies: list[Copy], turn: int) -> list[Copy]:
        """One endpoint of each peer in turn, and one of all that are hearsay: a node with many keeps no other out."""
        groups: dict[str, list[Copy]] = {}
        for copy in copies:
            owner = owner_of(copy.endpoint)
            groups.setdefault(owner if owner in self.peers else "", []).append(copy)
        queues, rounds = list(groups.values()), turn // max(len(groups), 1)
        start = turn % max(len(queues), 1)
        queues = [queue[rounds % len(queue) :] + queue[: rounds % len(queue)] for queue in queues]
        queues = queues[start:] + queues[:start]
        ordered: list[Copy] = []
        place = 0
        while queues:
            ordered += [queue[place] for queue in queues]
            place += 1
            queues = [queue for queue in queues if len(queue) > place]
        return ordered

    def _send(self, peer: Peer, kind: Kind, echo: int, vector: Iterable[VectorEntry], debts: list[Debt]) -> int:
        """Send a vector and what is owed, in as many datagrams as the burst allows; each fits after encoding.

        Return how many entries fitted: they all go in the first datagram.
        """
        first = not peer.same_domain
        domain, contact = (self._domain.fields(), self.settings.contact) if first else (None, "")
        nonce = next(reversed(peer.probes)) if kind is Kind.SYN else 0
        head = Message(self.node, nonce, echo, True, domain, contact=contact)
        limits = (self.settings.datagram_bytes, self.settings.burst_bytes)
        burst = Burst(kind, head, *limits, partial(self._put, peer))
        fitted = burst.tell(vector, len(self.copies) + len(self.members.left) if kind is Kind.SYN else -1)
        if debts:
            self._packing.pop((peer.node, kind), None)
            self._packing[peer.node, kind] = self._pack(burst, debts)
        else:
            burst.end()
        return fitted

    def _pack(self, burst: Burst, debts: list[Debt]) -> Iterator[None]:
        """Encode what is owed, a datagram at each step."""
        for debt in debts:
            if not (yield from burst.owe(debt)):
                self._counters["bursts_cut"] += 1
                break
        else:
            burst.end()
        if burst.too_long:
            self._counters["updates_too_long"] += burst.too_long

    def _put(self, peer: Peer, kind: Kind, head: Message, entries: list[bytes], updates: list[bytes]) -> int:
        stamp = self.freshness.stamp(peer.life)
        data = encode(kind, self._fingerprint, self.secrets[0], head, entries, updates, stamp)
        return self._out(peer.address, data)

    def _out(self, address: Hashable, data: bytes) -> int:
        self._outbox.append(Datagram(address, data))
        self._counters["datagrams_sent"] += 1
        self._counters["bytes_sent"] += len(data)
        return len(data)

    def _answer(self, peer: Peer, kind: Kind, message: Message, now: float) -> None:
        """Send what the peer's vector lacks, and to a SYN also the entries in which the two differ."""
        theirs = {entry.endpoint: entry for entry in message.vector}
        debts: list[Debt] = []
        news = [last for entry in message.vector if (last := self.members.last_word(peer, entry)) is not None]
        for copy in self.copies.values():
            entry = theirs.get(copy.endpoint)
            if entry is None:
                if not message.complete:
                    continue
                entry = VectorEntry(copy.endpoint, 0, 0)
            held, loaded = (entry.incarnation, entry.version), (entry.incarnation, entry.revision)
            lacks_keys = copy.keys.version and copy.held > held
            lacks_load = copy.loaded > loaded
            if lacks_keys and not copy.suspected and owner_of(copy.endpoint) != peer.node:
                lag = copy.keys.version - (entry.version if entry.incarnation == copy.incarnation else 0)
                due = owed(copy.keys, copy.incarnation, entry, now)
                life, url, contact, zone = copy.incarnation, copy.url, copy.contact, copy.zone
                debts += (Debt(copy.endpoint, life, *o, url, contact, lag, zone) for o in due)
            ahead = lacks_keys or lacks_load or copy.beat > (entry.incarnation, entry.heartbeat)
            behind = held > copy.held or loaded > copy.loaded
            if lacks_load or (kind is Kind.SYN and (ahead or behind)):
                news.append(copy.entry(now, lacks_load))
        for endpoint, left in self.members.left.items():
            entry = theirs.get(endpoint)
            if entry is not None and left.beat > (entry.incarnation, entry.heartbeat):
                news.append(left.entry(endpoint, now))
        # What the peer does not know at all goes first: an update of it would be dropped. Hearsay comes last.
        news.sort(key=lambda entry: (self._is_hearsay(entry.endpoint), entry.endpoint in theirs))
        debts.sort(key=lambda debt: debt.lag, reverse=True)
        if kind is Kind.SYN:
            self._send(peer, Kind.SYN_ACK, message.nonce, news, debts)
        elif debts or news or message.nonce:
            # A SYN-ACK with a nonce asks for its echo.
            self._send(peer, Kind.ACK, message.nonce, news, debts)

    def _is_hearsay(self, endpoint: str) -> bool:
        owner = owner_of(endpoint)
        return owner not in self.peers and owner != self.node

    # --- receiving -----------------------------------------------------------------------------------------

    def _measure(self, peer: Peer, echo: int, now: float) -> None:
        """Take the round trip that an answer ends."""
        sent = peer.probes.pop(echo, None)
        if sent is not None and now >= sent:
            self._time(peer, now - sent)

    @staticmethod
    def _time(peer: Peer, rtt: float) -> None:
        # Queueing only adds to a round trip, so a shorter one counts more than a longer one.
        old = peer.rtt_s
        peer.rtt_s = rtt if old is None else old + (0.3 if rtt < old else 0.1) * (rtt - old)

    def _reject(self, source: object, kind: str, reason: str) -> None:
        self._counters[f"rejected_{kind}"] += 1
        if self.members.limits.tells(self._now):
            self._emit(DatagramRejected(source, kind, reason))

    def _refuse_domain(self, source: Hashable, message: Message, now: float) -> None:
        """Tell which field differs, once a minute for each source and field."""
        self._counters["rejected_domain"] += 1
        peer = self.peers.get(message.sender)
        if peer is not None:
            # It came back with another domain: let it see this one's fields, so that it can tell too.
            peer.same_domain = False
        theirs = message.domain or {}
        for name, ours in self._domain.fields().items():
            other = theirs.get(name)
            if other == ours or (other is None and theirs):
                continue
            field, value = (name, other) if other is not None else ("fingerprint", "unknown")
            told = self._refused.get((source, field))
            if told is None or now - told > REFUSAL_TOLD_S:
                self._refused[source, field] = now
                self._counters[f"domain_mismatch_{field}"] += 1
                mine = ours if other is not None else self._fingerprint.hex()
                self._emit(DomainMismatch(source, message.sender, field, mine, value))
            if other is None:
                return
