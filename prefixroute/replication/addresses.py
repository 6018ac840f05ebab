"""Where a peer is: it may come back under its name elsewhere, and somebody else may say that it has.

Whoever speaks as a peer from another address than the peer's is asked there: a challenge, whose nonce goes to that
address alone. The echo is a *claim* to the peer's name. It is held against the peer's own answers:

| the address that claims                              | becomes                                          |
|------------------------------------------------------|--------------------------------------------------|
| is the one that the caller gave, or the first learnt | the peer's, at once                              |
| any, and the peer is suspected                       | the peer's, at once                              |
| any, and the peer answers where it is                | refused: two nodes have one name, and both are told |
| any, and the peer answers nothing for two rounds     | the peer's                                       |

Rules:
1. An address stays while it answers: what is not proved changes nothing, and is answered by one datagram an address.
2. Only questions that were asked after the claim count: what was under way when a node died is no answer.
3. A peer that is silent is asked at the first address and at its contact, too, as far as relays tell it.
4. A seed is an address without a name: it is asked until somebody answers there, and again when that peer is silent.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from cachetools import LRUCache

from ..events import AddressFailed, Journal
from .copies import Peer
from .freshness import Freshness
from .gossip_settings import GossipSettings
from .limits import Refusals
from .outbox import Outbox
from .peers import Peers, Tempo
from .wire import Message

MAX_ASKED = 1024
"""Lives that were asked whether they are at another address, and have not answered."""

MOVED_AFTER = 4
"""So many questions in a row without an answer let a peer be looked for where its words come from."""

LEAST_QUESTIONS = 2
"""Questions that a claimed peer must have left unanswered."""

UNDER_WAY_S = 1.0
"""Words that come so long after a claim were not under way: the peer lives, even if it takes no questions."""

REFUSED_S = 60.0
"""A life that was refused is not heard for so long, unless the peer is suspected."""

UNANSWERED_S = 10.0
"""A seed is told of when nobody has answered there for so long."""

MAX_SEED_QUESTIONS = 8


@dataclass(slots=True)
class Asked:
    """What one life was asked: the nonces, each with the address that it went to."""

    nonces: dict[int, Hashable]
    at: float
    times: int = 0


@dataclass(slots=True)
class Claim:
    """A life that has proved to be at `address`, and says that it is a peer. `ack` proved it."""

    address: Hashable
    life: int
    ack: Message
    since: float
    same: bool
    """Whether the peer's own life says so: it moved without a restart."""
    questions: int = 0


@dataclass(slots=True)
class Seed:
    """An address to be introduced at; `node` is who answered there."""

    since: float | None = None
    node: str = ""
    told: bool = False


class Addresses:
    """The claims to the peers of one node, and its seeds."""

    def __init__(
        self,
        settings: GossipSettings,
        tempo: Tempo,
        peers: Peers,
        freshness: Freshness,
        outbox: Outbox,
        refusals: Refusals,
        journal: Journal,
    ) -> None:
        self.claims: dict[str, Claim] = {}
        """By peer: who has proved to be elsewhere and waits for the peer's silence."""
        self.seeds: dict[Hashable, Seed] = {}
        self._settings = settings
        self._tempo = tempo
        self._peers = peers
        self._freshness = freshness
        self._outbox = outbox
        self._refusals = refusals
        self._journal = journal
        self._asked: LRUCache[tuple[str, int], Asked] = LRUCache(MAX_ASKED)
        self._refused: LRUCache[str, tuple[int, float]] = LRUCache(MAX_ASKED)
        """By peer: the life that was last refused, and when."""
        self._introductions: dict[int, tuple[Hashable, float]] = {}
        """Nonces of the questions to seeds: where each went, and when."""

    # --- claims --------------------------------------------------------------------------------------------

    def refuses(self, peer: Peer, life: int, now: float) -> bool:
        """Whether a life is not heard yet, because the peer answered where it is."""
        refused, at = self._refused.get(peer.node, (0, 0.0))
        return refused == life != peer.answered_life and peer.state == "heard" and now - at <= REFUSED_S

    def challenge(self, peer: Peer, message: Message, source: Hashable, known: int, now: float) -> None:
        """Ask the sender of a SYN whether it is where it says, if that is not the peer's address. O(1)."""
        same = message.life == known
        if not message.life or peer.node in self.claims or (same and peer.unanswered < MOVED_AFTER):
            return
        contact = message.contact or self._freshness.contact_of(message)
        options = [address for address in dict.fromkeys((contact, source)) if address and address != peer.address]
        if not options:
            return
        asked = self._asked.get((peer.node, message.life))
        if asked is None or now - asked.at > self._settings.suspect_after_s:
            asked = self._asked[peer.node, message.life] = Asked({}, now)
        address = options[asked.times % len(options)]
        asked.times += 1
        # One nonce for one life and address, as in `freshness`.
        nonce = next((nonce for nonce, to in asked.nonces.items() if to == address), 0)
        if not nonce:
            if len(asked.nonces) > len(options):
                asked.nonces.clear()
            nonce = self._freshness.nonce()
            asked.nonces[nonce] = address
        if peer.answers.take(1, now):
            self._outbox.challenge(address, message.life, nonce, message.nonce)

    def claimed(self, peer: Peer, message: Message, known: int, now: float) -> bool:
        """Take an ACK; return whether it proves that its sender is at another address than the peer's."""
        asked = self._asked.get((peer.node, message.life))
        if asked is None or message.echo not in asked.nonces or now - asked.at > self._settings.suspect_after_s:
            return False
        del self._asked[peer.node, message.life]
        address = asked.nonces[message.echo]
        # Where recordings are taken any word counts as its life's, so that only its answers say where it is.
        in_place = self._settings.replay_window and message.life == known and peer.unanswered < MOVED_AFTER
        if peer.node in self.claims or address == peer.address or in_place:
            return False
        self.claims[peer.node] = Claim(address, message.life, message, now, message.life == known)
        self._ask(peer, self.claims[peer.node], now)
        self._tempo.hurry(now)
        return True

    def settle(self, peer: Peer, now: float) -> Claim | None:
        """Decide a claim if that can be; return it if the peer is where it says, and believed to be there."""
        claim, settings = self.claims[peer.node], self._settings
        since, told_apart = claim.since, not claim.same and settings.replay_window
        if claim.address == peer.address or (told_apart and peer.life == claim.life):
            # It has proved itself where the peer is: one node with two addresses.
            del self.claims[peer.node]
            return None
        if told_apart:
            since = max(since, peer.heard_at)
        patience_s = max(2 * settings.interval_s, 4 * (peer.rtt_s or 0.0))
        if claim.address == peer.home or peer.state == "suspected":
            return self._adopt(peer, claim, now)
        if peer.answered_at >= claim.since or since - claim.since >= UNDER_WAY_S:
            self._refuse(peer, claim, now)
        elif claim.questions >= LEAST_QUESTIONS and now - since >= patience_s:
            return self._adopt(peer, claim, now)
        return None

    def ask_claimed(self, now: float) -> list[str]:
        """Ask all peers whose names are claimed where they were; return their names. O(claims)."""
        for node in self.claims.keys() - self._peers.keys():
            del self.claims[node]
        for node, claim in self.claims.items():
            self._ask(self._peers[node], claim, now)
        return list(self.claims)

    def _ask(self, peer: Peer, claim: Claim, now: float) -> None:
        nonce = self._freshness.nonce()
        peer.asked(nonce, now)
        claim.questions += 1
        self._outbox.ask(peer.address, peer.life, nonce)

    def _adopt(self, peer: Peer, claim: Claim, now: float) -> Claim:
        self.claims.pop(peer.node, None)
        self._peers.moved(peer, claim.address, now)
        return claim

    def _refuse(self, peer: Peer, claim: Claim, now: float) -> None:
        """Refuse a claim, and tell both nodes of the name; not if it was one node all the time."""
        del self.claims[peer.node]
        if peer.answered_life == claim.life:
            return
        self._refused[peer.node] = (claim.life, now)
        reason = f"two nodes are called {peer.node!r}: one answers at {peer.address!r}, this one is not heard"
        if self._refusals.namesake(claim.address, peer.node, reason, now):
            for address, life in ((claim.address, peer.answered_life or peer.life), (peer.address, claim.life)):
                # A challenge for another life and of no question: its receiver tells that its name is used twice.
                self._outbox.challenge(address, life, self._freshness.nonce(), 0)

    # --- silent peers --------------------------------------------------------------------------------------

    def search(self, peer: Peer, now: float) -> None:
        """Ask a suspected peer where else it may be."""
        for address in dict.fromkeys((peer.contact, peer.home)):
            if address and address != peer.address:
                nonce = self._freshness.nonce()
                peer.asked(nonce, now)
                peer.searched = {**dict(list(peer.searched.items())[-3:]), nonce: address}
                self._outbox.ask(address, 0, nonce)

    def found(self, peer: Peer, echo: int, now: float) -> None:
        """Take a peer's fresh answer: it may come from where a suspected peer was searched."""
        address = peer.searched.get(echo)
        if address is not None and peer.state == "suspected":
            self._peers.moved(peer, address, now)

    # --- seeds ---------------------------------------------------------------------------------------------

    def seed(self, address: Hashable) -> None:
        """Add a seed: ask at an address who is there, from the next exchange on."""
        self.seeds.setdefault(address, Seed())

    def ask_seeds(self, now: float) -> None:
        """Ask at the next seed where nobody is known who speaks. O(seeds)."""
        for address, seed in list(self.seeds.items()):
            peer = self._peers.get(seed.node)
            if seed.node and peer is not None and peer.state != "suspected":
                seed.since, seed.told = None, False
                continue
            if seed.since is None:
                seed.since = now
            elif now - seed.since > UNANSWERED_S and not seed.told:
                seed.told = True
                self._journal.count("seeds_unanswered")
                self._journal.tell(AddressFailed(address, f"nobody has answered at this seed for {UNANSWERED_S:.0f} s"))
            nonce = self._freshness.nonce()
            while len(self._introductions) >= MAX_SEED_QUESTIONS * len(self.seeds):
                del self._introductions[next(iter(self._introductions))]
            self._introductions[nonce] = address, now
            self._outbox.ask(address, 0, nonce)
            # In turn: the next one with the next round.
            self.seeds[address] = self.seeds.pop(address)
            return

    def introduced(self, message: Message, now: float) -> Peer | None:
        """Take an answer to a seed's question; return its sender if it becomes a peer by that."""
        address, asked_at = self._introductions.pop(message.echo, (None, now))
        seed, peer = self.seeds.get(address), self._peers.get(message.sender)
        if seed is None or self._peers.was_removed(message.sender):
            return None
        seed.node = message.sender
        if peer is None:
            peer = self._peers.introduce(message.sender, address, now)
        elif peer.state != "suspected":
            return None
        elif address != peer.address:
            self._peers.moved(peer, address, now)
        # The echo proves its life, as to any question.
        peer.probes[message.echo] = asked_at
        return peer

    def own(self, message: Message) -> bool:
        """Whether this is a question of this very node, which came back: a seed is its own address."""
        address, _ = self._introductions.get(message.nonce, (None, 0.0))
        if address is None or message.life != self._freshness.life:
            return False
        self.seeds.pop(address, None)
        return True
