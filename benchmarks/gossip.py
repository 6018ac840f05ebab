#!/usr/bin/env python3
"""What replication costs and how fast it is: idle, busy, for a joiner, after a restart, and in memory.

    python benchmarks/gossip.py [--only idle,busy,joiner,memory] [--quick] [--json FILE]

*idle*: real processes, one node with one endpoint each, over UDP on loopback, default settings; CPU is user and system
time of the whole process. *busy* and *joiner*: the real `Gossip` objects on virtual time, over a network that delays
each datagram by 1 to 3 ms and loses a share of them. They have no index: 64 indexes of 64 sets would not fit here.
Streams stand for messages of 64 KiB, 1 MiB an answer.

Staleness of a replica is the age of the first published version that it lacks, sampled over all pairs. The ideal sends
each published step's codes once to each other node, without any frame, vector or repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import json
import multiprocessing
import platform
import random
import sys
import time
import tracemalloc
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from prefixroute import BlocksStored, Domain, EngineBatch, Node, NodeSettings
from prefixroute.aio import Driver, UdpTransport
from prefixroute.anchors import choose_stride, expected_anchors
from prefixroute.changes import Changes
from prefixroute.codec import encode_sorted
from prefixroute.digest import KEY_LIMIT, decode, encode_part
from prefixroute.gossip import Gossip
from prefixroute.replica import OwnedSet
from prefixroute.tempo import GossipSettings

BLOCK = 16
BLOCKS = 100_000
"""Blocks of an endpoint, if nothing else is said."""

REQUEST_ENDS = 3000
"""Requests that ended in those blocks: what anchors are chosen by."""

DOMAIN = Domain("bench", "bench", BLOCK, secret=b"bench")
STREAM = {"datagram_bytes": 65536, "burst_bytes": 1 << 20}
DATAGRAMS = {"datagram_bytes": 1200, "burst_bytes": 65536}
UDP_IP_BYTES = 28
DELAY_S = 0.002
SAMPLE_S = 0.1
GIVE_UP_S = 30.0


class Row(NamedTuple):
    """One figure and the bar that it must not exceed, if there is one."""

    what: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure is within its bar."""
        return self.bar is None or self.value <= self.bar


# --- idle: processes on loopback ---------------------------------------------------------------------------


class Idle(NamedTuple):
    """What one idle process used in the time measured."""

    seconds: float
    cpu_s: float
    counters: dict[str, int]


def idle_worker(pipe: Connection, number: int, blocks: int, settle_s: float, measure_s: float) -> None:
    """Be one node of an idle fleet: tell the port, take the peers' ports, settle, measure, stay until told to go."""
    asyncio.run(idle_node(pipe, number, blocks, settle_s, measure_s))


async def idle_node(pipe: Connection, number: int, blocks: int, settle_s: float, measure_s: float) -> None:
    """The node of `idle_worker`."""
    rng = random.Random(number)
    node = Node(f"node-{number}", DOMAIN, rng=rng, now=time.monotonic())
    endpoint = node.add_endpoint("0", url="http://127.0.0.1:8000", incarnation=time.time_ns(), now=time.monotonic())
    tokens = [rng.randrange(128_000) for _ in range(blocks * BLOCK)]
    node.apply(endpoint, EngineBatch((BlocksStored(tuple(range(blocks)), None, tokens, BLOCK),)), time.monotonic())
    transport = await UdpTransport.open()
    loop = asyncio.get_running_loop()
    pipe.send(transport.address[1])
    for peer, port in enumerate(await loop.run_in_executor(None, pipe.recv)):
        if peer != number:
            node.add_peer(f"node-{peer}", ("127.0.0.1", port), time.monotonic())
    async with Driver(node, transport) as driver:
        await asyncio.sleep(settle_s)
        held = sum(row.blocks for row in node.stats(driver.now()).endpoints)
        before, cpu, start = Counter(node.counters), time.process_time(), time.monotonic()
        await asyncio.sleep(measure_s)
        cpu, seconds = time.process_time() - cpu, time.monotonic() - start
        used = Counter(node.counters)
        used.subtract(before)
        pipe.send((held, Idle(seconds, cpu, dict(used))))
        # The others measure still.
        await loop.run_in_executor(None, pipe.recv)


def idle(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of an idle fleet."""
    context = multiprocessing.get_context("spawn")
    n, blocks, settle_s, measure_s = options.idle_nodes, options.idle_blocks, options.settle, options.measure
    workers: list[Any] = []
    pipes: list[Connection] = []
    try:
        for number in range(n):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=idle_worker, args=(theirs, number, blocks, settle_s, measure_s), daemon=True
            )
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        ports = [received(pipe, 60) for pipe in pipes]
        for pipe in pipes:
            pipe.send(ports)
        told = [received(pipe, settle_s + measure_s + 60) for pipe in pipes]
        for pipe in pipes:
            pipe.send("go")
        for worker in workers:
            worker.join(10)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join(10)
    if any(held != n * blocks for held, _ in told):
        raise RuntimeError(f"after {settle_s} s not every node held all {n * blocks} blocks: settle longer")
    used = [idle for _, idle in told]
    sent = [(u.counters["bytes_sent"] / u.seconds, u.counters["datagrams_sent"] / u.seconds) for u in used]
    name = f"idle, {n} processes, UDP"
    yield Row(f"{name}: payload sent per node", mean(b for b, _ in sent), "B/s", 1024)
    yield Row(f"{name}: with UDP and IP headers", mean(b + UDP_IP_BYTES * d for b, d in sent), "B/s")
    yield Row(f"{name}: datagrams sent per node", mean(d for _, d in sent), "1/s")
    yield Row(f"{name}: CPU per node, mean", 100 * mean(u.cpu_s / u.seconds for u in used), "% of a core", 0.5)
    yield Row(f"{name}: CPU per node, most", 100 * max(u.cpu_s / u.seconds for u in used), "% of a core")


def received(pipe: Connection, within_s: float) -> Any:
    """What a worker says next."""
    if not pipe.poll(within_s):
        raise RuntimeError(f"a process said nothing for {within_s} s")
    return pipe.recv()


# --- the simulated fleet -----------------------------------------------------------------------------------


class Fleet:
    """Gossips on virtual time, all peers of each other. `rate` blocks come and as many go at each node in a second."""

    def __init__(self, settings: GossipSettings, loss: float, seed: int, rate: float = 0.0) -> None:
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
        self._loss = loss
        self._rate = rate
        self._rng = random.Random(seed)
        self._keys = np.random.default_rng(seed)
        self._live: dict[str, deque[int]] = {}
        self._churned: dict[str, float] = {}
        self._events: list[tuple[float, int, str, bytes | None, str]] = []
        self._tick = 0
        self._due: dict[str, float] = {}

    def add(self, name: str, keys: int, incarnation: int = 1_700_000_000_000_000_000) -> None:
        """Let a node in, with an endpoint of random keys if any; or again, with nothing left of its former life."""
        quiet: Counter[str] = Counter()
        rng = random.Random(self._rng.random())
        start = self.now + self._rng.random() * self._settings.interval_s
        gossip = Gossip(name, DOMAIN, self._settings, rng, start, lambda _: None, quiet, lambda *_: None)
        for other in self.gossips.keys() - {name}:
            gossip.members.add_peer(other, other, self.now)
            self.gossips[other].members.add_peer(name, name, self.now)
            self._watch(other)
        self.gossips[name] = gossip
        if keys:
            gossip.members.join(f"{name}/0", incarnation, "http://127.0.0.1:8000", self.now)
            self._live[name] = deque(self._random(keys))
            self.owned(name).gather(Changes(set(self._live[name]), set()))
            self.published[name], self._churned[name] = [self.now], self.now
        gossip.tempo.next_at = start
        self._due[name] = float("inf")
        self._watch(name)

    def owned(self, name: str) -> OwnedSet:
        """A node's own set."""
        keys = self.gossips[name].copies[f"{name}/0"].keys
        assert isinstance(keys, OwnedSet)
        return keys

    def run(self, until: float) -> str:
        """Do what is next, if it is due by `until`; return the node that did it, "" when nothing was due."""
        while self._events and self._events[0][0] <= until:
            self.now, _, name, data, source = heapq.heappop(self._events)
            gossip = self.gossips[name]
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

    def run_until(self, until: float) -> None:
        """Do all that is due by `until`."""
        while self.run(until):
            pass

    def lag(self, name: str, owner: str) -> float:
        """The age of the first published version that a node's replica lacks, 0 if it lacks none."""
        copy = self.gossips[name].copies.get(f"{owner}/0")
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
            keys.gather(Changes(set(added), {live.popleft() for _ in range(n)}))
            live.extend(added)
            gossip.tempo.stir(self.now)
            self._churned[name] += n / self._rate

    def _random(self, n: int) -> list[int]:
        keys: list[int] = np.unique(self._keys.integers(0, KEY_LIMIT, n, np.uint64)).tolist()
        self._rng.shuffle(keys)
        return keys

    def _collect(self, name: str, gossip: Gossip) -> None:
        for address, data in gossip.take_outbox():
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
    ranks = change.base().ranks(change.removed).astype(np.uint64)
    return len(encode_sorted(change.added, KEY_LIMIT)) + len(encode_sorted(ranks, change.n_base))


# --- busy --------------------------------------------------------------------------------------------------


class Busy(NamedTuple):
    """A busy fleet to simulate."""

    nodes: int
    base: int
    loss: float
    seconds: float
    warm_s: float
    rate: float
    streams: bool


def busy(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of busy fleets, each simulated in a process of its own, as many at a time as there are cores."""
    runs: list[Busy] = []
    for streams, nodes in ((True, options.nodes), (False, options.datagram_nodes)):
        for loss in (0.0, 0.3):
            runs.append(Busy(nodes, options.base, loss, options.seconds, options.warm, options.rate, streams))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for rows in pool.map(busy_rows, runs):
            yield from rows


def busy_rows(run: Busy) -> list[Row]:
    """Simulate one fleet: staleness and bytes; then its first node is restarted."""
    # As many changes must be pending before the clock as with sets of `BLOCKS`.
    share = min(1.0, GossipSettings().publish_share * BLOCKS / run.base)
    settings = GossipSettings(publish_share=share, **(STREAM if run.streams else DATAGRAMS))
    fleet = Fleet(settings, run.loss, 1, run.rate)
    for i in range(run.nodes):
        fleet.add(f"node-{i}", run.base)
    fleet.run_until(run.warm_s)
    fleet.counting = True
    lags: list[float] = []
    while fleet.now < run.warm_s + run.seconds - SAMPLE_S / 2:
        fleet.run_until(fleet.now + SAMPLE_S)
        lags += [fleet.lag(name, owner) for name in fleet.gossips for owner in fleet.published if name != owner]
    lags.sort()
    fleet.counting = False
    name = f"busy, {run.nodes} nodes, {'streams' if run.streams else '1,200 B'}, {run.loss:.0%} loss"
    p99_bar, ratio_bar = {0.0: (0.3, 1.3), 0.3: (0.8, 1.8)}[run.loss] if run.streams else (None, None)
    kinds = ("vectors", "deltas", "snapshots")
    each = run.seconds * run.nodes
    total = sum(fleet.sent[kind] for kind in kinds)
    rows = [
        Row(f"{name}: staleness, mean", mean(lags), "s"),
        Row(f"{name}: staleness, p50", lags[len(lags) // 2], "s"),
        Row(f"{name}: staleness, p99", lags[len(lags) * 99 // 100], "s", p99_bar),
        Row(f"{name}: staleness, most", lags[-1], "s"),
        Row(f"{name}: bytes sent over the ideal", total / (fleet.ideal * (run.nodes - 1)), "ratio", ratio_bar),
        Row(f"{name}: sent per node", total / each / 1000, "kB/s"),
        *(Row(f"{name}: of it {kind}", fleet.sent[kind] / each / 1000, "kB/s") for kind in kinds),
        Row(f"{name}: messages sent per node", fleet.sent["messages"] / each, "1/s"),
    ]
    out, back = restart(fleet, run.base)
    rows.append(Row(f"{name}: owner restarted, until all have its new set", out, "rounds"))
    rows.append(Row(f"{name}: owner restarted, until it has all sets again", back, "rounds"))
    return rows


def restart(fleet: Fleet, base: int) -> tuple[float, float]:
    """Restart a node with another set; rounds until all others have it, and until it has had each other's set."""
    name = next(iter(fleet.gossips))
    start, life = fleet.now, fleet.gossips[name].copies[f"{name}/0"].incarnation + 1
    fleet.add(name, base, life)
    out = back = 0.0
    while not (out and back) and fleet.now < start + GIVE_UP_S:
        actor = fleet.run(start + GIVE_UP_S)
        if not out and all((c := g.copies[f"{name}/0"].keys).version > 1 and len(c) for g in others_of(fleet, name)):
            lives = {g.copies[f"{name}/0"].incarnation for g in others_of(fleet, name)}
            out = fleet.now - start if lives == {life} else 0.0
        if not back and actor == name:
            copies = fleet.gossips[name].copies
            held = sum(1 for copy in copies.values() if not copy.mine and copy.keys.version)
            back = fleet.now - start if held == len(fleet.published) - 1 else 0.0
    interval_s = GossipSettings().interval_s
    return (out or GIVE_UP_S) / interval_s, (back or GIVE_UP_S) / interval_s


def others_of(fleet: Fleet, name: str) -> list[Gossip]:
    """Every gossip but one."""
    return [gossip for other, gossip in fleet.gossips.items() if other != name]
