"""Which nodes a node talks to: peers are added and learnt, heard, suspected and forgotten.

Rules:
1. A peer is judged by its own words to this node, not by what relays say of it.
2. A node that was itself paused heard nobody, and blames nobody for that time (`Tempo.awake_at`).
3. A peer that the caller added stays until the caller removes it. One that gossip made a peer is forgotten when it is
   silent and owns no endpoint.
4. Gossip makes no more peers than `max_endpoints`, and none that the caller has removed.
"""

from __future__ import annotations

from collections.abc import Container, Hashable

from cachetools import LRUCache

from ..events import Journal, PeerChanged
from .copies import Peer
from .gossip_settings import GossipSettings
from .limits import Limits
from .tempo import Tempo

MAX_REMOVED = 4096
"""Nodes that are remembered after the caller removed them."""


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
        peer.address, peer.learnt = address, False
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

    def heard_from(self, peer: Peer, now: float) -> None:
        """Note that a peer itself spoke."""
        if peer.state == "heard":
            if peer.heard_at >= self._tempo.awake_at:
                peer.rhythm.note(now - peer.heard_at)
        else:
            peer.state = "heard"
            self._tempo.stir(now)
            self._journal.tell(PeerChanged(peer.node, "heard"))
        peer.heard_at = now
        peer.same_domain = True

    def sweep(self, owners: Container[str], now: float) -> None:
        """Suspect and forget peers that were silent while this node listened; `owners` have endpoints. O(peers)."""
        for peer in list(self.values()):
            self._sweep_peer(peer, peer.node in owners, now)

    def _sweep_peer(self, peer: Peer, owns: bool, now: float) -> None:
        """Judge a peer by its own words to this node: when they stop, forwards to it will hardly arrive."""
        silence = now - max(peer.heard_at, self._tempo.awake_at)
        least, most = self._settings.suspect_after_s, self._settings.forget_after_s
        # Each peer speaks in its turn: that it misses four turns is rare.
        least = max(least, 4 * len(self) * self._tempo.spacing_s)
        if peer.learnt and not owns and silence > max(least, most):
            del self[peer.node]
            self._journal.tell(PeerChanged(peer.node, "forgotten", f"unheard for {silence:.0f} s"))
        elif peer.state in ("heard", "new") and silence > peer.rhythm.patience_s(least, max(least, most)):
            peer.state = "suspected"
            # It may have forgotten this node, or come back as another: introduce this one again.
            peer.same_domain = False
            self._journal.tell(PeerChanged(peer.node, "suspected", f"unheard for {now - peer.heard_at:.1f} s"))
