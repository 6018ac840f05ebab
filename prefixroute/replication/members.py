"""Who is there: peers and copies are met, heard, suspected, forgotten, and leave.

Rules:
1. Relayed news is as old as the owner's own last word: ages add up along relays. So hearsay neither keeps a dead
   endpoint alive, nor brings a forgotten one back.
2. An owner that meets a later life of itself, words of its life that it has not spoken, or another set under its own
   pair, moves past it to a higher incarnation.
3. A node that was itself paused heard nobody, and blames nobody for that time.
4. An endpoint that leaves speaks a last word, above every heartbeat. It is passed on until it would be forgotten.
5. What others can make a node keep is bounded: endpoints, peers, memories of the forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from cachetools import LRUCache

from ..events import NodeEvent, PeerChanged, ReplicaChanged
from ..keys.keyset import NO_KEYS, Keys
from ..keys.names import owner_of
from .copies import Copy, Left, Peer
from .gossip_settings import GossipSettings
from .limits import Holdings, Limits
from .tempo import Tempo
from .wire import LAST_BEAT, VectorEntry

MAX_INCARNATION = 2**63 - 1
MAX_HEARSAY = 2**62
"""The highest incarnation that a relay can tell of first: an owner can always move past it, and tell so itself."""

MAX_MEMORIES = 4096
"""Endpoints and nodes remembered after they were forgotten, left or removed."""


class Members:
    """Peers and copies of one node. `on_update(endpoint, added, removed)` tells every change of a replica's keys."""

    def __init__(
        self,
        node: str,
        settings: GossipSettings,
        tempo: Tempo,
        emit: Callable[[NodeEvent], None],
        counters: Counter[str],
        on_update: Callable[[str, Keys, Keys], None],
    ) -> None:
        self.node = node
        self.peers: dict[str, Peer] = {}
        self.copies: dict[str, Copy] = {}
        self.left: dict[str, Left] = {}
        self.touched: set[str] = set()
        """Endpoints of others whose load, liveness or keys changed since a caller last took them."""
        self.removed: LRUCache[str, None] = LRUCache(MAX_MEMORIES)
        """Nodes that the caller took out: what relays say of their endpoints is ignored."""
        self._gone: LRUCache[str, tuple[int, int]] = LRUCache(MAX_MEMORIES)
        self.limits = Limits(settings)
        self.holdings = Holdings(settings)
        self._settings = settings
        self._tempo = tempo
        self._emit = emit
        self._counters = counters
        self._on_update = on_update
        self._awake_at = float("-inf")
        self._lost = False
        self._hearsay = 0
        """Endpoints of nodes that are no peers; counted anew each round."""

    def take_lost(self) -> bool:
        """Return and forget whether any endpoint is known no more."""
        lost, self._lost = self._lost, False
        return lost

    # --- peers ---------------------------------------------------------------------------------------------

    def add_peer(self, node: str, address: Hashable, now: float) -> Peer:
        """Take a peer in by the caller's word; a known one gets its new address."""
        self.removed.pop(node, None)
        peer = self.peers.get(node)
        if peer is None:
            peer = self.peers[node] = Peer(node, address, now, self.limits)
            self._tempo.stir(now)
        peer.address, peer.learnt = address, False
        self.limits.proved(address)
        self._touch(node)
        return peer

    def remove_peer(self, node: str) -> bool:
        """Take a peer out with its endpoints, whoever still speaks of them; return whether it was there."""
        if self.peers.pop(node, None) is None:
            return False
        self.removed[node] = None
        for endpoint in [name for name in self.copies if owner_of(name) == node]:
            self.forget(endpoint, "removed")
        self._emit(PeerChanged(node, "removed"))
        return True

    def learn_peer(self, node: str, contact: str, now: float) -> Peer | None:
        """Take a peer in by hearsay, if that is wanted; return it if it is a peer now."""
        known = self.peers.get(node)
        if known is not None or not self.would_learn(node, contact):
            return known
        peer = self.peers[node] = Peer(node, contact, now, self.limits, learnt=True)
        self._tempo.stir(now)
        self._touch(node)
        self._emit(PeerChanged(node, "learnt", contact))
        return peer

    def would_learn(self, node: str, contact: str) -> bool:
        """Whether a node that is no peer may become one by hearsay."""
        if not contact or not self._settings.learn_peers or node in self.removed or node == self.node:
            return False
        return len(self.peers) < self._settings.max_endpoints

    def heard_from(self, peer: Peer, now: float) -> None:
        """Note a peer's own word."""
        if peer.state == "heard":
            if peer.heard_at >= self._awake_at:
                peer.rhythm.note(now - peer.heard_at)
        else:
            peer.state = "heard"
            self._tempo.stir(now)
            self._emit(PeerChanged(peer.node, "heard"))
        peer.heard_at = now
        peer.same_domain = True

    # --- copies --------------------------------------------------------------------------------------------

    def learn(self, entry: VectorEntry, teller: str, now: float) -> None:
        """Take an entry's news of load and liveness; sets come in updates."""
        if self.unbelievable(entry.endpoint, entry.incarnation, teller):
            self._counters["incarnations_unbelieved"] += 1
            return
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
            self._begin_life(copy, entry.incarnation, now)
        if entry.heartbeat > copy.heartbeat:
            self._hear(copy, entry.heartbeat, heard_at, now)
        if entry.load is not None and entry.revision > copy.revision:
            copy.take_load(entry.load, entry.revision)
            self._tempo.stir(now)
            self.touched.add(copy.endpoint)
        if entry.revision == copy.revision:
            copy.load_at = max(copy.load_at, heard_at)
        if entry.version and entry.version == copy.keys.version and entry.mark != copy.mark:
            # Only its owner can tell which of two sets under one pair is right.
            if owner_of(copy.endpoint) == teller:
                self.discard(copy, now)
            else:
                self._counters["marks_differ"] += 1

    def unbelievable(self, endpoint: str, incarnation: int, teller: str) -> bool:
        """Whether another than the owner tells of a life that the owner could hardly move past."""
        if incarnation <= MAX_HEARSAY or owner_of(endpoint) == teller:
            return False
        copy = self.copies.get(endpoint)
        return copy is None or incarnation > copy.incarnation

    def forget(self, endpoint: str, reason: str) -> None:
        """Drop a replica; older news of it is ignored from now on."""
        copy = self.copies.pop(endpoint)
        self._lost = True
        self.holdings.lost(endpoint, owner_of(endpoint))
        self._gone[endpoint] = copy.beat
        if len(copy.keys):
            self._on_update(endpoint, NO_KEYS, copy.keys.keys)
        self._emit(ReplicaChanged(endpoint, "forgotten", reason))

    def discard(self, copy: Copy, now: float) -> None:
        """Drop the keys of a copy whose checksum differs from its owner's: the next vector asks for a snapshot."""
        self._counters["checksum_mismatches"] += 1
        self._empty(copy, "checksum", now)

    def leave(self, endpoint: str, now: float) -> None:
        """Take an own endpoint out: from now on vectors tell its last word."""
        copy = self.copies.pop(endpoint)
        self.left[endpoint] = Left(copy.incarnation, now)
        self._tempo.stir(now)

    def join(self, endpoint: str, incarnation: int, url: str, now: float) -> Copy:
        """Take an own endpoint in; one that has left before comes back in a later life."""
        left = self.left.pop(endpoint, None)
        if left is not None:
            incarnation = max(incarnation, min(left.incarnation + 1, MAX_INCARNATION))
        copy = self.copies[endpoint] = Copy(
            endpoint, True, incarnation, now, url, self._settings.contact, self._settings.zone
        )
        self._tempo.stir(now)
        return copy

    def last_word(self, peer: Peer, entry: VectorEntry) -> VectorEntry | None:
        """What an owner must move past: later words than its own, of an endpoint that was forgotten since.

        They are too old for anybody but the owner to take.
        """
        gone = self._gone.get(entry.endpoint)
        if gone is None or entry.endpoint in self.copies or owner_of(entry.endpoint) != peer.node:
            return None
        if gone <= (entry.incarnation, entry.heartbeat):
            return None
        return VectorEntry(entry.endpoint, *gone, age_ms=2**32 - 1)

    # --- time ----------------------------------------------------------------------------------------------

    def watch(self, now: float) -> None:
        """Notice, by a timer that did not fire, that this node itself stood still until now."""
        due_at = self._tempo.next_at
        if now - due_at > 0.5 * self._settings.suspect_after_s and self._awake_at < due_at:
            self._awake_at = now
            self._counters["pauses"] += 1

    def sweep(self, now: float) -> None:
        """Suspect and forget what was not heard while this node was listening. O(endpoints + peers)."""
        least, most = self._settings.suspect_after_s, self._settings.forget_after_s
        owners: set[str] = set()
        for copy in [copy for copy in self.copies.values() if not copy.mine]:
            age = copy.age_s(now)
            silence = min(age, now - self._awake_at)
            patience = copy.rhythm.patience_s(least, most / 2)
            suspected = silence > patience or (copy.suspected and age > patience)
            if suspected is not copy.suspected:
                copy.suspected = suspected
                self.touched.add(copy.endpoint)
            if silence > most:
                self.forget(copy.endpoint, f"unheard for {age:.0f} s")
            else:
                owners.add(owner_of(copy.endpoint))
        self._hearsay = sum(n for owner, n in self.holdings.endpoints.items() if owner not in self.peers)
        for endpoint in [name for name, left in self.left.items() if now - left.heard_at > most]:
            del self.left[endpoint]
        for peer in list(self.peers.values()):
            self._sweep_peer(peer, peer.node in owners, now)

    def _sweep_peer(self, peer: Peer, owns: bool, now: float) -> None:
        """A peer is judged by its own words to this node: when they stop, forwards to it will hardly arrive."""
        silence = now - max(peer.heard_at, self._awake_at)
        least, most = self._settings.suspect_after_s, self._settings.forget_after_s
        # Each peer has its turn: what is rare is to miss four of them.
        least = max(least, 4 * len(self.peers) * self._tempo.spacing_s)
        if peer.learnt and not owns and silence > max(least, most):
            del self.peers[peer.node]
            self._emit(PeerChanged(peer.node, "forgotten", f"unheard for {silence:.0f} s"))
        elif peer.state in ("heard", "new") and silence > peer.rhythm.patience_s(least, max(least, most)):
            peer.state = "suspected"
            # It may have forgotten this node, or come back as another: introduce this one again.
            peer.same_domain = False
            self._emit(PeerChanged(peer.node, "suspected", f"unheard for {now - peer.heard_at:.1f} s"))

    # --- parts ---------------------------------------------------------------------------------------------

    def _touch(self, node: str) -> None:
        """The way to a node's endpoints has changed."""
        self.touched.update(endpoint for endpoint in self.copies if owner_of(endpoint) == node)

    def _meet(self, entry: VectorEntry, heard_at: float, now: float) -> Copy | None:
        """Make a copy of an endpoint that was not known, if there is reason to."""
        owner = owner_of(entry.endpoint)
        past = max(self._gone.get(entry.endpoint, (0, -1)), self._last_beat(entry.endpoint))
        if (entry.incarnation, entry.heartbeat) <= past or now - heard_at > self._settings.forget_after_s:
            return None
        # An endpoint of this node's own name that it does not have is one of its former life.
        if owner in ("", self.node) or owner in self.removed:
            return None
        if (
            len(self.copies) >= self._settings.max_endpoints
            or self.holdings.endpoints[owner] >= self._settings.max_owner_endpoints
            or (owner not in self.peers and self._hearsay >= self._settings.max_hearsay)
        ):
            self._counters["endpoints_refused"] += 1
            return None
        self.holdings.met(owner)
        self._hearsay += owner not in self.peers
        self.left.pop(entry.endpoint, None)
        copy = self.copies[entry.endpoint] = Copy(entry.endpoint, False, entry.incarnation, heard_at)
        copy.suspected = now - heard_at > self._settings.suspect_after_s
        self.touched.add(entry.endpoint)
        self._tempo.stir(now)
        self._emit(ReplicaChanged(entry.endpoint, "learnt"))
        return copy

    def _last_beat(self, endpoint: str) -> tuple[int, int]:
        left = self.left.get(endpoint)
        return left.beat if left is not None else (0, -1)

    def _hear(self, copy: Copy, heartbeat: int, heard_at: float, now: float) -> None:
        """The owner spoke."""
        if heard_at > copy.heard_at:
            if copy.heartbeat and not copy.suspected and copy.heard_at >= self._awake_at:
                # A silence that was taken for a death is no part of the rhythm, and neither is an own pause.
                copy.rhythm.note(now - copy.heard_at)
            copy.heard_at = heard_at
        copy.heartbeat = heartbeat
        least, most = self._settings.suspect_after_s, self._settings.forget_after_s
        copy.suspected = copy.age_s(now) > copy.rhythm.patience_s(least, most / 2)
        self.touched.add(copy.endpoint)

    def _begin_life(self, copy: Copy, incarnation: int, now: float) -> None:
        """The endpoint's process began anew: what its former life held is gone."""
        copy.incarnation, copy.heartbeat, copy.revision, copy.assembly = incarnation, 0, 0, None
        # It may have begun anew elsewhere: until its snapshot says where, its zone may be any.
        copy.zone = ""
        self._tempo.stir(now)
        if copy.keys.version:
            self._empty(copy, "incarnation", now)

    def _empty(self, copy: Copy, reason: str, now: float) -> None:
        lost = copy.keys.keys
        copy.keys.replace(0, NO_KEYS)
        copy.assembly = None
        self.holdings.note(copy.endpoint, owner_of(copy.endpoint), 0)
        self._tempo.stir(now)
        self._emit(ReplicaChanged(copy.endpoint, "discarded", reason))
        self._on_update(copy.endpoint, NO_KEYS, lost)

    def _defend(self, copy: Copy, entry: VectorEntry, now: float) -> None:
        """Move an own endpoint past words of it that are not this life's."""
        held = (entry.incarnation, entry.version)
        another = held == copy.held and entry.mark != copy.mark
        later = (entry.incarnation, entry.heartbeat) > copy.beat or (entry.incarnation, entry.revision) > copy.loaded
        if held > copy.held or later or another:
            copy.incarnation = min(entry.incarnation + 1, MAX_INCARNATION)
            self._counters["refutations"] += 1
            self._tempo.stir(now)
            reason = f"incarnation {entry.incarnation} was used before, or another node has this name"
            self._emit(ReplicaChanged(copy.endpoint, "refuted", reason))

    def _bury(self, entry: VectorEntry, now: float) -> None:
        """Take an endpoint's last word."""
        copy = self.copies.get(entry.endpoint)
        if copy is None or entry.incarnation < copy.incarnation:
            return
        if copy.mine:
            self._defend(copy, entry, now)
            return
        heard_at = now - entry.age_ms / 1000
        copy.incarnation, copy.heartbeat = entry.incarnation, LAST_BEAT
        self.forget(entry.endpoint, "left")
        while len(self.left) >= self._settings.max_endpoints:
            # Of others: an own endpoint's last word is this node's to tell.
            oldest = next((name for name in self.left if owner_of(name) != self.node), None)
            if oldest is None:
                return
            del self.left[oldest]
        self.left[entry.endpoint] = Left(entry.incarnation, heard_at)
        self._tempo.stir(now)
