"""Anti-entropy: the protocol by which nodes bring each other up to date. Bytes come in and go out; nobody waits.

| datagram | carries | is answered by |
|---|---|---|
| SYN | a vector: an entry for each endpoint that is known | SYN-ACK, or a challenge while its life is unproved |
| SYN-ACK | entries in which the two differ, keys that the asker lacks | ACK, if there is anything to say |
| ACK | keys that the answerer lacks | nothing |

An entry is (endpoint, incarnation, version, heartbeat, age, load), so load spreads as fast as gossip does. Any
node relays any endpoint's updates. Read `Gossip.receive` first: it is the whole protocol, in order.

Rules:
1. Nothing that arrives raises: it is counted by kind, and an event tells, at a bounded pace. `limits` says how much of
   it is looked at.
2. A load travels when the receiver has not got its revision, keys when it has not got their version, and a heartbeat
   always. So a quiet fleet exchanges bare entries, and those rarely.
3. Keys of a suspected endpoint are sent to nobody: who needs them will hear of the endpoint when it is back.
4. A message that does not fit its budget is cut by key range. The next exchange goes on from what the receiver then
   lacks.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from itertools import chain

from ..errors import DecodeError, UsageError
from ..events import Journal
from ..keys.domain import Domain
from ..keys.names import owner_of
from .addresses import Addresses
from .copies import Copy, Peer
from .freshness import Freshness, Novelty
from .gossip_settings import GossipSettings
from .limits import BYTE_S, COPY_S, ENTRY_S, HELD_S, UPDATE_S, Limits, Refusals
from .members import Members, OnUpdate
from .outbox import Outbox
from .peers import Peers, Tempo, Turns
from .receiving import Receiver
from .transfer import Debt, least_room, owed
from .wire import Envelope, Kind, Message, VectorEntry, decode, overhead_bytes, verify
from .writer_set import OwnedSet


class Gossip:
    """The protocol of one node. Whom it talks to is in `peers`, what it keeps in `members`, what it sends in `outbox`.

    Raises `UsageError` for datagrams that are too small for this domain's names.
    """

    def __init__(
        self,
        node: str,
        domain: Domain,
        settings: GossipSettings,
        rng: random.Random,
        now: float,
        journal: Journal,
        on_update: OnUpdate,
    ) -> None:
        front = overhead_bytes(Message(node, 2**63 - 1, 2**63 - 1, True, domain.fields(), contact=settings.contact))
        self._least = front + least_room(bool(settings.zone))
        if settings.datagram_bytes < self._least:
            raise UsageError(f"datagram_bytes must be at least {self._least} with names as long as this domain's")
        self.node = node
        self.settings = settings
        self.tempo = Tempo(settings, now)
        self._limits = Limits(settings)
        self.peers = Peers(node, settings, self.tempo, self._limits, journal)
        self.members = Members(node, settings, self.tempo, self.peers, journal, on_update)
        # A generator that is seeded the same in every run must not bring a former life back.
        self.freshness = Freshness(node, settings, f"{rng.getrandbits(64)} {now!r}".encode())
        self.outbox = Outbox(node, domain, settings, self.peers, self.freshness, journal)
        self._turns = Turns(self.peers, self.members.copies, rng)
        self._refusals = Refusals(domain, journal)
        self._receiver = Receiver(self.members, settings, self.tempo, self._refusals, journal)
        parts = self.tempo, self.peers, self.freshness, self.outbox, self._refusals
        self.addresses = Addresses(settings, *parts, journal)
        self._journal = journal
        self._fingerprint = domain.fingerprint
        self._secrets: tuple[bytes, ...] = (domain.secret,)

    def receive(self, data: bytes, source: Hashable, now: float) -> bool:
        """Take one datagram from a transport; return whether it was of use. Never raises for its content."""
        refuse = self._refusals.refuse
        # 1. Its address may still send, and its tag is right.
        self._count_received(data)
        if not self._limits.admits(source, len(data), now):
            reason = "more than is looked at of one address, or of all that nothing proves"
            return refuse(source, "limited", reason, now)
        try:
            envelope = decode(data, *self._secrets)
        except DecodeError as error:
            return refuse(source, error.kind, str(error), now)
        if envelope.signed:
            self._journal.count("datagrams_signed_otherwise")
        if self.tempo.wakes(now):
            self._journal.count("pauses")
        # 2. It is of this domain, and from another node that is a peer, or may become one, and may still send.
        kind, message = envelope.kind, envelope.message
        peer = self.peers.get(message.sender)
        if envelope.fingerprint != self._fingerprint:
            if peer is not None:
                # It came back with another domain: let it see this one's fields, so that it can tell too.
                peer.same_domain = False
            return self._refusals.foreign(source, message, now)
        if message.sender == self.node:
            if not self.addresses.own(message):
                reason = "a datagram from a node of this node's own name"
                self._refusals.namesake(source, self.node, reason, now, "self")
            return False
        if kind is Kind.SYN_ACK:
            peer = self.addresses.introduced(message, now) or peer
        contact = message.contact or self.freshness.contact_of(message)
        if peer is None and not self.peers.would_learn(message.sender, contact):
            return refuse(source, "stranger", f"node {message.sender!r} is no peer: add_peer it first", now)
        if peer is not None and not peer.meter.take(len(data), now):
            return refuse(source, "limited", f"node {peer.node!r} sends more than an honest one does", now)
        # 3. It is new: no recording, and of a life that is there now. `waiting` is the SYN that waited for that proof.
        if kind is Kind.SYN_ACK and message.nonce and not message.echo and message.to not in (0, self.freshness.life):
            return self._tell_namesake(source, now)
        if peer is not None and self.addresses.refuses(peer, message.life, now):
            self._journal.count("claims_refused")
            return False
        known = peer.life if peer is not None else 0
        novelty, waiting = self.freshness.judge(peer, kind, message, now)
        claimed = peer is not None and kind is Kind.ACK and self.addresses.claimed(peer, message, known, now)
        if peer is not None and claimed and (self._settle(peer, now) or novelty is not Novelty.FRESH):
            # It is elsewhere than this node believes: what another life says is not taken before that is settled.
            return True
        if novelty is not Novelty.FRESH:
            return self._refuse_old(novelty, peer, source, envelope, len(data), now)
        self._limits.proved(source)
        if peer is None:
            peer = self.peers.learn(message.sender, contact, now)
            assert peer is not None, "a node that would not be learnt is a stranger"
        elif kind is Kind.SYN:
            self.addresses.challenge(peer, message, source, known, now)
        self.addresses.found(peer, message.echo, now)
        # 4. What it says is taken, and it is answered.
        if waiting is not None:
            self.freshness.prove(peer, waiting.message, message)
            peer.timed(self.tempo.silence_s(waiting.at, now))
            self._hear(peer, Kind.SYN, waiting.message, now)
        self._hear(peer, kind, message, now)
        return True

    def _hear(self, peer: Peer, kind: Kind, message: Message, now: float) -> None:
        """Take a peer's own new word: its vector, its updates; and answer it, unless it is an ACK."""
        self.peers.heard_from(peer, now)
        asked_at = peer.answered(message.echo, message.life)
        if asked_at is not None:
            peer.timed(self.tempo.silence_s(asked_at, now))
        for entry in message.vector:
            self.members.learn(entry, peer.node, now)
        self._take_updates(peer, message, now)
        if kind is Kind.ACK:
            return
        work_s = ENTRY_S * len(message.vector) + COPY_S * len(self.members.copies)
        if not peer.answers.take(1, now) or not peer.work.take(work_s, now):
            self._journal.count("limited_answers")
            return
        theirs = {entry.endpoint: entry for entry in message.vector}
        news, debts = self._lacks(peer, kind, message, theirs, now)
        if kind is Kind.SYN:
            self.outbox.send(peer, Kind.SYN_ACK, news, debts, echo=message.nonce)
        elif debts or news or message.nonce:
            # A SYN-ACK with a nonce is a challenge: it asks for the echo.
            self.outbox.send(peer, Kind.ACK, news, debts, echo=message.nonce)

    def _take_updates(self, peer: Peer, message: Message, now: float) -> None:
        """Take the updates of a message, as long as the work for them is within the peer's share."""
        for update in message.updates:
            copy = self.members.copies.get(update.endpoint)
            held = len(copy.keys) if copy is not None else 0
            if not peer.work.take(UPDATE_S + BYTE_S * len(update.added) + HELD_S * held, now):
                self._journal.count("limited_updates")
                return
            self._receiver.take(update, peer.node, now)

    def _lacks(
        self, peer: Peer, kind: Kind, message: Message, theirs: dict[str, VectorEntry], now: float
    ) -> tuple[list[VectorEntry], list[Debt]]:
        """Return the entries that a peer must hear, and the keys that it is owed, by what its vector says it holds.

        A SYN is told of every endpoint in which the two differ, a SYN-ACK of what it lacks only. O(endpoints).
        """
        members = self.members
        news = [word for entry in message.vector if (word := members.later_word(peer, entry)) is not None]
        debts: list[Debt] = []
        for copy in members.copies.values():
            entry = theirs.get(copy.endpoint)
            if entry is None:
                if not message.complete:
                    continue
                entry = VectorEntry(copy.endpoint, 0, 0)
            held, heard = (entry.incarnation, entry.version), (entry.incarnation, entry.heartbeat)
            loaded = (entry.incarnation, entry.revision)
            lacks_keys, lacks_load = copy.keys.version and copy.held > held, copy.loaded > loaded
            if lacks_keys and not copy.suspected and owner_of(copy.endpoint) != peer.node:
                lag = copy.keys.version - (entry.version if entry.incarnation == copy.incarnation else 0)
                debts += (
                    Debt(copy.endpoint, copy.incarnation, *due, copy.url, copy.contact, lag, copy.zone)
                    for due in owed(copy.keys, copy.incarnation, entry, now)
                )
            either_is_ahead = lacks_keys or copy.beat > heard or held > copy.held or loaded > copy.loaded
            if lacks_load or (kind is Kind.SYN and either_is_ahead):
                news.append(copy.entry(now, lacks_load))
        news += members.last_words_unheard(theirs, now)
        # What the peer does not know at all goes first: an update of it would be dropped. Hearsay comes last.
        news.sort(key=lambda entry: (members.is_hearsay(entry.endpoint), entry.endpoint in theirs))
        debts.sort(key=lambda debt: debt.lag, reverse=True)
        return news, debts

    def _refuse_old(
        self, novelty: Novelty, peer: Peer | None, source: Hashable, envelope: Envelope, size: int, now: float
    ) -> bool:
        """Refuse a datagram that is not proved to be new, and challenge the sender of a SYN; return False."""
        message = envelope.message
        self._journal.count(f"datagrams_{novelty.value}")
        if novelty is Novelty.CHALLENGE:
            answers = self._limits.challenges if peer is None else peer.answers
            if answers.take(1, now):
                nonce = self.freshness.challenge(message, size, now)
                address = message.contact if peer is None else peer.address
                self.outbox.challenge(address, message.life, nonce, message.nonce)
                if peer is not None:
                    self.addresses.challenge(peer, message, source, peer.life, now)
            else:
                self._journal.count("limited_answers")
        elif envelope.kind is Kind.SYN_ACK and message.nonce and message.to != self.freshness.life:
            self._tell_namesake(source, now)
        return False

    def _tell_namesake(self, source: Hashable, now: float) -> bool:
        reason = "a SYN in this node's name was not sent by it: the name is used twice, or a recording is played back"
        self._refusals.namesake(source, self.node, reason, now)
        return False

    def _settle(self, peer: Peer, now: float) -> bool:
        """Decide a claim to a peer's name; if the peer has moved, take what it said; return whether it has."""
        claim = self.addresses.settle(peer, now)
        if claim is None:
            return False
        if not claim.same and self.settings.replay_window:
            syn = self.freshness.waiting(claim.ack)
            said = [(Kind.ACK, claim.ack)] if syn is None else [(Kind.SYN, syn), (Kind.ACK, claim.ack)]
            self.freshness.prove(peer, *(message for _, message in said))
            for kind, message in said:
                self._hear(peer, kind, message, now)
        return True

    def exchange(self, now: float) -> bool:
        """Begin the exchange that is due: publish, and send a SYN to one peer; each round beat and sweep as well.

        Return whether a round began. O(endpoints).
        """
        members = self.members
        if self.tempo.wakes(now):
            self._journal.count("pauses")
        beats = self.tempo.beats(now)
        if beats:
            members.sweep(now)
            self.addresses.ask_seeds(now)
            self._journal.count("rounds")
        for node in self.addresses.ask_claimed(now):
            self._settle(self.peers[node], now)
        for copy in members.copies.values():
            if isinstance(copy.keys, OwnedSet):
                self._publish(copy, copy.keys, beats, now)
        peer = self._turns.partner()
        if peer is not None:
            if peer.state == "suspected":
                self.addresses.search(peer, now)
            nonce = self.freshness.nonce()
            peer.asked(nonce, now)
            copies = self._turns.in_order()
            vector = chain((copy.entry(now, copy.mine) for copy in copies), members.last_words(now))
            whole = len(copies) + len(members.left)
            self._turns.named(copies[: self.outbox.send(peer, Kind.SYN, vector, nonce=nonce, whole=whole)])
        self.tempo.went(len(self.peers), now)
        if self.addresses.claims:
            self.tempo.hurry(now)
        return beats

    def _publish(self, copy: Copy, keys: OwnedSet, beats: bool, now: float) -> None:
        """Bring what this node says of an own endpoint up to date: its keys, its load, its heartbeat."""
        if keys.due(self.settings.publish_share, self.settings.publish_within_s, now):
            keys.publish(now)
            self.tempo.stir(now)
        if copy.renew_load():
            self.tempo.stir(now)
        if beats:
            copy.heartbeat += 1

    def farewell(self, now: float) -> None:
        """Tell all peers that are there what has left. O(peers x left)."""
        words = list(self.members.last_words(now))
        for peer in self.peers.values():
            if words and peer.state == "heard":
                self.outbox.send(peer, Kind.ACK, words)

    def screen(self, data: bytes, source: Hashable, now: float) -> bool:
        """Whether a datagram has a right tag; one that has not is counted and told here. O(bytes)."""
        try:
            verify(data, *self._secrets)
        except DecodeError as error:
            self._count_received(data)
            return self._refusals.refuse(source, error.kind, str(error), now)
        return True

    def set_secrets(self, secrets: tuple[bytes, ...]) -> None:
        """Authenticate datagrams with these secrets from now on: the first signs, each is good."""
        self._secrets, self.outbox.secret = secrets, secrets[0]

    def limit_datagrams(self, most_bytes: int) -> None:
        """Make no datagram larger than this, nor than `datagram_bytes`."""
        if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < self._least:
            raise UsageError(
                f"gossip needs datagrams of at least {self._least} bytes with names as long as this domain's, not "
                f"{most_bytes!r}: take a transport that carries them"
            )
        self.outbox.datagram_bytes = min(most_bytes, self.settings.datagram_bytes)

    def _count_received(self, data: bytes) -> None:
        self._journal.count("datagrams_received")
        self._journal.count("bytes_received", n=len(data))
