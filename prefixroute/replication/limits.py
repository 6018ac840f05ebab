"""What others can make a node do, keep and tell: rates, answers, keys, endpoints and refusals, each with its formula.

A *round* is `interval_s` seconds, in which an honest node has one exchange with a peer and sends it two answers at
most. So one peer honestly sends 2 x `burst_bytes` a round at most, in 2 + 2 x burst_bytes / datagram_bytes datagrams.

| meter    | of whom                                                 | honest rates, times                |
|----------|---------------------------------------------------------|------------------------------------|
| source   | an address that a good datagram came from, or a peer's  | `excess` x `fan_out`, before a tag is checked |
| unproved | all other addresses together                            | `excess`, before a tag is checked  |
| peer     | a peer, whatever address its datagrams came from        | `excess`, after the tag            |
| work     | estimated processor time for a peer's updates and answers | `peer_work`, five seconds of it at once |
| answers  | answers to a peer; of nodes that are no peers yet, all together | `excess`                  |

Each meter is a token bucket that holds what comes in four rounds, or in a second if that is longer.

Rules:
1. What is beyond a limit is dropped as a busy network would drop it: gossip heals loss.
2. Only an address that a tag has proved gets a meter of its own, so nobody without the secret can push others out.
3. Refusals are counted all, and told `TOLD_AT_ONCE` one by one, then one a second, however many there are.
4. Of two nodes with one name either is told once in `MISMATCH_TOLD_S`.
5. A peer of another domain is told of by the field that differs, once in `MISMATCH_TOLD_S` for each source and field:
   a mismatch would otherwise be a cache that silently never hits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from math import inf
from typing import Literal

from cachetools import LRUCache

from ..events import DatagramRejected, DomainMismatch, Journal
from ..keys.domain import Domain
from ..keys.names import owner_of
from .gossip_settings import GossipSettings
from .wire import Message

MAX_SOURCES = 4096
"""Addresses with a meter of their own; those that were quiet for longest share one again."""

HELD_ROUNDS = 4
"""Rounds' worth of datagrams that a meter lets through at once: an honest node may have been paused."""

WORK_AT_ONCE_S = 5.0
"""Work that one peer may cause at once: the sets of a large fleet, after a partition."""

ENTRY_S, COPY_S, UPDATE_S, BYTE_S, HELD_S = 3e-6, 6e-7, 3e-5, 1.2e-7, 2e-9
"""Estimated seconds for an entry, an endpoint that it is compared with, an update, a byte of its keys, and a key of the
set that it changes: measured, and rounded up. No clock is read here, so that the same calls do the same."""

TOLD_AT_ONCE = 64
MISMATCH_TOLD_S = 60.0
MAX_MISMATCHES = 256
"""Mismatches (source, field), and names that are used twice, that are remembered."""


class Bucket:
    """A token bucket: `take` lets through `rate` a second in the mean, and `most` at once. O(1)."""

    __slots__ = ("_at", "_left", "most", "rate")

    def __init__(self, rate: float, most: float) -> None:
        self.rate = rate
        self.most = most
        self._left = most
        self._at = -inf

    def take(self, amount: float, now: float) -> bool:
        """Take `amount` at `now`, seconds of any clock; False, and nothing is taken, when there is not as much left."""
        if now > self._at:
            self._left = min(self.most, self._left + (now - self._at) * self.rate)
            self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True


def _bucket(rate: float, settings: GossipSettings) -> Bucket:
    return Bucket(rate, rate * max(1.0, HELD_ROUNDS * settings.interval_s))


def _answers(settings: GossipSettings) -> Bucket:
    return _bucket(2 * settings.excess / settings.interval_s, settings)


class Meter:
    """Datagrams and bytes of one sender; what has no room in either is refused."""

    __slots__ = ("_bytes", "_datagrams")

    def __init__(self, settings: GossipSettings, times: float) -> None:
        self._datagrams = _bucket(times * honest_datagrams_per_s(settings), settings)
        self._bytes = _bucket(times * honest_bytes_per_s(settings), settings)

    def take(self, size: int, now: float) -> bool:
        """Let a datagram of `size` bytes through, or not."""
        return self._datagrams.take(1, now) and self._bytes.take(size, now)


class Limits:
    """The meters of one node. Nothing here raises."""

    def __init__(self, settings: GossipSettings) -> None:
        self._settings = settings
        self._off = settings.excess == inf
        self._sources: LRUCache[Hashable, Meter] = LRUCache(MAX_SOURCES)
        self._unproved = Meter(settings, settings.excess)
        self.challenges = _answers(settings)
        """One bucket for the challenges to all nodes that are no peers yet."""

    def admits(self, source: Hashable, size: int, now: float) -> bool:
        """Whether a datagram of `size` bytes from `source` is looked at. O(1), before its tag is checked."""
        if self._off:
            return True
        return self._sources.get(source, self._unproved).take(size, now)

    def proved(self, source: Hashable) -> None:
        """Note that a good datagram came from `source`, or that it is a peer's address: it has a meter of its own."""
        if source not in self._sources and not self._off:
            self._sources[source] = Meter(self._settings, self._settings.excess * self._settings.fan_out)

    def of_peer(self) -> tuple[Meter, Bucket, Bucket]:
        """Return a peer's meters: of what it sends, of the answers that it gets, of the seconds of work for it."""
        settings = self._settings
        return Meter(settings, settings.excess), _answers(settings), Bucket(settings.peer_work, WORK_AT_ONCE_S)


class Holdings:
    """The keys and endpoints that a node keeps of others, counted by owner. O(1) a call."""

    def __init__(self, settings: GossipSettings) -> None:
        self._settings = settings
        self.total = 0
        """Keys of all endpoints, those of transfers under way included."""
        self._keys: dict[str, int] = {}
        self._of_owner: Counter[str] = Counter()
        self.endpoints: Counter[str] = Counter()
        """Endpoints by owner."""

    def fits(self, endpoint: str, n: int) -> bool:
        """Whether there is room for `n` keys of an endpoint, among those of its owner and among all."""
        settings, more = self._settings, n - self._keys.get(endpoint, 0)
        return more <= 0 or (
            self._of_owner[owner_of(endpoint)] + more <= settings.max_owner_keys
            and self.total + more <= settings.max_all_keys
        )

    def note(self, endpoint: str, n: int) -> None:
        """Note that `n` keys of an endpoint are kept now."""
        owner, more = owner_of(endpoint), n - self._keys.pop(endpoint, 0)
        if n:
            self._keys[endpoint] = n
        self.total += more
        self._of_owner[owner] += more
        if not self._of_owner[owner]:
            del self._of_owner[owner]

    def lost(self, endpoint: str) -> None:
        """Note that an endpoint is not kept any more."""
        self.note(endpoint, 0)
        owner = owner_of(endpoint)
        self.endpoints[owner] -= 1
        if self.endpoints[owner] <= 0:
            del self.endpoints[owner]

    def _check(self, expected: dict[str, int]) -> None:
        """Assert that these are the keys that are kept."""
        assert self._keys == {endpoint: n for endpoint, n in expected.items() if n}
        assert self.total == sum(expected.values()) == sum(self._of_owner.values())


class Refusals:
    """Counts and tells the refusals of one node. O(1) a call."""

    def __init__(self, domain: Domain, journal: Journal) -> None:
        self._domain = domain
        self._journal = journal
        self._pace = Bucket(1.0, TOLD_AT_ONCE)
        self._mismatches: LRUCache[tuple[Hashable, str], float] = LRUCache(MAX_MISMATCHES)
        """When each was last told."""

    def refuse(self, source: object, kind: str, reason: str, now: float) -> Literal[False]:
        """Count that something from `source`, an address or an endpoint, is of no use; return False."""
        self._journal.count("rejected", kind)
        if self._pace.take(1, now):
            self._journal.tell(DatagramRejected(source, kind, reason))
        return False

    def namesake(self, source: object, name: str, reason: str, now: float, kind: str = "namesake") -> bool:
        """Count that a name is used twice, and tell it once a minute for each name; return whether it was told."""
        self._journal.count("rejected", kind)
        told = self._mismatches.get((name, kind))
        if told is not None and now - told <= MISMATCH_TOLD_S:
            return False
        self._mismatches[name, kind] = now
        self._journal.tell(DatagramRejected(source, kind, reason))
        return True

    def foreign(self, source: Hashable, message: Message, now: float) -> Literal[False]:
        """Count a datagram of another domain, and tell which fields differ, as far as they are known; return False."""
        self._journal.count("rejected", "domain")
        theirs = message.domain or {}
        if not theirs:
            self._mismatch(source, message, "fingerprint", self._domain.fingerprint.hex(), "unknown", now)
        for field, ours in self._domain.fields().items():
            if theirs.get(field, ours) != ours:
                self._mismatch(source, message, field, ours, theirs[field], now)
        return False

    def _mismatch(self, source: Hashable, message: Message, field: str, ours: str, theirs: str, now: float) -> None:
        told = self._mismatches.get((source, field))
        if told is None or now - told > MISMATCH_TOLD_S:
            self._mismatches[source, field] = now
            self._journal.count("domain_mismatch", field)
            self._journal.tell(DomainMismatch(source, message.sender, field, ours, theirs))


def honest_bytes_per_s(settings: GossipSettings) -> float:
    """Return what a node with these settings sends to one of its peers at most, in bytes a second."""
    return 2 * settings.burst_bytes / settings.interval_s


def honest_datagrams_per_s(settings: GossipSettings) -> float:
    """Return the datagrams that a node with these settings sends to one of its peers at most, a second."""
    return (2 + 2 * settings.burst_bytes / settings.datagram_bytes) / settings.interval_s
