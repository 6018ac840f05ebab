"""What a node knows of the others: its peers, and its copy of every endpoint.

Rules:
1. Three pairs order what is said of a copy: (incarnation, version) its sets, (incarnation, heartbeat) its owner's
   words, and (incarnation, revision) its owner's loads.
2. `heard_at` is the moment of the owner's own last word, however many relays it came through.
3. Silence is judged by the rhythm in which words came, so that a slower pace is not taken for a death.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field
from math import inf
from typing import NamedTuple

from ..load import Advert, LoadReport
from .limits import Bucket, Limits, Meter
from .transfer import Assembly
from .wire import LAST_BEAT, MARK_MASK, LoadWire, VectorEntry, Want, load_from_wire, load_to_wire
from .writer_set import OwnedSet, WriterSet

MAX_PROBES = 8
"""Questions to one peer that may be answered yet; older ones are forgotten."""

MIN_RTT_S = 2e-5
"""A shorter round trip says that the clock stood still, or was read twice: one over loopback takes 100 us."""

_UNLOADED = Advert(LoadReport())
_UNLOADED_WIRE = load_to_wire(_UNLOADED)


@dataclass(slots=True)
class Rhythm:
    """How long silences between words are: their mean and mean deviation, smoothed (Jacobson, SIGCOMM 1988)."""

    _mean_s: float = 0.0
    _deviation_s: float = 0.0

    def note(self, silence_s: float) -> None:
        """Take the silence that a word has ended."""
        if not self._mean_s:
            self._mean_s, self._deviation_s = silence_s, silence_s / 2
            return
        error = silence_s - self._mean_s
        self._mean_s += error / 8
        self._deviation_s += (abs(error) - self._deviation_s) / 4

    def patience_s(self, least_s: float, most_s: float) -> float:
        """Return how long a silence may last: twice what is rare in this rhythm, within `least_s` and `most_s`."""
        return min(max(least_s, 2 * (self._mean_s + 4 * self._deviation_s)), most_s)


class ReplayWindow:
    """Which of the last `size` numbers were taken, so that a repeated one is told from a new one.

    O(size / 64) a number, 0.2 us at 4,096.
    """

    def __init__(self, size: int = 0) -> None:
        self._size, self._mask = size, (1 << size) - 1
        self._seen = self._top = 0

    def take(self, number: int) -> bool:
        """Take a number, from 1; False when it was taken already, or is too far back to tell."""
        ahead = number - self._top
        if ahead > 0:
            shifted = self._seen << ahead if ahead < self._size else 0
            self._seen, self._top = (shifted | 1) & self._mask, number
            return True
        # The number comes from the network: nothing is shifted by more than the window.
        bit = 1 << -ahead if -ahead < self._size else 0
        if not bit or self._seen & bit:
            return False
        self._seen |= bit
        return True


@dataclass(slots=True, eq=False)
class Peer:
    """Another node that this one talks to; `learnt` when gossip made it a peer, not the caller.

    `state` is ``new``, ``heard`` or ``suspected``. `rtt_s` is the smoothed round trip in seconds, None while none was
    measured. `same_domain` says that it was heard in this domain, so that the readable fields need not travel any more.
    """

    node: str
    address: Hashable
    heard_at: float
    limits: InitVar[Limits]
    learnt: bool = False
    rhythm: Rhythm = field(default_factory=Rhythm)
    same_domain: bool = False
    state: str = "new"
    rtt_s: float | None = None
    home: Hashable = field(init=False)
    """The address that the caller gave, or the first that was learnt: it is the peer's whenever the peer is there."""
    contact: str = ""
    """Where relays last said that it takes datagrams."""
    probes: dict[int, float] = field(default_factory=dict)
    """Nonces of the questions that it may answer yet, and when each was asked."""
    searched: dict[int, Hashable] = field(default_factory=dict)
    """Of those, the ones that went to other addresses than its own, and where."""
    unanswered: int = 0
    """Questions since it last answered one."""
    answered_at: float = -inf
    """When the latest question was asked that it has answered; `answered_life` is the life that did."""
    answered_life: int = 0
    life: int = 0
    """Its present run, as far as that is proved (`freshness`); 0 before."""
    taken: ReplayWindow = field(default_factory=ReplayWindow)
    """The numbers of that life's datagrams that were taken."""
    meter: Meter = field(init=False)
    answers: Bucket = field(init=False)
    work: Bucket = field(init=False)

    def __post_init__(self, limits: Limits) -> None:
        self.meter, self.answers, self.work = limits.of_peer()
        self.home = self.address

    def asked(self, nonce: int, now: float) -> None:
        """Note a question, so that its answer is timed."""
        if len(self.probes) >= MAX_PROBES:
            self.probes.pop(next(iter(self.probes)))
        self.probes[nonce] = now
        self.unanswered += 1

    def answered(self, echo: int, life: int) -> float | None:
        """Return when the question was asked that an answer of this life answers, None if there is no such question."""
        asked_at = self.probes.pop(echo, None)
        if asked_at is not None:
            self.unanswered = 0
            if echo not in self.searched and asked_at >= self.answered_at:
                self.answered_at, self.answered_life = asked_at, life
        return asked_at

    def timed(self, rtt_s: float) -> None:
        """Take one measured round trip. What no network and no clock could measure is none: 0, less, or no number."""
        if not MIN_RTT_S <= rtt_s < inf:
            if self.rtt_s is None and 0 <= rtt_s < MIN_RTT_S:
                self.rtt_s = MIN_RTT_S
            return
        # Queueing only adds to a round trip, so a shorter one counts more than a longer one.
        old = self.rtt_s
        self.rtt_s = rtt_s if old is None else old + (0.3 if rtt_s < old else 0.1) * (rtt_s - old)


class Left(NamedTuple):
    """An endpoint that has left: its last incarnation, and when its owner said so."""

    incarnation: int
    heard_at: float

    @property
    def beat(self) -> tuple[int, int]:
        """The owner's last word: no word of this incarnation follows it."""
        return (self.incarnation, LAST_BEAT)

    def entry(self, endpoint: str, now: float) -> VectorEntry:
        """Return what a vector says of the endpoint."""
        return VectorEntry(endpoint, *self.beat, age_ms=_age_ms(now - self.heard_at))


@dataclass(slots=True, eq=False)
class Copy:
    """One endpoint as this node knows it: its own (`mine`), or the replica of a peer's."""

    endpoint: str
    mine: bool
    incarnation: int
    heard_at: float
    url: str = ""
    contact: str = ""
    zone: str = ""
    """Its owner's label; "" while it is not known."""
    keys: WriterSet = field(init=False)
    heartbeat: int = 0
    rhythm: Rhythm = field(default_factory=Rhythm)
    advert: Advert = _UNLOADED
    load_wire: LoadWire = _UNLOADED_WIRE
    revision: int = 0
    load_at: float = field(init=False)
    """When the load was last known to be the owner's."""
    assembly: Assembly | None = None
    suspected: bool = False

    def __post_init__(self) -> None:
        self.keys = OwnedSet() if self.mine else WriterSet()
        self.load_at = self.heard_at

    @property
    def held(self) -> tuple[int, int]:
        """(incarnation, version); version 0 while nothing was received."""
        return (self.incarnation, self.keys.version)

    @property
    def beat(self) -> tuple[int, int]:
        """(incarnation, heartbeat): orders the owner's words."""
        return (self.incarnation, self.heartbeat)

    @property
    def loaded(self) -> tuple[int, int]:
        """(incarnation, revision): orders the owner's loads."""
        return (self.incarnation, self.revision)

    @property
    def mark(self) -> int:
        """The low bits of the checksum: copies with equal pairs and different marks are not of one set."""
        return self.keys.checksum & MARK_MASK

    def age_s(self, now: float) -> float:
        """Seconds since the owner's own last word; 0 for an own endpoint."""
        return 0.0 if self.mine else max(0.0, now - self.heard_at)

    def take_load(self, wire: LoadWire, revision: int) -> None:
        """Take a later load."""
        self.load_wire, self.revision, self.advert = wire, revision, load_from_wire(wire)

    def renew_load(self) -> bool:
        """Step the revision of an own load if the advert has changed since the last step; return whether it has."""
        wire = load_to_wire(self.advert)
        if wire == self.load_wire:
            return False
        self.load_wire = wire
        self.revision += 1
        return True

    def entry(self, now: float, with_load: bool) -> VectorEntry:
        """Return what a vector says of this copy."""
        a = self.assembly
        want = Want(a.incarnation, a.since, a.version, a.missing()) if a is not None else None
        load, age_ms = self.load_wire if with_load else None, _age_ms(self.age_s(now))
        return VectorEntry(self.endpoint, *self.beat, self.keys.version, self.mark, age_ms, self.revision, load, want)


def _age_ms(age_s: float) -> int:
    return min(max(int(age_s * 1000), 0), 2**32 - 1)
