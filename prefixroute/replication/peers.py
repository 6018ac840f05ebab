"""Which nodes a node talks to, and when: peers come, are heard, suspected and forgotten, and take turns in exchanges.

Rules:
1. A peer is judged by its own words to this node, not by what relays say of it: when they stop, forwards to it will
   hardly arrive.
2. A node that was itself paused heard nobody, and blames nobody for that time: silences are counted without it.
3. A peer that the caller added stays until the caller removes it. One that gossip made a peer is forgotten when it is
   silent and owns no endpoint.
4. Gossip makes no more peers than `max_endpoints`, and none that the caller has removed.
5. A round is `fan_out` exchanges, spread evenly over `interval_s`: peers that are asked at the same moment would all
   send the same.
6. When nothing but heartbeats was news for a second, exchanges slow down step by step to one in `idle_interval_s`.
   Any news brings the full pace back at once.
7. When a node first has anything to tell of its endpoints, the first exchange comes after `FIRST_S`, and each next one
   after twice as long, up to the full pace: what a fleet holds when it begins is known soon, however slow its rounds.
8. All peers are asked in turn, in a new random order each time around. Of the suspected peers only a quarter as many
   as of the others are asked, so that a fleet of dead addresses costs next to nothing.
9. A vector that cannot name every endpoint goes on where the last one ended. Own endpoints alternate with others, and
   those are interleaved by owner, so that no owner can crowd the others out of a vector.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Container, Hashable, Iterable, Mapping

from cachetools import LRUCache

from ..events import Journal, PeerChanged
from ..keys.names import owner_of
from .copies import Copy, Peer
from .gossip_settings import GossipSettings
from .limits import Limits

MAX_REMOVED = 4096
"""Nodes that are remembered after the caller removed them."""

MAX_PAUSES = 256
"""Pauses that are subtracted from silences. Each lasted half of `suspect_after_s` at least: minutes in all."""

QUIET_AFTER_S = 1.0

FIRST_S = 0.05
"""At rounds of 30 s a fleet that began cold lost 3 to 9 % of its first 2,500 requests to not knowing (rule's model)."""

SLOWER = 1.25
"""Each quiet exchange takes this much longer to the next: gently, so that others learn the new rhythm on the way."""


class Tempo:
    """When the next exchange and the next heartbeat are due."""

    __slots__ = ("_first_s", "_pauses", "_settings", "beat_at", "last_at", "news_at", "next_at", "spacing_s")

    def __init__(self, settings: GossipSettings, now: float) -> None:
        self._settings = settings
        self.spacing_s = settings.interval_s
        """Seconds between exchanges, at the present pace."""
        self.next_at = now
        self.beat_at = now
        self.last_at = now
        """When the last exchange began."""
        self.news_at = now
        """When there was last anything new but heartbeats."""
        self._first_s = settings.interval_s
        """Spacing of the first exchanges; no matter once it is that of the full pace."""
        self._pauses: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)
        """When each pause of this node began and ended."""

    def beats(self, now: float) -> bool:
        """Whether this exchange begins a round; if so the next round is set."""
        interval = self._settings.interval_s
        # A float's rounding must not put a heartbeat off by a whole exchange.
        if now < self.beat_at - 0.01 * interval:
            return False
        self.beat_at = max(self.beat_at + interval, now + 0.5 * interval)
        return True

    def wakes(self, now: float) -> bool:
        """Whether a timer that should have fired shows, for the first time, that this node was paused until now."""
        began = max(self.next_at, self._pauses[-1][1]) if self._pauses else self.next_at
        if now - began <= 0.5 * self._settings.suspect_after_s:
            return False
        self._pauses.append((began, now))
        return True

    def silence_s(self, heard_at: float, now: float) -> float:
        """Return how long nothing was heard since `heard_at`, without the pauses of this node. O(pauses since then)."""
        silence_s = now - heard_at
        for began, ended in reversed(self._pauses):
            if ended <= heard_at:
                break
            silence_s -= ended - max(began, heard_at)
        return silence_s

    def went(self, n_peers: int, now: float) -> None:
        """Note that an exchange began, and set the next one."""
        settings = self._settings
        busy = settings.interval_s / max(1, min(settings.fan_out, n_peers))
        if now - self.news_at <= QUIET_AFTER_S:
            self.spacing_s = busy
        else:
            self.spacing_s = max(busy, min(self.spacing_s * SLOWER, settings.idle_interval_s))
        if self._first_s < busy:
            self._first_s *= 2
            self.spacing_s = min(self.spacing_s, self._first_s)
        self.last_at = now
        self.next_at = max(self.next_at + self.spacing_s, now + 0.5 * self.spacing_s)

    def stir(self, now: float, first: bool = False) -> None:
        """Note that there is news: the pace is the full one from now on, and faster before for the `first` ever."""
        self.news_at = now
        self.hurry(now)
        if first:
            self._first_s = FIRST_S
            self.next_at = min(self.next_at, now + FIRST_S)

    def hurry(self, now: float) -> None:
        """Begin the next exchange within a round, whatever the pace is."""
        self.next_at = min(self.next_at, max(now, self.last_at + self._settings.interval_s))


class Peers(dict[str, Peer]):
    """The peers of one node, by name."""

    def __init__(self, node: str, settings: GossipSettings, tempo: Tempo, limits: Limits, journal: Journal) -> None:
        super().__init__()
        self._node = node
        self._settings = settings
        self._tempo = tempo
        self._limits = limits
        self._journal = journal
        self._removed: LRUCache[str, None] = LRUCache(MAX_REMOVED)
        self._changed: set[str] = set()

    def take_changed(self) -> set[str]:
        """Return and forget the nodes to whose endpoints the way has changed."""
        changed, self._changed = self._changed, set()
        return changed

    def add(self, node: str, address: Hashable, now: float) -> Peer:
        """Add a peer at the caller's word; a known peer gets its new address."""
        self._removed.pop(node, None)
        peer = self.get(node)
        if peer is None:
            peer = self[node] = Peer(node, address, now, self._limits)
            self._tempo.stir(now)
        peer.address = peer.home = address
        peer.learnt = False
        self._limits.proved(address)
        self._changed.add(node)
        return peer

    def remove(self, node: str) -> bool:
        """Remove a peer; return whether it was there."""
        if self.pop(node, None) is None:
            return False
        self._removed[node] = None
        return True

    def was_removed(self, node: str) -> bool:
        """Whether the caller has removed a node: what relays say of its endpoints is ignored."""
        return node in self._removed

    def learn(self, node: str, contact: str, now: float) -> Peer | None:
        """Add a peer by hearsay, if that is wanted; return the node's peer, None if it is none."""
        known = self.get(node)
        if known is not None:
            known.contact = contact or known.contact
        if known is not None or not self.would_learn(node, contact):
            return known
        peer = self[node] = Peer(node, contact, now, self._limits, learnt=True)
        self._tempo.stir(now)
        self._changed.add(node)
        self._journal.tell(PeerChanged(node, "learnt", contact))
        return peer

    def would_learn(self, node: str, contact: str) -> bool:
        """Whether a node that is no peer may become one by hearsay."""
        if not contact or not self._settings.learn_peers or node in self._removed or node == self._node:
            return False
        return len(self) < self._settings.max_endpoints

    def introduce(self, node: str, address: Hashable, now: float) -> Peer:
        """Add the node that has answered at an address that the caller gave without a name."""
        peer = self.add(node, address, now)
        self._journal.tell(PeerChanged(node, "learnt", f"it answered at {address!r}"))
        return peer

    def moved(self, peer: Peer, address: Hashable, now: float) -> None:
        """Note that a peer is at another address now: it has proved so, and answers nowhere else."""
        reason = f"it answers at {address!r}, and no longer at {peer.address!r}"
        peer.address, peer.unanswered, peer.rtt_s, peer.same_domain = address, 0, None, False
        peer.probes.clear()
        peer.searched.clear()
        self._limits.proved(address)
        self._changed.add(peer.node)
        self._tempo.stir(now)
        self._journal.count("peers_moved")
        self._journal.tell(PeerChanged(peer.node, "moved", reason))

    def heard_from(self, peer: Peer, now: float) -> None:
        """Note that a peer itself spoke."""
        if peer.state == "heard":
            peer.rhythm.note(self._tempo.silence_s(peer.heard_at, now))
        else:
            peer.state = "heard"
            self._tempo.stir(now)
            self._journal.tell(PeerChanged(peer.node, "heard"))
        peer.heard_at = now
        peer.same_domain = True

    def sweep(self, owners: Container[str], now: float) -> None:
        """Suspect and forget peers that were silent while this node listened; `owners` have endpoints. O(peers)."""
        for peer in list(self.values()):
            silence = self._tempo.silence_s(peer.heard_at, now)
            # Each peer speaks in its turn: that it misses four turns is rare.
            least = max(self._settings.suspect_after_s, 4 * len(self) * self._tempo.spacing_s)
            most = max(least, self._settings.forget_after_s)
            if peer.learnt and peer.node not in owners and silence > most:
                del self[peer.node]
                self._journal.tell(PeerChanged(peer.node, "forgotten", f"unheard for {silence:.0f} s"))
            elif peer.state != "suspected" and silence > peer.rhythm.patience_s(least, most):
                peer.state = "suspected"
                # It may have forgotten this node, or come back as another: introduce this one again.
                peer.same_domain = False
                self._journal.tell(PeerChanged(peer.node, "suspected", f"unheard for {now - peer.heard_at:.1f} s"))


class Turns:
    """Which peer is asked next, and which endpoints a vector names first. Both mappings are read as they are now."""

    __slots__ = ("_copies", "_named", "_partners", "_peers", "_rng")

    def __init__(self, peers: Mapping[str, Peer], copies: Mapping[str, Copy], rng: random.Random) -> None:
        self._peers = peers
        self._copies = copies
        self._rng = rng
        self._partners: deque[str] = deque()
        """The rest of this time around."""
        self._named: Counter[bool] = Counter()
        """How many entries vectors have carried, of own endpoints (True) and of others."""

    def partner(self) -> Peer | None:
        """Return the next peer to ask, None where there is nobody. O(peers) once around."""
        while True:
            if not self._partners:
                live = [peer.node for peer in self._peers.values() if peer.state != "suspected"]
                dead = [peer.node for peer in self._peers.values() if peer.state == "suspected"]
                around = live + self._rng.sample(dead, min(len(dead), max(1, len(live) // 4)))
                if not around:
                    return None
                self._rng.shuffle(around)
                self._partners.extend(around)
            peer = self._peers.get(self._partners.popleft())
            if peer is not None:
                return peer

    def in_order(self) -> list[Copy]:
        """Return all endpoints in the order in which the next vector should name them. O(endpoints)."""
        ordered: list[Copy] = []
        for mine in (True, False):
            these = self._interleaved([c for c in self._copies.values() if c.mine is mine], self._named[mine])
            # One to one while there are both, so that neither keeps the other out of a vector.
            both = min(len(ordered), len(these))
            ordered = (
                [copy for two in zip(ordered, these, strict=False) for copy in two] + ordered[both:] + these[both:]
            )
        return ordered

    def named(self, copies: Iterable[Copy]) -> None:
        """Note that a vector named these: the next one goes on behind them."""
        self._named.update(copy.mine for copy in copies)

    def _interleaved(self, copies: list[Copy], named: int) -> list[Copy]:
        """Interleave endpoints by owner, all non-peers counting as one owner, from behind the `named` ones on."""
        groups: dict[str, list[Copy]] = {}
        for copy in copies:
            owner = owner_of(copy.endpoint)
            groups.setdefault(owner if owner in self._peers else "", []).append(copy)
        queues, rounds = list(groups.values()), named // max(len(groups), 1)
        start = named % max(len(queues), 1)
        queues = [queue[rounds % len(queue) :] + queue[: rounds % len(queue)] for queue in queues]
        queues = queues[start:] + queues[:start]
        ordered: list[Copy] = []
        place = 0
        while queues:
            ordered += [queue[place] for queue in queues]
            place += 1
            queues = [queue for queue in queues if len(queue) > place]
        return ordered
