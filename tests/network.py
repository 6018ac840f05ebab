"""Real nodes over a network in virtual time, for the tests of replication.

Rules:
1. Everything random comes from one seed; time is what the queue says. A failure is repeated by its seed.
2. After every delivery, at the node that took it: each replica equals what its owner held at that incarnation and
   version, and the pair never falls but for a discard or a loss of the replica, which an event must tell.
3. Every datagram fits `datagram_bytes`, and the datagrams that one delivery causes fit `burst_bytes`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations
from typing import NamedTuple

import numpy as np

from prefixroute import BlocksCleared, BlocksRemoved, BlocksStored, Domain, EngineBatch, Node, NodeEvent, NodeSettings
from prefixroute.digest import Keys
from prefixroute.events import ReplicaChanged
from prefixroute.gossip import Copy, Gossip

DOMAIN = Domain("model", "tokenizer", secret=b"secret")
BLOCK = DOMAIN.block_size


@dataclass(frozen=True)
class Faults:
    """What the network does to a datagram: `late` is the share that takes up to `late_s` instead of `delay_s`."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.0005, 0.002)
    late: float = 0.0
    late_s: float = 3.0


CALM = Faults()
ROUGH = Faults(loss=0.3, duplicate=0.1, delay_s=(0.001, 0.3), late=0.05)


class Sighting(NamedTuple):
    """What a node held of an endpoint when it was last looked at."""

    held: tuple[int, int]
    keys: Keys


class Life:
    """What an owner held at each version of one life, under the incarnations that it went through."""

    def __init__(self) -> None:
        self.incarnations: set[int] = set()
        self.sets: dict[int, Keys] = {}

    def held(self, incarnation: int, version: int, keys: Keys) -> bool:
        """Whether these are the keys at a pair; a life that reuses an incarnation shares its pairs with another."""
        return incarnation in self.incarnations and version in self.sets and np.array_equal(self.sets[version], keys)


class Engine:
    """Stands in for one endpoint's engine: stores and evicts chains of blocks of random tokens."""

    def __init__(self, node: Node, endpoint: str, rng: random.Random) -> None:
        self.node = node
        self.endpoint = endpoint
        self._rng = rng
        self._handle = 0
        self.chains: list[tuple[list[int], tuple[int, ...]]] = []

    def store(self, blocks: int, now: float, tokens: list[int] | None = None) -> list[int]:
        """Cache `blocks` blocks from the root; return their tokens."""
        tokens = tokens or [self._rng.randrange(32000) for _ in range(blocks * BLOCK)]
        handles = tuple(range(self._handle, self._handle + blocks))
        self._handle += blocks
        self.chains.append((tokens, handles))
        self._apply(BlocksStored(handles, None, tokens, BLOCK), now)
        return tokens

    def evict(self, now: float, share: float = 1.0) -> None:
        """Drop the deeper `share` of the oldest chain."""
        if not self.chains:
            return
        tokens, handles = self.chains.pop(0)
        keep = int(len(handles) * (1 - share))
        self._apply(BlocksRemoved(handles[keep:]), now)
        if keep:
            self.chains.append((tokens[: keep * BLOCK], handles[:keep]))

    def clear(self, now: float) -> None:
        """Drop everything."""
        self.chains.clear()
        self._apply(BlocksCleared(), now)

    def _apply(self, event: BlocksStored | BlocksRemoved | BlocksCleared, now: float) -> None:
        self.node.apply(self.endpoint, EngineBatch((event,)), now)


class Network:
    """Nodes, their engines, and the datagrams under way."""

    def __init__(self, seed: int, faults: Faults = CALM, settings: NodeSettings | None = None) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.settings = settings or NodeSettings()
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, Engine] = {}
        self.told: dict[str, list[NodeEvent]] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.blocked: set[frozenset[str]] = set()
        self.paused: set[str] = set()
        self.deliveries = 0
        self._queue: list[tuple[float, int, str, bytes, str]] = []
        self._buffered: list[tuple[str, bytes, str]] = []
        self._n = 0
        self._lives: dict[str, list[Life]] = {}
        self._seen: dict[tuple[str, str], Sighting] = {}

    # --- nodes ---------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        incarnation: int = 1,
        endpoints: int = 1,
        domain: Domain = DOMAIN,
        settings: NodeSettings | None = None,
        peers: Iterable[str] | None = None,
    ) -> Node:
        """Start a node, or start it anew; it and all others (or `peers`) become peers of each other."""
        rng = random.Random(self.rng.random())
        node = Node(name, domain, rng=rng, now=self.now, settings=settings or self.settings)
        for i in range(endpoints):
            endpoint = node.add_endpoint(str(i), url=f"http://{name}:{i}", incarnation=incarnation, now=self.now)
            self.engines[endpoint] = Engine(node, endpoint, rng)
            self._lives.setdefault(endpoint, []).append(Life())
        for other in list(self.nodes) if peers is None else peers:
            if other != name:
                node.add_peer(other, other, self.now)
                if other in self.nodes:
                    self.nodes[other].add_peer(name, name, self.now)
        self._forget_sightings(name)
        self.nodes[name] = node
        self.told.setdefault(name, [])
        return node

    def stop(self, name: str) -> None:
        """End a node without a word."""
        del self.nodes[name]
        self._forget_sightings(name)

    def block(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Let nothing through between these pairs, from now on and of what is under way."""
        self.blocked |= {frozenset(pair) for pair in pairs}

    def split(self, *groups: Iterable[str]) -> None:
        """Let nothing through between the groups."""
        for one, other in combinations([list(group) for group in groups], 2):
            self.block((a, b) for a in one for b in other)

    def heal(self) -> None:
        """Let everything through again."""
        self.blocked.clear()

    # --- time ----------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        until = self.now + seconds
        # Who was paused finds in the socket's buffer what came meanwhile.
        buffered, self._buffered = self._buffered, []
        for letter in buffered:
            self._push(self.now, *letter)
        while True:
            timers = [(node.next_timer(), name) for name, node in self.nodes.items() if name not in self.paused]
            due, name = min(timers, default=(until + 1, ""))
            if self._queue and self._queue[0][0] <= due:
                due = self._queue[0][0]
                if due > until:
                    break
                self.now = max(self.now, due)
                self._deliver(*heappop(self._queue)[2:])
            elif due > until:
                break
            else:
                self.now = max(self.now, due)
                self.nodes[name].handle_timer(self.now)
                self._after(name)
        self.now = until

    def inject(self, to: str, data: bytes, source: str) -> None:
        """Deliver bytes at once."""
        self._deliver(to, data, source)

    def _deliver(self, to: str, data: bytes, source: str) -> None:
        if to not in self.nodes or frozenset((to, source)) in self.blocked:
            return
        if to in self.paused:
            self._buffered.append((to, data, source))
            return
        self.deliveries += 1
        self.nodes[to].receive_datagram(data, source, self.now)
        self._after(to)

    def _after(self, name: str) -> None:
        """Send what the node has to send, and check what it holds."""
        node = self.nodes[name]
        out = node.datagrams_to_send(self.now)
        answers: Counter[object] = Counter()
        for address, data in out:
            assert len(data) <= node.settings.datagram_bytes
            answers[address] += len(data)
            self.sent_bytes[name] += len(data)
            self._carry(name, str(address), data)
        assert max(answers.values(), default=0) <= node.settings.burst_bytes
        self._check(name, node)

    def _carry(self, source: str, to: str, data: bytes) -> None:
        rng, faults = self.rng, self.faults
        if frozenset((to, source)) in self.blocked:
            return
        for _ in range(2 if rng.random() < faults.duplicate else 1):
            if rng.random() >= faults.loss:
                delay = rng.uniform(0, faults.late_s) if rng.random() < faults.late else rng.uniform(*faults.delay_s)
                self._push(self.now + delay, to, data, source)

    def _push(self, at: float, to: str, data: bytes, source: str) -> None:
        self._n += 1
        heappush(self._queue, (at, self._n, to, data, source))

    # --- what must hold ------------------------------------------------------------------------------------

    def _check(self, name: str, node: Node) -> None:
        events = node.events()
        self.told[name] += events
        for event in events:
            if isinstance(event, ReplicaChanged) and event.state in ("discarded", "forgotten"):
                self._seen.pop((name, event.endpoint), None)
        for endpoint, copy in copies(node).items():
            last = self._seen.get((name, endpoint))
            if last is not None and last.keys is copy.keys.keys and last.held == copy.held:
                continue
            self.overlook(name, endpoint)
            assert last is None or copy.held > last.held, f"{name}: {endpoint} from {last.held} to {copy.held}"
            if copy.mine:
                life = self._lives[endpoint][-1]
                life.incarnations.add(copy.incarnation)
                life.sets[copy.keys.version] = copy.keys.keys
            elif copy.keys.version:
                assert any(life.held(*copy.held, copy.keys.keys) for life in self._lives[endpoint]), (
                    f"{name}: {endpoint} at {copy.held} is not what its owner held then"
                )

    def overlook(self, name: str, endpoint: str) -> None:
        """Take what a node holds of an endpoint as seen, right or wrong."""
        copy = copies(self.nodes[name])[endpoint]
        self._seen[name, endpoint] = Sighting(copy.held, copy.keys.keys)

    def _forget_sightings(self, name: str) -> None:
        for seen in [seen for seen in self._seen if seen[0] == name]:
            del self._seen[seen]

    def check_all(self) -> None:
        """Run every node's own O(n) check."""
        for node in self.nodes.values():
            node._check()

    def lagging(self) -> list[tuple[str, str]]:
        """(node, endpoint) whose replica is not the live owner's present set."""
        found = []
        for owner in self.nodes.values():
            for endpoint, own in copies(owner).items():
                if not own.mine:
                    continue
                for name, node in self.nodes.items():
                    held = copies(node).get(endpoint)
                    if held is None or held.held != own.held or not np.array_equal(held.keys.keys, own.keys.keys):
                        found.append((name, endpoint))
        return found

    def settle(self, within_s: float) -> float:
        """Run until all replicas are their owners' sets; return the seconds it took, fail after `within_s`."""
        start = self.now
        # An owner publishes at its next round what its engine did.
        self.run(self.settings.interval_s)
        while True:
            self.run(0.05)
            if not self.lagging():
                return self.now - start
            assert self.now - start < within_s, f"after {within_s} s: {self.lagging()}"


def gossip(node: Node) -> Gossip:
    """The replication state of a node."""
    return node._gossip


def copies(node: Node) -> dict[str, Copy]:
    """What a node holds of every endpoint."""
    return node._gossip.copies


def fleet(
    n: int, *, seed: int = 1, faults: Faults = CALM, blocks: int = 20, incarnation: int = 1, **settings: float
) -> Network:
    """A full mesh of `n` nodes n0, n1, ... that hold `blocks` blocks each and have settled."""
    net = Network(seed, faults, NodeSettings(**settings))  # type: ignore[arg-type]
    for i in range(n):
        net.add(f"n{i}", incarnation=incarnation)
    for engine in net.engines.values():
        engine.store(blocks, net.now)
    net.settle(10)
    return net


def pair() -> tuple[Node, Node]:
    """Two nodes that know of each other and have not spoken; "a" has an endpoint, "b" has none."""
    a, b = (Node(name, DOMAIN, rng=random.Random(1), now=0.0) for name in "ab")
    a.add_endpoint("0", url="http://a", incarnation=1, now=0.0)
    a.add_peer("b", "at b", 0.0)
    b.add_peer("a", "at a", 0.0)
    return a, b


def only(node: Node, now: float) -> bytes:
    """The one datagram that a node has to send."""
    (datagram,) = node.datagrams_to_send(now)
    return datagram.data
