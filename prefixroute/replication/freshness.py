"""Whether an authentic datagram is new: lives, sequences, and proofs that a life is there now. No clocks in common.

Each run of a node has a *life*, a random number, and numbers its datagrams. A datagram names its sender's life, its
number, and the life of the receiver that it was made for. (An endpoint has no life: its runs are *incarnations*.)

| sender's life  | made for this life, or an answer  | number       | verdict   | then                            |
|----------------|-----------------------------------|--------------|-----------|---------------------------------|
| the proved one | this life                         | not taken    | fresh     | it is taken                     |
| the proved one | this life                         | taken or old | repeated  | dropped                         |
| any            | it echoes a nonce that is open    | any          | fresh     | the proved life from now on     |
| any other      | a SYN                             | any          | challenge | it is kept, and a nonce is sent |
| any other      | a SYN-ACK or an ACK               | any          | stale     | dropped                         |

A node that echoes the nonce of a challenge in an ACK proves its life, and its SYN is taken then. So the first contact
of two lives takes one round trip more, and no later contact does.

Rules:
1. A recording cannot answer a nonce, since nonces are random and used once. So a recording of another life proves
   nothing, and a recording of the proved life repeats numbers.
2. A datagram without proof changes nothing. It is answered by at most one datagram, which is hardly longer than itself.
3. What waits for a proof is bounded in bytes and in time.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple

from cachetools import LRUCache

from .copies import Peer, ReplayWindow
from .gossip_settings import GossipSettings
from .wire import Kind, Message, Stamp

MAX_WAITING_BYTES = 1 << 20
"""Bound of the datagrams that wait for a proof."""

WAITING_OVERHEAD = 256


class Novelty(Enum):
    """Whether a datagram is new, as the table says. The word of each but `FRESH` is a counter's."""

    FRESH = "fresh"
    REPEATED = "repeated"
    CHALLENGE = "challenge"
    STALE = "stale"


class Waiting(NamedTuple):
    """A SYN that waits for its sender's proof: the nonce that proves it, when the challenge went, the bytes kept."""

    message: Message
    nonce: int
    at: float
    size: int


class Freshness:
    """One node's life, and what it knows of the lives of others. `seed` must differ in each run."""

    def __init__(self, node: str, settings: GossipSettings, seed: bytes) -> None:
        self._key = blake2b(seed, digest_size=32, key=node.encode()[:64], person=b"life").digest()
        self._size = settings.replay_window
        self._patience_s = settings.suspect_after_s
        self.life = self._number(0) % (2**32 - 1) + 1
        """This run of the node, 32 bits."""
        self._sent = 0
        self._nonces = 0
        self._waiting: LRUCache[tuple[str, int], Waiting] = LRUCache(MAX_WAITING_BYTES, attrgetter("size"))

    def stamp(self, life: int) -> Stamp:
        """Return the stamp of the next datagram, made for a receiver's `life`, 0 if that is not known."""
        self._sent += 1
        return Stamp(self.life, self._sent, life)

    def nonce(self) -> int:
        """Return a number that nobody else can know, 62 bits and not 0."""
        self._nonces += 1
        return self._number(self._nonces)

    def judge(self, peer: Peer | None, kind: Kind, message: Message, now: float) -> tuple[Novelty, Waiting | None]:
        """Judge an authentic datagram, and keep the life that an echo proves.

        A datagram that proves its life by a challenge's nonce comes with the SYN that waited for the proof.
        """
        if not self._size:
            if peer is not None:
                peer.life = message.life or peer.life
            return Novelty.FRESH, None
        if peer is not None and message.life == peer.life != 0 and message.to == self.life:
            return (Novelty.FRESH if peer.taken.take(message.sequence) else Novelty.REPEATED), None
        if not message.life or not message.sequence:
            return Novelty.STALE, None
        if peer is not None and kind is Kind.SYN_ACK and message.echo in peer.probes:
            self.prove(peer, message)
            return Novelty.FRESH, None
        waiting = self._waiting.get((message.sender, message.life))
        proves = kind is Kind.ACK and waiting is not None and message.echo == waiting.nonce
        if proves and waiting is not None and now - waiting.at <= self._patience_s:
            return Novelty.FRESH, waiting
        return (Novelty.CHALLENGE if kind is Kind.SYN else Novelty.STALE), None

    def contact_of(self, message: Message) -> str:
        """Return the contact in what waits for a proof of this life, "" if nothing does."""
        waiting = self._waiting.get((message.sender, message.life))
        return waiting.message.contact if waiting is not None else ""

    def waiting(self, message: Message) -> Message | None:
        """Return the SYN that waits for a proof of this message's life, None if none does."""
        waiting = self._waiting.get((message.sender, message.life))
        return waiting.message if waiting is not None else None

    def prove(self, peer: Peer, *messages: Message) -> None:
        """Note that the life of these messages is the peer's, and that their numbers are taken."""
        life = messages[-1].life
        self._waiting.pop((peer.node, life), None)
        if peer.life != life:
            peer.life, peer.taken = life, ReplayWindow(self._size)
        for message in messages:
            peer.taken.take(message.sequence)

    def challenge(self, message: Message, size: int, now: float) -> int:
        """Keep a SYN of `size` bytes until its sender's life is proved; return the nonce that proves it."""
        key = (message.sender, message.life)
        known = self._waiting.get(key)
        # One nonce for one life: else whoever plays back another SYN of that life would keep it from its proof.
        again = known is not None and now - known.at <= self._patience_s
        nonce = known.nonce if known is not None and again else self.nonce()
        kept = size + WAITING_OVERHEAD
        if kept <= MAX_WAITING_BYTES:
            self._waiting[key] = Waiting(message, nonce, now, kept)
        return nonce

    def _number(self, n: int) -> int:
        drawn = blake2b(n.to_bytes(8, "little"), digest_size=8, key=self._key).digest()
        return (int.from_bytes(drawn, "little") >> 2) + 1
