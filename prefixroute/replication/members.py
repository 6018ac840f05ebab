"""Which endpoints are there: they are met, heard, suspected and forgotten, and leave.

Rules:
1. Relayed news is as old as the owner's own last word: ages add up along relays. So hearsay neither keeps a dead
   endpoint alive, nor brings a forgotten one back.
2. An owner moves past what it did not say itself, to a higher incarnation: a later incarnation of its endpoint, words
   of the present one that it has not spoken, or another set under its own pair. It does so `REFUTED_AT_ONCE` times,
   then at a bounded pace: two nodes of one name would else push each other up with every exchange.
3. What no owner could move past was said by nobody else: so it ends with the owner's own next word.
4. The highest life that was heard of is kept, whether or not anything is held.
5. An endpoint that leaves speaks a last word, above every heartbeat. The word is passed on until the endpoint would
   have been forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from cachetools import LRUCache

from ..events import Journal, PeerChanged, ReplicaChanged
from ..keys.keyset import NO_KEYS, Keys
from ..keys.names import owner_of
from .copies import Copy, Left, Peer
from .gossip_settings import GossipSettings
from .limits import Bucket, Holdings
from .peers import Peers, Tempo
from .wire import LAST_BEAT, Update, VectorEntry

MAX_INCARNATION = 2**63 - 1
MAX_HEARSAY = 2**62
"""The highest incarnation that a relay is believed of a peer's endpoint: the peer can move past it, and say so itself.
Of nodes that are no peers relays are all there is: they are believed."""

MAX_PAST = 2**62 + 2**61
"""The highest past of its own that an owner moves beyond. It passes `MAX_HEARSAY` only to refute, one by one, so a
higher one is a lie."""

MAX_MEMORIES = 4096
"""Endpoints that are remembered after they were forgotten."""

REFUTED_AT_ONCE, REFUTED_PER_S = 8, 0.1
"""How often an owner moves past what others say of one endpoint. A restart takes one or two."""

REFUTED_TOLD_S = 60.0
"""An event tells no sooner again that an endpoint was refuted."""

OnUpdate: TypeAlias = Callable[[str, Keys, Keys], None]
"""Takes every change of a replica's keys: endpoint, added, removed."""


class Members:
    """The copies of all endpoints that one node knows of: every one of them comes and goes here."""

    def __init__(
        self, node: str, settings: GossipSettings, tempo: Tempo, peers: Peers, journal: Journal, on_update: OnUpdate
    ) -> None:
        self.node = node
        self.peers = peers
        self.copies: dict[str, Copy] = {}
        self.left: dict[str, Left] = {}
        """Endpoints that have left, own ones and others, until they would be forgotten."""
        self.holdings = Holdings(settings)
        self._gone: LRUCache[str, tuple[int, int]] = LRUCache(MAX_MEMORIES)
        """The last (incarnation, heartbeat) of endpoints that were forgotten, or never held."""
        self._refutes: dict[str, tuple[Bucket, Bucket]] = {}
        """By own endpoint: the pace of refuting, and of telling so."""
        self._settings = settings
        self._tempo = tempo
        self._journal = journal
        self.on_update = on_update
        self._touched: set[str] = set()
        self._lost = False
        self._hearsay = 0
        """Endpoints of nodes that are no peers; counted anew each round."""

    def take_touched(self) -> set[str]:
        """Return and forget the endpoints of others whose load, liveness, keys or way there changed."""
        touched, self._touched = self._touched, set()
        changed = self.peers.take_changed()
        if changed:
            touched.update(endpoint for endpoint in self.copies if owner_of(endpoint) in changed)
        return touched

    def take_lost(self) -> bool:
        """Return and forget whether any endpoint is known no more."""
        lost, self._lost = self._lost, False
        return lost

    def remove_peer(self, node: str) -> bool:
        """Remove a peer with its endpoints, whoever still speaks of them; return whether it was there."""
        if not self.peers.remove(node):
            return False
        for endpoint in [name for name in self.copies if owner_of(name) == node]:
            self.forget(endpoint, "removed")
        self._journal.tell(PeerChanged(node, "removed"))
        return True

    def learn(self, entry: VectorEntry, teller: str, now: float) -> None:
        """Take an entry's news of load and liveness; sets come in updates."""
        if not self.believes(entry.endpoint, entry.incarnation, teller):
            return
        if entry.incarnation <= MAX_PAST and owner_of(entry.endpoint) == teller:
            self._start_over(entry)
        if entry.heartbeat == LAST_BEAT:
            self._bury(entry, now)
            return
        heard_at = now - entry.age_ms / 1000
        copy = self.copies.get(entry.endpoint)
        if copy is None:
            copy = self._meet(entry, heard_at, now)
            if copy is None:
                return
        if copy.mine:
            self._defend(copy, entry, now)
            return
        if entry.incarnation < copy.incarnation:
            return
        if entry.incarnation > copy.incarnation:
            self._begin_incarnation(copy, entry.incarnation, now)
        if entry.heartbeat > copy.heartbeat:
            self._hear(copy, entry.heartbeat, heard_at, now)
        if entry.load is not None and entry.revision > copy.revision:
            copy.take_load(entry.load, entry.revision)
            self._tempo.stir(now)
            self._touched.add(copy.endpoint)
        if entry.revision == copy.revision:
            copy.load_at = max(copy.load_at, heard_at)
        if entry.version and entry.version == copy.keys.version and entry.mark != copy.mark:
            # Only its owner can tell which of two sets under one pair is right.
            if owner_of(copy.endpoint) == teller:
                self.discard(copy, now)
            else:
                self._journal.count("marks_differ")

    def believes(self, endpoint: str, incarnation: int, teller: str) -> bool:
        """Whether to believe that an endpoint has this incarnation; counted if not.

        A relay is not believed a new incarnation so high that the owner could hardly move past it. An owner is told its
        own past by relays only.
        """
        if incarnation <= MAX_HEARSAY:
            return True
        owner = owner_of(endpoint)
        if owner == teller or (incarnation <= MAX_PAST if owner == self.node else owner not in self.peers):
            return True
        copy = self.copies.get(endpoint)
        if copy is not None and incarnation <= copy.incarnation:
            return True
        self._journal.count("incarnations_unbelieved")
        return False

    def forget(self, endpoint: str, reason: str) -> None:
        """Drop a replica; older news of it is ignored from now on."""
        copy = self.copies.pop(endpoint)
        self._lost = True
        self.holdings.lost(endpoint)
        # Who hears of it by relays alone could not come back from a lie that its owner cannot refute.
        if copy.incarnation <= MAX_PAST or not self.is_hearsay(endpoint):
            self._gone[endpoint] = copy.beat
        if len(copy.keys):
            self.on_update(endpoint, NO_KEYS, copy.keys.keys)
        self._journal.tell(ReplicaChanged(endpoint, "forgotten", reason))

    def discard(self, copy: Copy, now: float) -> None:
        """Drop the keys of a copy whose checksum differs from its owner's: the next vector asks for a snapshot."""
        self._journal.count("checksum_mismatches")
        self._empty(copy, "checksum", now)

    def leave(self, endpoint: str, now: float) -> None:
        """Remove an own endpoint: from now on vectors tell its last word."""
        copy = self.copies.pop(endpoint)
        del self._refutes[endpoint]
        self.left[endpoint] = Left(copy.incarnation, now)
        self._tempo.stir(now)

    def join(self, endpoint: str, incarnation: int, url: str, now: float) -> Copy:
        """Add an own endpoint; one that has left before comes back in a later incarnation."""
        left = self.left.pop(endpoint, None)
        if left is not None:
            incarnation = max(incarnation, min(left.incarnation + 1, MAX_INCARNATION))
        settings = self._settings
        self._refutes[endpoint] = Bucket(REFUTED_PER_S, REFUTED_AT_ONCE), Bucket(1 / REFUTED_TOLD_S, 1)
        copy = self.copies[endpoint] = Copy(endpoint, True, incarnation, now, url, settings.contact, settings.zone)
        self._tempo.stir(now)
        return copy

    def is_hearsay(self, endpoint: str) -> bool:
        """Whether an endpoint belongs to neither this node nor a peer."""
        owner = owner_of(endpoint)
        return owner not in self.peers and owner != self.node

    def last_words(self, now: float) -> Iterator[VectorEntry]:
        """Yield what a vector says of the endpoints that have left."""
        return (left.entry(endpoint, now) for endpoint, left in self.left.items())

    def last_words_unheard(self, theirs: Mapping[str, VectorEntry], now: float) -> Iterator[VectorEntry]:
        """Yield the last words that the sender of these entries, by endpoint, has not heard. O(left)."""
        for endpoint, left in self.left.items():
            entry = theirs.get(endpoint)
            if entry is not None and left.beat > (entry.incarnation, entry.heartbeat):
                yield left.entry(endpoint, now)

    def later_word(self, peer: Peer, entry: VectorEntry) -> VectorEntry | None:
        """Return the entry that tells a peer to move past words of its endpoint that it does not know of.

        That is so if this node forgot the endpoint but remembers a later heartbeat than its owner now announces. The
        entry is so old that nobody but the owner takes it.
        """
        gone = self._gone.get(entry.endpoint)
        if gone is None or entry.endpoint in self.copies or owner_of(entry.endpoint) != peer.node:
            return None
        if gone <= (entry.incarnation, entry.heartbeat):
            return None
        return VectorEntry(entry.endpoint, *gone, age_ms=2**32 - 1)

    def placed(self, copy: Copy, update: Update, now: float) -> None:
        """Take the addresses and the zone that a whole update tells; its owner may become a peer."""
        copy.url, copy.contact = update.url or copy.url, update.contact or copy.contact
        # One incarnation has one zone, and only snapshots tell it.
        copy.zone = update.zone or (copy.zone if update.incarnation == copy.incarnation else "")
        self.peers.learn(owner_of(copy.endpoint), copy.contact, now)
        self._touched.add(copy.endpoint)
        self._tempo.stir(now)

    def sweep(self, now: float) -> None:
        """Suspect and forget peers and endpoints that were silent while this node listened. O(endpoints + peers)."""
        least, most = self._settings.suspect_after_s, self._settings.forget_after_s
        owners: set[str] = set()
        for copy in [copy for copy in self.copies.values() if not copy.mine]:
            age = copy.age_s(now)
            silence = self._tempo.silence_s(copy.heard_at, now)
            patience = copy.rhythm.patience_s(least, most / 2)
            suspected = silence > patience or (copy.suspected and age > patience)
            if suspected is not copy.suspected:
                copy.suspected = suspected
                self._touched.add(copy.endpoint)
            if silence > most:
                self.forget(copy.endpoint, f"unheard for {age:.0f} s")
            else:
                owners.add(owner_of(copy.endpoint))
        self._hearsay = sum(n for owner, n in self.holdings.endpoints.items() if owner not in self.peers)
        for endpoint in [name for name, left in self.left.items() if now - left.heard_at > most]:
            del self.left[endpoint]
        self.peers.sweep(owners, now)

    def _meet(self, entry: VectorEntry, heard_at: float, now: float) -> Copy | None:
        """Make a copy of an endpoint that was not known; None if it is stale, unwelcome, or one too many."""
        owner = owner_of(entry.endpoint)
        if now - heard_at > self._settings.forget_after_s:
            if owner in self.peers:
                self._remember(entry)
            return None
        if (entry.incarnation, entry.heartbeat) <= self._past(entry.endpoint):
            self._contradicted(entry.endpoint, now)
            return None
        # An endpoint of this node's name that this node does not have was one of a former run.
        if owner in ("", self.node) or self.peers.was_removed(owner):
            return None
        if (
            len(self.copies) >= self._settings.max_endpoints
            or self.holdings.endpoints[owner] >= self._settings.max_owner_endpoints
            or (owner not in self.peers and self._hearsay >= self._settings.max_hearsay)
        ):
            self._journal.count("endpoints_refused")
            return None
        self.holdings.endpoints[owner] += 1
        self._hearsay += owner not in self.peers
        self.left.pop(entry.endpoint, None)
        copy = self.copies[entry.endpoint] = Copy(entry.endpoint, False, entry.incarnation, heard_at)
        copy.suspected = now - heard_at > self._settings.suspect_after_s
        self._touched.add(entry.endpoint)
        self._tempo.stir(now)
        self._journal.tell(ReplicaChanged(entry.endpoint, "learnt"))
        return copy

    def _past(self, endpoint: str) -> tuple[int, int]:
        """Return the latest (incarnation, heartbeat) that is remembered of an endpoint that is not held."""
        left = self.left.get(endpoint)
        return max(self._gone.get(endpoint, (0, -1)), left.beat if left is not None else (0, -1))

    def _remember(self, entry: VectorEntry) -> None:
        """Remember a word of an endpoint that is not held. Of nodes that are no peers while there is room only."""
        endpoint, word = entry.endpoint, (entry.incarnation, entry.heartbeat)
        room = len(self._gone) < MAX_MEMORIES or endpoint in self._gone or not self.is_hearsay(endpoint)
        if room and owner_of(endpoint) not in ("", self.node) and word > self._past(endpoint):
            self._gone[endpoint] = word
            if endpoint in self.left and entry.heartbeat == LAST_BEAT:
                self.left[endpoint] = Left(entry.incarnation, self.left[endpoint].heard_at)

    def _contradicted(self, endpoint: str, now: float) -> None:
        """Pass on a last word that somebody speaks against: its owner, who is no peer, can move past it only then."""
        incarnation, beat = self._past(endpoint)
        if beat == LAST_BEAT and endpoint not in self.left and self.is_hearsay(endpoint):
            self._keep_last_word(endpoint, Left(incarnation, now))

    def _start_over(self, entry: VectorEntry) -> None:
        """Forget an endpoint, on its owner's own word, if that word is older than any that the owner could go past."""
        copy = self.copies.get(entry.endpoint)
        if copy is not None:
            if copy.mine or copy.incarnation <= MAX_PAST:
                return
            self.forget(entry.endpoint, f"its owner speaks, and could not move past incarnation {copy.incarnation}")
        elif self._past(entry.endpoint)[0] <= MAX_PAST:
            return
        self._gone.pop(entry.endpoint, None)
        self.left.pop(entry.endpoint, None)

    def _hear(self, copy: Copy, heartbeat: int, heard_at: float, now: float) -> None:
        """Take the owner's word: it spoke `heartbeat` at `heard_at`."""
        if heard_at > copy.heard_at:
            if copy.heartbeat and not copy.suspected:
                # A silence that was taken for a death is no part of the rhythm, and neither is a pause of this node.
                copy.rhythm.note(self._tempo.silence_s(copy.heard_at, now))
            copy.heard_at = heard_at
        copy.heartbeat = heartbeat
        least, most = self._settings.suspect_after_s, self._settings.forget_after_s
        copy.suspected = copy.age_s(now) > copy.rhythm.patience_s(least, most / 2)
        self._touched.add(copy.endpoint)

    def _begin_incarnation(self, copy: Copy, incarnation: int, now: float) -> None:
        """Take it that the endpoint's process began anew: what its former incarnation held is gone."""
        copy.incarnation, copy.heartbeat, copy.revision, copy.assembly = incarnation, 0, 0, None
        # It may have begun anew elsewhere: its zone is not known until its snapshot tells it.
        copy.zone = ""
        self._tempo.stir(now)
        if copy.keys.version:
            self._empty(copy, "incarnation", now)

    def _empty(self, copy: Copy, reason: str, now: float) -> None:
        """Drop a copy's keys, and the transfer under way."""
        lost = copy.keys.keys
        copy.keys.replace(0, NO_KEYS)
        copy.assembly = None
        self.holdings.note(copy.endpoint, 0)
        self._tempo.stir(now)
        self._journal.tell(ReplicaChanged(copy.endpoint, "discarded", reason))
        self.on_update(copy.endpoint, NO_KEYS, lost)

    def _defend(self, copy: Copy, entry: VectorEntry, now: float) -> None:
        """Move an own endpoint past words that its present incarnation has not spoken (rule 2)."""
        held = (entry.incarnation, entry.version)
        another = held == copy.held and entry.mark != copy.mark
        later = (entry.incarnation, entry.heartbeat) > copy.beat or (entry.incarnation, entry.revision) > copy.loaded
        if not (held > copy.held or later or another):
            return
        pace, telling = self._refutes[copy.endpoint]
        if not pace.take(1, now):
            self._journal.count("refutations_put_off")
            return
        first = telling.take(1, now)
        # Two nodes of one name and other sets that go on refuting must not meet in one incarnation.
        copy.incarnation = min(entry.incarnation + (1 if first else 1 + copy.mark), MAX_INCARNATION)
        self._journal.count("refutations")
        self._tempo.stir(now)
        if first:
            reason = f"incarnation {entry.incarnation} was used before, or another node has this name"
            self._journal.tell(ReplicaChanged(copy.endpoint, "refuted", reason))

    def _bury(self, entry: VectorEntry, now: float) -> None:
        """Take an endpoint's last word: the endpoint has left."""
        copy, heard_at = self.copies.get(entry.endpoint), now - entry.age_ms / 1000
        if copy is None:
            self._remember(entry)
            return
        if entry.incarnation < copy.incarnation:
            return
        if copy.mine:
            self._defend(copy, entry, now)
            return
        copy.incarnation, copy.heartbeat = entry.incarnation, LAST_BEAT
        self.forget(entry.endpoint, "left")
        self._keep_last_word(entry.endpoint, Left(entry.incarnation, heard_at))
        self._tempo.stir(now)

    def _keep_last_word(self, endpoint: str, word: Left) -> None:
        while len(self.left) >= self._settings.max_endpoints:
            # The last words of own endpoints stay: nobody else tells them.
            oldest = next((name for name in self.left if owner_of(name) != self.node), None)
            if oldest is None:
                return
            del self.left[oldest]
        self.left[endpoint] = word
