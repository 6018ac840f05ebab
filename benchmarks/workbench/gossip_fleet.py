"""Gossips on virtual time: the fleet that benchmarks/gossip.py measures.

Rules:
1. The gossips are the real ones, without nodes and indexes around them: 64 indexes of 64 sets would not fit here.
2. Each datagram takes 1 to 3 ms, and a share of them is lost.
3. The ideal sends each published step's codes to each other node once, without any frame, vector or repetition.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque

import numpy as np

from prefixroute import Domain
from prefixroute.events import Journal
from prefixroute.keys.keyset import Delta
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.gossip import Gossip
from prefixroute.replication.gossip_settings import GossipSettings
from prefixroute.replication.wire import KEY_LIMIT, decode, encode_part
from prefixroute.replication.writer_set import OwnedSet

DOMAIN = Domain("bench", "bench", 16, secret=b"bench")
DELAY_S = 0.002
GIVE_UP_S = 60.0
"""Nothing that is waited for takes so long."""


class Fleet:
    """Gossips on virtual time, all peers of each other.

    Nothing is lost and nothing changes until `retune` says so; then `rate` blocks come, and as many go, at each node
    in a second.
    """

    def __init__(self, settings: GossipSettings, seed: int) -> None:
        self.now = 0.0
        self.gossips: dict[str, Gossip] = {}
        self.published: dict[str, list[float]] = {}
        """When each version of a node's endpoint was published, the first at 0."""
        self.ideal = 0
        """Bytes of the codes of all steps published, once."""
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        """Bytes that were sent to each node, lost ones included."""
        self.counting = False
        self._settings = settings
        self._loss = 0.0
        self._rate = 0.0
        self._rng = random.Random(seed)
        self._keys = np.random.default_rng(seed)
        self._live: dict[str, deque[int]] = {}
        self._churned: dict[str, float] = {}
        self._events: list[tuple[float, int, str, bytes | None, str]] = []
        self._tick = 0
        self._due: dict[str, float] = {}

    def add(self, name: str, keys: int, incarnation: int = 1_700_000_000_000_000_000) -> None:
        """Let a node in, with an endpoint of random keys if any; or again, with nothing left of its former life."""
        rng = random.Random(self._rng.random())
        start = self.now + self._rng.random() * self._settings.interval_s
        gossip = Gossip(name, DOMAIN, self._settings, rng, start, Journal(), lambda *_: None)
        for other in self.gossips.keys() - {name}:
            gossip.peers.add(other, other, self.now)
            self.gossips[other].peers.add(name, name, self.now)
            self._watch(other)
        self.gossips[name] = gossip
        if keys:
            gossip.members.join(f"{name}/0", incarnation, "http://127.0.0.1:8000", self.now)
            self._live[name] = deque(self._random(keys))
            self.owned(name).gather(Delta(set(self._live[name]), set()))
            self.published[name], self._churned[name] = [self.now], self.now
        gossip.tempo.next_at = start
        self._due[name] = float("inf")
        self._watch(name)

    def remove(self, name: str) -> None:
        """Take a node out that owns nothing; what is under way to it is lost."""
        del self.gossips[name]
        for gossip in self.gossips.values():
            gossip.members.remove_peer(name)

    def retune(self, settings: GossipSettings, loss: float, rate: float = 0.0) -> None:
        """Go on with other settings, in every node, another loss, and another rate of change."""
        self._settings, self._loss, self._rate = settings, loss, rate
        for name, gossip in self.gossips.items():
            gossip.settings = gossip.outbox.settings = settings
            self._churned[name] = self.now

    def fill(self, nodes: int, keys: int) -> None:
        """Let nodes in and run until each has every other's set. Raises `RuntimeError` if that does not end."""
        for i in range(nodes):
            self.add(f"node-{i}", keys)
        give_up = self.now + GIVE_UP_S
        while not all(self.whole(name) and self.owned(name).version > 1 for name in self.gossips):
            self.run_until(self.now + self._settings.interval_s)
            if self.now > give_up:
                raise RuntimeError(f"the fleet is not whole after {GIVE_UP_S} s")

    def owned(self, name: str) -> OwnedSet:
        """A node's own set."""
        keys = self.gossips[name].members.copies[f"{name}/0"].keys
        assert isinstance(keys, OwnedSet)
        return keys

    def run(self, until: float) -> str:
        """Do what is next, if it is due by `until`; return the node that did it, "" when nothing was due."""
        while self._events and self._events[0][0] <= until:
            self.now, _, name, data, source = heapq.heappop(self._events)
            gossip = self.gossips.get(name)
            if gossip is None:
                continue
            if data is not None:
                gossip.receive(data, source, self.now)
            elif self.now == self._due[name]:
                self._due[name] = float("inf")
                self._exchange(name, gossip)
            else:
                continue
            self._collect(name, gossip)
            self._watch(name)
            return name
        self.now = until
        return ""

    def run_to(self, name: str, until: float) -> bool:
        """Do all up to the next thing that a node does; whether that was due by `until`."""
        while (actor := self.run(until)) not in (name, ""):
            pass
        return actor == name

    def run_until(self, until: float) -> None:
        """Do all that is due by `until`."""
        while self.run(until):
            pass

    def lag(self, name: str, owner: str) -> float:
        """The age of the first published version that a node's replica lacks, 0 if it lacks none."""
        copy = self.gossips[name].members.copies.get(f"{owner}/0")
        version = copy.keys.version if copy is not None else 0
        times = self.published[owner]
        return self.now - times[version] if version < len(times) else 0.0

    def whole(self, name: str) -> bool:
        """Whether a node has every other's newest set."""
        return all(self.lag(name, owner) == 0 for owner in self.published if owner != name)

    def _exchange(self, name: str, gossip: Gossip) -> None:
        if name in self.published:
            keys = self.owned(name)
            self._churn(name, gossip, keys)
            gossip.exchange(self.now)
            if keys.version > len(self.published[name]):
                self.published[name].append(self.now)
                if self.counting:
                    self.ideal += step_bytes(keys)
        else:
            gossip.exchange(self.now)

    def _churn(self, name: str, gossip: Gossip, keys: OwnedSet) -> None:
        n = int((self.now - self._churned[name]) * self._rate)
        if n:
            live, added = self._live[name], self._random(n)
            keys.gather(Delta(set(added), {live.popleft() for _ in range(n)}))
            live.extend(added)
            gossip.tempo.stir(self.now)
            self._churned[name] += n / self._rate

    def _random(self, n: int) -> list[int]:
        keys: list[int] = np.unique(self._keys.integers(0, KEY_LIMIT, n, np.uint64)).tolist()
        self._rng.shuffle(keys)
        return keys

    def _collect(self, name: str, gossip: Gossip) -> None:
        gossip.outbox.pack()
        for address, data in gossip.outbox.take():
            to = str(address)
            if self.counting:
                self.sent["messages"] += 1
                self.received[to] += len(data)
                updates = decode(data, DOMAIN.secret).message.updates
                deltas = sum(len(encode_part(update)) for update in updates if update.since)
                snapshots = sum(len(encode_part(update)) for update in updates if not update.since)
                self.sent.update(deltas=deltas, snapshots=snapshots, vectors=len(data) - deltas - snapshots)
            if self._rng.random() >= self._loss:
                at = self.now + DELAY_S * self._rng.uniform(0.5, 1.5)
                self._tick += 1
                heapq.heappush(self._events, (at, self._tick, to, data, name))

    def _watch(self, name: str) -> None:
        """Set a node's alarm, if it is due earlier than it was."""
        due = self.gossips[name].tempo.next_at
        if due < self._due[name]:
            self._due[name] = max(due, self.now)
            self._tick += 1
            heapq.heappush(self._events, (self._due[name], self._tick, name, None, ""))


def step_bytes(keys: OwnedSet) -> int:
    """What the codes of the last step of a set take."""
    change = keys.change(keys.version - 1, keys.version)
    assert change is not None and change.base is not None
    ranks = change.base().ranks(change.delta.removed).astype(np.uint64)
    return len(encode_sorted(change.delta.added, KEY_LIMIT)) + len(encode_sorted(ranks, change.n_base))
