"""Anti-entropy: rounds, vectors, budgets and liveness. Bytes come in and go out; nobody waits for anybody.

A round sends SYN(vector) to a few peers. The answer, SYN-ACK, carries what the sender of the SYN lacks and the entries
in which the two differ; the last message, ACK, carries what the answerer lacks. An entry is (endpoint, incarnation,
version, heartbeat, age, load), so load spreads as fast as gossip does. Any node relays any endpoint's updates.

Rules:
1. Each message fits `datagram_bytes` after encoding, and an answer as a whole fits `burst_bytes`. What does not fit is
   cut by key range and goes on from the receiver's cursor in a later round.
2. Relayed news is as old as the owner's own last word: ages add up along relays. So hearsay neither keeps a dead
   endpoint alive, nor brings a forgotten one back.
3. Nothing that arrives raises: it is counted by kind, and an event tells.
4. An owner that meets a later life of itself, or words of its life that it has not spoken, moves past it.
5. A node that was itself paused heard nobody, and blames nobody for that time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache

from .copies import Copy, Peer
from .digest import (
    KEY_LIMIT,
    Keys,
    Kind,
    Message,
    Update,
    VectorEntry,
    Want,
    decode,
    encode,
    encode_part,
    overhead_bytes,
    unpack_keys,
)
from .domain import Domain
from .errors import DecodeError, UsageError
from .events import DatagramRejected, DomainMismatch, NodeEvent, PeerChanged, ReplicaChanged
from .load import Advert
from .replica import NO_KEYS, Change, OwnedSet, Verdict, judge
from .transfer import Assembly, Debt, cut, least_room, owed

STALLED_S = 1.0
"""A transfer without a part for so long gives way to another one."""

MAX_INCARNATION = 2**63 - 1


class Datagram(NamedTuple):
    """Bytes for a transport to carry to `address`, once, with no promise of arrival."""

    address: Hashable
    data: bytes


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """Pace and budgets of gossip.

    `interval_s` between rounds, `fan_out` peers a round: 3 every 0.2 s keeps 64 nodes within 0.4 s of the owner
    (p99, no loss). `datagram_bytes` per message: 1,200 pass any network path; streams and loopback may carry 60,000.
    `burst_bytes` per answer. An endpoint unheard for `suspect_after_s` is no candidate, for `forget_after_s` forgotten.
    """

    interval_s: float = 0.2
    fan_out: int = 3
    datagram_bytes: int = 1200
    burst_bytes: int = 65536
    suspect_after_s: float = 2.0
    forget_after_s: float = 60.0

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.fan_out < 1:
            raise UsageError("gossip needs interval_s > 0 and fan_out >= 1")
        if not 800 <= self.datagram_bytes <= 65536 or self.burst_bytes < self.datagram_bytes:
            raise UsageError("gossip needs 800 <= datagram_bytes <= 65536 and burst_bytes >= datagram_bytes")
        if not self.interval_s < self.suspect_after_s < self.forget_after_s:
            raise UsageError("gossip needs interval_s < suspect_after_s < forget_after_s")


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
        on_update: Callable[[str, Iterable[int], Iterable[int]], None],
    ) -> None:
        self.node = node
        self.settings = settings
        self.peers: dict[str, Peer] = {}
        self.copies: dict[str, Copy] = {}
        self.next_round_at = now
        self._round_at = now
        self._awake_at = float("-inf")
        front = overhead_bytes(Message(node, 2**63 - 1, 2**63 - 1, True, domain.fields()))
        if settings.datagram_bytes < front + least_room():
            raise UsageError(
                f"datagram_bytes must be at least {front + least_room()} with names as long as this domain's"
            )
        self._domain = domain
        self._fingerprint = domain.fingerprint
        self._rng = rng
        self._emit = emit
        self._counters = counters
        self._on_update = on_update
        self._outbox: list[Datagram] = []
        self._touched: set[str] = set()
        self._nonce = rng.getrandbits(40)
        self._turns: Counter[bool] = Counter()
        self.removed: LRUCache[str, None] = LRUCache(4096)
        """Nodes that the caller took out: what relays say of their endpoints is ignored."""
        self._gone: LRUCache[str, tuple[int, int]] = LRUCache(4096)
        self._refused: LRUCache[tuple[Hashable, str], float] = LRUCache(256)

    # --- what the node calls -------------------------------------------------------------------------------

    def take_touched(self) -> set[str]:
        """Return and forget the endpoints of others whose load, liveness or keys changed."""
        touched, self._touched = self._touched, set()
        return touched

    def take_outbox(self) -> list[Datagram]:
        """Return and forget the datagrams to send."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def forget(self, endpoint: str, reason: str) -> None:
        """Drop a replica; older news of it is ignored from now on."""
        copy = self.copies.pop(endpoint)
        self._gone[endpoint] = (copy.incarnation, copy.heartbeat)
        if len(copy.keys):
            self._on_update(endpoint, (), copy.keys.tolist())
        self._emit(ReplicaChanged(endpoint, "forgotten", reason))

    def round(self, now: float) -> None:
        """Run one round: sweep what is unheard, beat, and send SYN to `fan_out` peers. O(endpoints)."""
        interval = self.settings.interval_s
        if now - self._round_at > interval + 0.5 * self.settings.suspect_after_s:
            self._awake_at = now
            self._counters["pauses"] += 1
        self._round_at = now
        self.next_round_at = max(self.next_round_at + interval, now + 0.5 * interval)
        self._sweep(now)
        for copy in self.copies.values():
            if isinstance(copy.keys, OwnedSet):
                copy.keys.publish()
                copy.heartbeat += 1
        peers = list(self.peers.values())
        for peer in self._rng.sample(peers, min(self.settings.fan_out, len(peers))):
            self._nonce += 1
            if len(peer.probes) >= 8:
                peer.probes.pop(next(iter(peer.probes)))
            peer.probes[self._nonce] = now
            copies = self._rotated()
            sent = self._send(peer, Kind.SYN, 0, (self._entry(copy, now) for copy in copies), [])
            self._turns.update(copy.mine for copy in copies[:sent])
        self._counters["rounds"] += 1

    def receive(self, data: bytes, source: Hashable, now: float) -> None:
        """Take one datagram from a transport. Never raises for its content."""
        self._counters["datagrams_received"] += 1
        self._counters["bytes_received"] += len(data)
        try:
            envelope = decode(data, self._domain.secret)
        except DecodeError as error:
            self._reject(source, error.kind, str(error))
            return
        message = envelope.message
        if envelope.fingerprint != self._fingerprint:
            self._refuse_domain(source, message, now)
            return
        if message.sender == self.node:
            self._reject(source, "self", "a datagram from a node of this node's own name")
            return
        peer = self.peers.get(message.sender)
        if peer is None:
            self._reject(source, "stranger", f"node {message.sender!r} is no peer: add_peer it first")
            return
        self._hear(peer, message, now)
        for entry in message.vector:
            self._learn(entry, now)
        for update in message.updates:
            self._take(update, now)
        if envelope.kind is not Kind.ACK:
            self._answer(peer, envelope.kind, message, now)

    # --- sending -------------------------------------------------------------------------------------------

    def _rotated(self) -> list[Copy]:
        """Own endpoints and others in turn, each from where the last vector ended: what does not fit comes next."""
        copies: list[Copy] = []
        for mine in (True, False):
            these = [copy for copy in self.copies.values() if copy.mine is mine]
            start = self._turns[mine] % max(len(these), 1)
            these = these[start:] + these[:start]
            # One to one while there are both, so that neither keeps the other out of a vector.
            both = min(len(copies), len(these))
            copies = [copy for two in zip(copies, these, strict=False) for copy in two] + copies[both:] + these[both:]
        return copies

    def _entry(self, copy: Copy, now: float) -> VectorEntry:
        want = None
        if copy.assembly is not None:
            a = copy.assembly
            want = Want(a.incarnation, a.since, a.version, a.cursor)
        age_ms = min(int(copy.age_s(now) * 1000), 2**32 - 1)
        version = copy.keys.version
        return VectorEntry(copy.endpoint, *copy.beat, version, age_ms, copy.advert.to_wire(), want)

    def _send(self, peer: Peer, kind: Kind, echo: int, vector: Iterable[VectorEntry], debts: list[Debt]) -> int:
        """Send a vector and what is owed, in as many datagrams as the burst allows; each fits after encoding.

        Return how many entries fitted: they all go in the first datagram.
        """
        domain = None if peer.same_domain else self._domain.fields()
        budget = self.settings.datagram_bytes
        nonce = self._nonce if kind is Kind.SYN else 0
        room = budget - overhead_bytes(Message(self.node, nonce, echo, True, domain))
        entries: list[bytes] = []
        for entry in vector:
            encoded = encode_part(entry)
            if len(encoded) > room:
                break
            entries.append(encoded)
            room -= len(encoded)
        fitted = len(entries)
        complete = kind is Kind.SYN and fitted == len(self.copies)
        updates: list[bytes] = []
        spent = 0
        for debt in debts:
            lower = debt.cursor
            while lower < KEY_LIMIT:
                part, upper = cut(debt, lower, room)
                if part is None:
                    if not entries and not updates:
                        # Names and urls that a node with larger datagrams may allow leave no room for keys here.
                        self._counters["updates_too_long"] += 1
                        break
                    spent += self._put(peer, kind, Message(self.node, nonce, echo, complete, domain), entries, updates)
                    if spent + budget > self.settings.burst_bytes:
                        self._counters["bursts_cut"] += 1
                        return fitted
                    # What goes on is an ACK: it asks for nothing.
                    kind, nonce, echo, complete, entries, updates = Kind.ACK, 0, 0, False, [], []
                    room = budget - overhead_bytes(Message(self.node, 0, 0, True, domain))
                    continue
                updates.append(part)
                room -= len(part)
                lower = upper
        self._put(peer, kind, Message(self.node, nonce, echo, complete, domain), entries, updates)
        return fitted

    def _put(self, peer: Peer, kind: Kind, head: Message, entries: list[bytes], updates: list[bytes]) -> int:
        data = encode(kind, self._fingerprint, self._domain.secret, head, entries, updates)
        self._outbox.append(Datagram(peer.address, data))
        self._counters["datagrams_sent"] += 1
        self._counters["bytes_sent"] += len(data)
        return len(data)

    # --- receiving -----------------------------------------------------------------------------------------

    def _hear(self, peer: Peer, message: Message, now: float) -> None:
        peer.heard_at = now
        peer.same_domain = True
        if peer.state != "heard":
            peer.state = "heard"
            self._emit(PeerChanged(peer.node, "heard"))
        sent = peer.probes.pop(message.echo, None)
        if sent is not None and now >= sent:
            rtt = now - sent
            # Queueing only adds to a round trip, so a shorter one counts more than a longer one.
            old = peer.rtt_s
            peer.rtt_s = rtt if old is None else old + (0.3 if rtt < old else 0.1) * (rtt - old)

    def _learn(self, entry: VectorEntry, now: float) -> None:
        """Take an entry's news of load and liveness; sets come in updates."""
        copy = self.copies.get(entry.endpoint)
        heard_at = now - entry.age_ms / 1000
        if copy is None:
            gone = self._gone.get(entry.endpoint)
            if gone is not None and (entry.incarnation, entry.heartbeat) <= gone:
                return
            # An endpoint of this node's own name that it does not have is one of its former life.
            owner = _owner(entry.endpoint)
            if now - heard_at > self.settings.forget_after_s or owner in ("", self.node) or owner in self.removed:
                return
            copy = self.copies[entry.endpoint] = Copy(entry.endpoint, False, entry.incarnation, heard_at)
            self._touched.add(entry.endpoint)
            self._emit(ReplicaChanged(entry.endpoint, "learnt"))
        elif copy.mine:
            if (entry.incarnation, entry.version) > copy.held or (entry.incarnation, entry.heartbeat) > copy.beat:
                copy.incarnation = min(entry.incarnation + 1, MAX_INCARNATION)
                self._counters["refutations"] += 1
                reason = f"incarnation {entry.incarnation} was used before, or another node has this name"
                self._emit(ReplicaChanged(copy.endpoint, "refuted", reason))
            return
        if (entry.incarnation, entry.heartbeat) <= copy.beat:
            return
        if entry.incarnation > copy.incarnation:
            self._begin_life(copy, entry.incarnation)
        self._touched.add(copy.endpoint)
        copy.heartbeat = entry.heartbeat
        copy.heard_at = max(copy.heard_at, heard_at)
        copy.suspected = copy.age_s(now) > self.settings.suspect_after_s
        if entry.load is not None:
            copy.advert = Advert.from_wire(entry.load)

    def _begin_life(self, copy: Copy, incarnation: int) -> None:
        """The endpoint's process began anew: what its former life held is gone."""
        copy.incarnation, copy.heartbeat, copy.assembly = incarnation, 0, None
        if copy.keys.version:
            lost = copy.keys.tolist()
            copy.keys.replace(0, NO_KEYS)
            self._emit(ReplicaChanged(copy.endpoint, "discarded", "incarnation"))
            self._on_update(copy.endpoint, (), lost)

    def _take(self, update: Update, now: float) -> None:
        copy = self.copies.get(update.endpoint)
        if copy is None or copy.mine:
            self._counters["updates_unasked"] += 1
            return
        verdict = judge(copy.held, update.incarnation, update.since, update.version)
        self._counters[f"updates_{verdict.value.replace(' ', '_')}"] += 1
        if verdict not in (Verdict.APPLY, Verdict.REPLACE):
            return
        try:
            added = unpack_keys(update.added, update.lower, update.upper)
            removed = unpack_keys(update.removed, update.lower, update.upper)
        except DecodeError as error:
            self._reject(update.endpoint, error.kind, str(error))
            return
        change = self._assemble(copy, update, added, removed, now)
        if change is not None:
            copy.url = update.url or copy.url
            self._touched.add(copy.endpoint)
            self._apply(copy, update.incarnation, change, verdict)

    def _assemble(self, copy: Copy, update: Update, added: Keys, removed: Keys, now: float) -> Change | None:
        """Return the whole change if this part completes it. A transfer under way keeps its place until it stalls."""
        if update.whole:
            copy.assembly = None
            return Change(update.since, update.version, added, removed, update.checksum)
        a = copy.assembly
        if a is None or (a.incarnation, a.since, a.version) != (update.incarnation, update.since, update.version):
            if a is not None and now - a.touched_at < STALLED_S and a.incarnation >= update.incarnation:
                self._counters["parts_of_another_transfer"] += 1
                return None
            a = copy.assembly = Assembly(update.incarnation, update.since, update.version, update.checksum, now)
        change = a.offer(update.lower, update.upper, added, removed, now)
        if change is not None:
            copy.assembly = None
        return change

    def _apply(self, copy: Copy, incarnation: int, change: Change, verdict: Verdict) -> None:
        before = copy.keys.keys
        if verdict is Verdict.APPLY and copy.keys.fits(change.added, change.removed):
            copy.keys.advance(change.version, change.added, change.removed)
            gained, lost = change.added, change.removed
        elif verdict is Verdict.REPLACE:
            copy.keys.replace(change.version, change.added)
            gained = np.setdiff1d(change.added, before, assume_unique=True)
            lost = np.setdiff1d(before, change.added, assume_unique=True)
            if incarnation != copy.incarnation:
                copy.incarnation, copy.heartbeat = incarnation, 0
            self._emit(ReplicaChanged(copy.endpoint, "replaced"))
        else:
            self._discard(copy, before)
            return
        if copy.keys.checksum != change.checksum:
            self._discard(copy, before)
            return
        self._on_update(copy.endpoint, gained.tolist(), lost.tolist())

    def _discard(self, copy: Copy, before: Keys) -> None:
        """Drop a copy whose checksum differs from the owner's: the next vector asks for a snapshot."""
        copy.keys.replace(0, NO_KEYS)
        self._counters["checksum_mismatches"] += 1
        self._emit(ReplicaChanged(copy.endpoint, "discarded", "checksum"))
        self._on_update(copy.endpoint, (), before.tolist())

    def _answer(self, peer: Peer, kind: Kind, message: Message, now: float) -> None:
        """Send what the peer's vector lacks, and to a SYN also the entries in which the two differ."""
        theirs = {entry.endpoint: entry for entry in message.vector}
        debts: list[Debt] = []
        news = [last for entry in message.vector if (last := self._last_word(peer, entry)) is not None]
        for copy in self.copies.values():
            entry = theirs.get(copy.endpoint)
            if entry is None:
                if not message.complete:
                    continue
                entry = VectorEntry(copy.endpoint, 0, 0)
            held = (entry.incarnation, entry.version)
            if copy.keys.version and copy.held > held and _owner(copy.endpoint) != peer.node:
                debts.append(Debt(copy.endpoint, copy.incarnation, copy.url, *owed(copy.keys, copy.incarnation, entry)))
            if copy.held != held or copy.beat > (entry.incarnation, entry.heartbeat):
                news.append(self._entry(copy, now))
        # What the peer does not know at all goes first: an update of it would be dropped.
        news.sort(key=lambda entry: entry.endpoint in theirs)
        debts.sort(key=lambda debt: debt.staleness, reverse=True)
        if kind is Kind.SYN:
            self._send(peer, Kind.SYN_ACK, message.nonce, news, debts)
        elif debts:
            self._send(peer, Kind.ACK, 0, [], debts)

    def _last_word(self, peer: Peer, entry: VectorEntry) -> VectorEntry | None:
        """What an owner must move past: later words than its own, of an endpoint that was forgotten since.

        They are too old for anybody but the owner to take.
        """
        gone = self._gone.get(entry.endpoint)
        if gone is None or entry.endpoint in self.copies or _owner(entry.endpoint) != peer.node:
            return None
        return VectorEntry(entry.endpoint, *gone, 0, 2**32 - 1) if gone > (entry.incarnation, entry.heartbeat) else None

    # --- refusals, liveness --------------------------------------------------------------------------------

    def _reject(self, source: object, kind: str, reason: str) -> None:
        self._counters[f"rejected_{kind}"] += 1
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
            if told is None or now - told > 60:
                self._refused[source, field] = now
                self._counters[f"domain_mismatch_{field}"] += 1
                mine = ours if other is not None else self._fingerprint.hex()
                self._emit(DomainMismatch(source, message.sender, field, mine, value))
            if other is None:
                return

    def _sweep(self, now: float) -> None:
        """Suspect and forget what was not heard while this node was listening."""
        limits = self.settings
        for peer in self.peers.values():
            silence = now - max(peer.heard_at, self._awake_at)
            if peer.state in ("heard", "new") and silence > limits.suspect_after_s:
                peer.state = "suspected"
                self._emit(PeerChanged(peer.node, "suspected", f"unheard for {now - peer.heard_at:.1f} s"))
        for copy in [copy for copy in self.copies.values() if not copy.mine]:
            age = copy.age_s(now)
            silence = min(age, now - self._awake_at)
            copy.suspected = silence > limits.suspect_after_s or (copy.suspected and age > limits.suspect_after_s)
            if silence > limits.forget_after_s:
                self.forget(copy.endpoint, f"unheard for {age:.0f} s")


def _owner(endpoint: str) -> str:
    """The node of an endpoint named "node/name"; "" if its name has another form."""
    node, _, name = endpoint.partition("/")
    return node if name else ""
