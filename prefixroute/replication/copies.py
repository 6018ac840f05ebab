"""What a node knows of the others: its peers, and its copy of every endpoint.

Rules:
1. A copy's pair (incarnation, version) orders its sets, its pair (incarnation, heartbeat) orders its owner's words, and
   its pair (incarnation, revision) its owner's loads.
2. `heard_at` is the moment of the owner's own last word, however many relays it came through.
3. Silence is judged by the rhythm in which words came, so that a slower pace is no death.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from ..load import Advert, LoadReport
from .assembly import Assembly
from .limits import Limits
from .replay_window import ReplayWindow
from .wire import LAST_BEAT, MARK_MASK, LoadWire, VectorEntry, Want, load_from_wire, load_to_wire
from .writer_set import OwnedSet, WriterSet


class Rhythm:
    """How long silences between words are: their mean and mean deviation, smoothed (Jacobson, SIGCOMM 1988)."""

    __slots__ = ("_deviation_s", "_mean_s")

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0

    def note(self, silence_s: float) -> None:
        """Take the silence that a word has ended."""
        if not self._mean_s:
            self._mean_s, self._deviation_s = silence_s, silence_s / 2
            return
        error = silence_s - self._mean_s
        self._mean_s += error / 8
        self._deviation_s += (abs(error) - self._deviation_s) / 4

    def patience_s(self, least_s: float, most_s: float) -> float:
        """Return how long a silence may be: twice what is rare in this rhythm, at least `least_s`, at most `most_s`."""
        return min(max(least_s, 2 * (self._mean_s + 4 * self._deviation_s)), most_s)


class Peer:
    """Another node that this one talks to; `learnt` when gossip made it one, not the caller."""

    __slots__ = (
        "address",
        "answers",
        "heard_at",
        "learnt",
        "life",
        "meter",
        "node",
        "probes",
        "rhythm",
        "rtt_s",
        "same_domain",
        "state",
        "window",
        "work",
    )

    def __init__(self, node: str, address: Hashable, now: float, limits: Limits, learnt: bool = False) -> None:
        self.node = node
        self.address = address
        self.learnt = learnt
        self.heard_at = now
        self.rhythm = Rhythm()
        self.same_domain = False
        self.state = "new"
        self.rtt_s: float | None = None
        self.probes: dict[int, float] = {}
        self.life = 0
        """Its present run, as far as that is proved."""
        self.window: ReplayWindow | None = None
        self.meter = limits.of_peer()
        self.answers = limits.of_answers()
        self.work = limits.of_work()


class Left(NamedTuple):
    """An endpoint that has left: its last incarnation, and when its owner said so."""

    incarnation: int
    heard_at: float

    @property
    def beat(self) -> tuple[int, int]:
        """The owner's last word; none of this incarnation follows it."""
        return (self.incarnation, LAST_BEAT)

    def entry(self, endpoint: str, now: float) -> VectorEntry:
        """Return what a vector says of it."""
        return VectorEntry(endpoint, *self.beat, age_ms=_age_ms(now - self.heard_at))


class Copy:
    """One endpoint as this node knows it: its own (`mine`), or the replica of a peer's."""

    __slots__ = (
        "advert",
        "assembly",
        "contact",
        "endpoint",
        "heard_at",
        "heartbeat",
        "incarnation",
        "keys",
        "load_at",
        "load_wire",
        "mine",
        "revision",
        "rhythm",
        "suspected",
        "url",
        "zone",
    )

    def __init__(
        self,
        endpoint: str,
        mine: bool,
        incarnation: int,
        now: float,
        url: str = "",
        contact: str = "",
        zone: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.mine = mine
        self.incarnation = incarnation
        self.keys: WriterSet = OwnedSet() if mine else WriterSet()
        self.heartbeat = 0
        self.heard_at = now
        self.rhythm = Rhythm()
        self.advert = Advert(LoadReport())
        self.load_wire = load_to_wire(self.advert)
        self.revision = 0
        self.load_at = now
        """When the load that is held was last known to be the owner's."""
        self.url = url
        self.contact = contact
        self.zone = zone
        """Its owner's label; "" while it is not known."""
        self.assembly: Assembly | None = None
        self.suspected = False

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
        """The low bits of the checksum: equal pairs with different marks are no copies of one set."""
        return self.keys.checksum & MARK_MASK

    def age_s(self, now: float) -> float:
        """Seconds since the owner's own last word; 0 for one's own."""
        return 0.0 if self.mine else max(0.0, now - self.heard_at)

    def take_load(self, wire: LoadWire, revision: int) -> None:
        """Hold a later load."""
        self.load_wire, self.revision, self.advert = wire, revision, load_from_wire(wire)

    def renew_load(self) -> bool:
        """Step an own load's revision if the advert differs from what was last told; return whether it did."""
        wire = load_to_wire(self.advert)
        if wire == self.load_wire:
            return False
        self.load_wire = wire
        self.revision += 1
        return True

    def entry(self, now: float, with_load: bool) -> VectorEntry:
        """Return what a vector says of it."""
        a = self.assembly
        want = Want(a.incarnation, a.since, a.version, a.missing()) if a is not None else None
        return VectorEntry(
            self.endpoint,
            *self.beat,
            self.keys.version,
            self.mark,
            _age_ms(self.age_s(now)),
            self.revision,
            self.load_wire if with_load else None,
            want,
        )


def _age_ms(age_s: float) -> int:
    return min(max(int(age_s * 1000), 0), 2**32 - 1)
