#!/usr/bin/env python3
"""What replication costs and how fast it is: idle, busy, for a joiner, after a restart, and in memory.

    python benchmarks/gossip.py [--only idle,busy,joiner,memory] [--quick] [--json FILE]

*idle*: real processes, one node with one endpoint each, over UDP on loopback, default settings; CPU is user and system
time of the whole process. *busy* and *joiner*: the real `Gossip` objects on virtual time, over a network that delays
each datagram by 1 to 3 ms and loses a share of them. They have no index: 64 indexes of 64 sets would not fit here.
Streams stand for messages of 64 KiB, 1 MiB an answer.

Busy sets have 20,000 keys, so that 64 copies of 64 sets fit; `publish_share` is raised by as much as they are smaller
than 100,000, so that the same number of changes is published before `publish_within_s` is over: the clock decides.
Staleness of a replica is the age of the first published version that it lacks, sampled over all pairs. The ideal sends
each published step's codes once to each other node, without any frame, vector or repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import sys
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import mean, median
from typing import Any, NamedTuple

from workbench.bars import Row, chosen, json_option, publish
from workbench.gossip_fleet import DOMAIN, GIVE_UP_S, Fleet

from prefixroute import BlocksStored, EngineBatch, Node, NodeSettings
from prefixroute.aio import Driver, UdpTransport
from prefixroute.endpoint.anchors import choose_stride, expected_anchors
from prefixroute.events import Journal
from prefixroute.keys.keyset import Delta
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.gossip import Gossip
from prefixroute.replication.gossip_settings import GossipSettings
from prefixroute.replication.wire import KEY_LIMIT
from prefixroute.replication.writer_set import OwnedSet

BLOCK = 16
BLOCKS = 100_000
"""Blocks of an endpoint, if nothing else is said."""

REQUEST_ENDS = 3000
"""Requests that ended in those blocks: what anchors are chosen by."""

STREAMS = GossipSettings(datagram_bytes=65536, burst_bytes=1 << 20)
DATAGRAMS = GossipSettings()
UDP_IP_BYTES = 28
SAMPLE_S = 0.1
BUSY_NODES = 64
BUSY_BARS = {0.0: (0.3, 1.3), 0.3: (0.8, 1.8)}
"""By loss, for so many nodes on streams: p99 of staleness in seconds, and bytes over the ideal."""

RESTART_ROUNDS = 50
"""Rounds after which a restarted node is no longer waited for."""


# --- idle: processes on loopback ---------------------------------------------------------------------------


class Idle(NamedTuple):
    """What one idle process used in the time measured."""

    seconds: float
    cpu_s: float
    counters: dict[str, int]


def idle_worker(pipe: Connection, number: int, blocks: int, settle_s: float, measure_s: float) -> None:
    """Be one node of an idle fleet: tell the port, take the peers' ports, settle, measure, stay until told to go."""
    try:
        asyncio.run(idle_node(pipe, number, blocks, settle_s, measure_s))
    except (EOFError, BrokenPipeError):
        # The benchmark has stopped.
        return


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
    ports = await loop.run_in_executor(None, pipe.recv)
    for peer, port in enumerate(ports):
        if peer != number:
            node.add_peer(f"node-{peer}", ("127.0.0.1", port), time.monotonic())
    async with Driver(node, transport) as driver:
        while sum(row.blocks for row in node.stats(driver.now()).endpoints) < len(ports) * blocks:
            await asyncio.sleep(0.05)
        await asyncio.sleep(settle_s)
        before, cpu, start = Counter(node.counters), time.process_time(), time.monotonic()
        await asyncio.sleep(measure_s)
        cpu, seconds = time.process_time() - cpu, time.monotonic() - start
        used = Counter(node.counters)
        used.subtract(before)
        pipe.send(Idle(seconds, cpu, dict(used)))
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
        used = [received(pipe, settle_s + measure_s + 60) for pipe in pipes]
        for pipe in pipes:
            pipe.send("go")
        for worker in workers:
            worker.join(10)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join(10)
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
    runs = [
        Busy(nodes, options.base, loss, seconds, options.warm, options.rate, streams)
        for streams, nodes, seconds in (
            (True, options.nodes, options.seconds),
            (False, options.datagram_nodes, options.datagram_seconds),
        )
        for loss in BUSY_BARS
    ]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for rows in pool.map(busy_rows, runs):
            yield from rows


def busy_rows(run: Busy) -> list[Row]:
    """Simulate one fleet: staleness and bytes; then its first node is restarted."""
    # As many changes must be pending before the clock as with sets of `BLOCKS`.
    share = min(1.0, GossipSettings().publish_share * BLOCKS / run.base)
    settings = replace(STREAMS if run.streams else DATAGRAMS, publish_share=share)
    fleet = Fleet(replace(STREAMS, publish_share=share), 1)
    # Over clean streams: how a fleet fills is what the joiners tell.
    fleet.fill(run.nodes, run.base)
    fleet.retune(settings, run.loss, run.rate)
    fleet.run_until(fleet.now + run.warm_s)
    fleet.counting = True
    lags: list[float] = []
    for _ in range(round(run.seconds / SAMPLE_S)):
        fleet.run_until(fleet.now + SAMPLE_S)
        lags += [fleet.lag(name, owner) for name in fleet.gossips for owner in fleet.published if name != owner]
    late = sorted(lags[-len(lags) // 4 :])
    lags.sort()
    fleet.counting = False
    name = f"busy, {run.nodes} nodes, {'streams' if run.streams else '1,200 B'}, {run.loss:.0%} loss"
    p99_bar, ratio_bar = BUSY_BARS[run.loss] if run.streams and run.nodes == BUSY_NODES else (None, None)
    kinds = ("vectors", "deltas", "snapshots")
    each = run.seconds * run.nodes
    total = sum(fleet.sent[kind] for kind in kinds)
    rows = [
        Row(f"{name}: staleness, mean", mean(lags), "s"),
        Row(f"{name}: staleness, p50", lags[len(lags) // 2], "s"),
        Row(f"{name}: staleness, p99", lags[len(lags) * 99 // 100], "s", p99_bar),
        Row(f"{name}: staleness, most", lags[-1], "s"),
        Row(f"{name}: staleness, of the last quarter p99", late[len(late) * 99 // 100], "s"),
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
    """Restart a node with another set; rounds until all others have it, and until it has had each other's set.

    What takes longer than `RESTART_ROUNDS` is told as that.
    """
    interval_s = GossipSettings().interval_s
    name = next(iter(fleet.gossips))
    start, life = fleet.now, fleet.gossips[name].members.copies[f"{name}/0"].incarnation + 1
    end = start + RESTART_ROUNDS * interval_s
    fleet.add(name, base, life)
    lacking = fleet.gossips.keys() - {name}
    out = back = 0.0
    while not (out and back) and (actor := fleet.run(end)):
        if actor in lacking:
            copy = fleet.gossips[actor].members.copies[f"{name}/0"]
            if copy.incarnation == life and len(copy.keys):
                lacking.remove(actor)
                out = 0.0 if lacking else fleet.now - start
        elif actor == name and not back:
            held = sum(1 for copy in fleet.gossips[name].members.copies.values() if not copy.mine and copy.keys.version)
            back = fleet.now - start if held == len(fleet.published) - 1 else 0.0
    return (out or end - start) / interval_s, (back or end - start) / interval_s


# --- a joiner ----------------------------------------------------------------------------------------------


def anchor_keys(blocks: int) -> int:
    """How many keys a node of default settings publishes of so many blocks of chat."""
    ends = REQUEST_ENDS * blocks // BLOCKS
    return round(expected_anchors(blocks, ends, choose_stride(blocks, ends, NodeSettings().digest_bytes)))


def joiner(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of nodes that join a quiet fleet one after another, each gone before the next one comes."""
    cases = [(options.keys, "every block"), (anchor_keys(options.keys), "default anchors")]
    for keys, published in cases:
        for frame, streams, loss in (("streams", True, 0.0), ("1,200 B", False, 0.0), ("1,200 B", False, 0.3)):
            rounds, ratio = join(keys, streams, loss, options.holders, options.joiners)
            bar = 3 if streams and published == "every block" else None
            name = f"joiner of {options.holders} x {options.keys} blocks, {published}, {frame}, {loss:.0%} loss"
            yield Row(f"{name}: whole, median", median(rounds), "rounds")
            yield Row(f"{name}: whole, most", max(rounds), "rounds", bar)
            yield Row(f"{name}: bytes sent to it over the ideal", mean(ratio), "ratio")


def join(keys: int, streams: bool, loss: float, holders: int, joiners: int) -> tuple[list[float], list[float]]:
    """Rounds until each joiner is whole, and bytes sent to it over those of the snapshots' codes."""
    settings = STREAMS if streams else DATAGRAMS
    fleet = Fleet(STREAMS, 1)
    fleet.fill(holders, keys)
    fleet.retune(settings, loss)
    ideal = sum(len(encode_sorted(fleet.owned(name).keys, KEY_LIMIT)) for name in fleet.published)
    rounds: list[float] = []
    ratio: list[float] = []
    for i in range(joiners):
        fleet.run_until(fleet.now + 5)
        name, start = f"joiner-{i}", fleet.now
        fleet.add(name, 0)
        fleet.counting = True
        while not fleet.whole(name):
            if not fleet.run_to(name, start + GIVE_UP_S):
                raise RuntimeError(f"{name} is not whole after {GIVE_UP_S} s")
        rounds.append((fleet.now - start) / settings.interval_s)
        # What is under way to it counts as well.
        ratio.append(fleet.received[name] / ideal)
        fleet.counting = False
        fleet.remove(name)
    return rounds, ratio


# --- memory ------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of what one peer's endpoint takes at a node, its part of the merged index included."""
    for keys, published in ((options.keys, "every block"), (anchor_keys(options.keys), "default anchors")):
        changes = options.changes * keys // options.keys
        idle_bytes, early, late = replica_bytes(keys, changes)
        name = f"memory per peer endpoint, {options.keys} blocks, {published}"
        yield Row(f"{name}: idle", idle_bytes / 1e6, "MB")
        yield Row(f"{name}: idle, per key of {keys}", idle_bytes / keys, "B")
        yield Row(f"{name}: busy, after a quarter of {changes} changes", early / 1e6, "MB")
        yield Row(f"{name}: busy, after all of them", late / 1e6, "MB")
        yield Row(f"{name}: growth between the two", 100 * (late / early - 1), "%", 5)


def replica_bytes(keys: int, changes: int) -> tuple[float, float, float]:
    """Bytes of a replica at a node: before any change, after a quarter of `changes`, and after all of them.

    They are what is freed with a node that holds it, less what is freed with one that holds none. Half of the changes
    are adds, half removals.
    """
    rng = random.Random(1)
    settings = NodeSettings(datagram_bytes=STREAMS.datagram_bytes, burst_bytes=STREAMS.burst_bytes)
    tracemalloc.start()
    try:
        owner = Gossip("owner", DOMAIN, settings, rng, 0.0, Journal(), lambda *_: None)
        published = owner.members.join("owner/0", 1, "http://127.0.0.1:8000", 0.0).keys
        assert isinstance(published, OwnedSet)
        live = deque({rng.getrandbits(48) for _ in range(keys)})
        published.gather(Delta(set(live), set()))
        nodes: dict[str, Node] = {}
        for name in ("bare", "idle", "early", "late"):
            nodes[name] = Node(name, DOMAIN, rng=rng, now=0.0, settings=settings)
            nodes[name].add_peer("owner", "owner", 0.0)
        bare = freed(nodes, "bare")
        for name in nodes:
            owner.peers.add(name, name, 0.0)
        now = converse(owner, published, nodes, 0.0)
        sizes = [freed(nodes, "idle") - bare]
        step, done = max(2, round(settings.publish_share * keys)), 0
        for name, until in (("early", changes // 4), ("late", changes)):
            while done < until:
                added = [rng.getrandbits(48) for _ in range(step // 2)]
                published.gather(Delta(set(added), {live.popleft() for _ in added}))
                live.extend(added)
                done += 2 * len(added)
                owner.tempo.stir(now)
                now = converse(owner, published, nodes, now)
            sizes.append(freed(nodes, name) - bare)
    finally:
        tracemalloc.stop()
    return sizes[0], sizes[1], sizes[2]


def converse(owner: Gossip, published: OwnedSet, nodes: dict[str, Node], now: float) -> float:
    """Let all exchange until each node has what the owner published last; return the time then."""
    version, give_up = published.version + 1, now + GIVE_UP_S
    while published.version < version or any(
        (held := node.digests().get("owner/0")) is None or held.version < version for node in nodes.values()
    ):
        if now > give_up:
            raise RuntimeError(f"version {version} has not arrived after {GIVE_UP_S} s")
        now += owner.settings.interval_s
        owner.exchange(now)
        for node in nodes.values():
            while node.next_timer() <= now:
                node.handle_timer(now)
            node.events()
        under_way = True
        while under_way:
            under_way = False
            owner.outbox.pack()
            for sent in owner.outbox.take():
                under_way = True
                if str(sent.address) in nodes:
                    nodes[str(sent.address)].receive_datagram(sent.data, "owner", now)
            for name, node in nodes.items():
                for sent in node.datagrams_to_send(now):
                    under_way = True
                    owner.receive(sent.data, name, now)
        for node in nodes.values():
            while node.next_timer() <= now:
                node.handle_timer(now)
    return now


def freed(nodes: dict[str, Node], name: str) -> int:
    """Drop a node; return the bytes that were freed by it."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    del nodes[name]
    gc.collect()
    return before - tracemalloc.get_traced_memory()[0]


# --- the program -------------------------------------------------------------------------------------------

PARTS = {"idle": idle, "busy": busy, "joiner": joiner, "memory": memory}
QUICK = {"idle_nodes": 3, "idle_blocks": 50, "settle": 2.0, "measure": 2.0}
QUICK |= {"nodes": 8, "datagram_nodes": 4, "base": 2000, "warm": 1.0, "seconds": 2.0, "datagram_seconds": 2.0}
QUICK |= {"keys": 5000, "holders": 3, "joiners": 2, "changes": 100_000}


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run ({','.join(PARTS)})")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look: the bars are for the full ones")
    json_option(parser)
    for name, kind, default, unit in (
        ("idle-nodes", int, 8, "idle: processes"),
        ("idle-blocks", int, 1000, "idle: blocks of each"),
        ("settle", float, 10.0, "idle: seconds after all is replicated, before it is measured"),
        ("measure", float, 20.0, "idle: seconds measured"),
        ("nodes", int, BUSY_NODES, "busy: nodes on streams"),
        ("datagram-nodes", int, 16, "busy: nodes with datagrams of 1,200 bytes"),
        ("base", int, 20_000, "busy: keys of each endpoint"),
        ("rate", float, 625.0, "busy: blocks that come, and that go, at each node in a second"),
        ("warm", float, 1.5, "busy: simulated seconds of change before it is measured"),
        ("seconds", float, 3.0, "busy: simulated seconds measured on streams"),
        ("datagram-seconds", float, 8.0, "busy: simulated seconds measured with datagrams"),
        ("keys", int, BLOCKS, "joiner, memory: blocks of each endpoint"),
        ("holders", int, 8, "joiner: nodes that it joins"),
        ("joiners", int, 5, "joiner: how many join, one after another"),
        ("changes", int, 1_000_000, "memory: blocks that come or go"),
    ):
        quick = QUICK.get(name.replace("-", "_"), default)
        parser.add_argument(f"--{name}", type=kind, help=f"{unit} ({default:,}; quick {quick:,})")
        parser.set_defaults(**{f"full_{name.replace('-', '_')}": default})
    options = parser.parse_args()
    for name, full in [(n[5:], v) for n, v in vars(options).items() if n.startswith("full_")]:
        if getattr(options, name) is None:
            setattr(options, name, QUICK.get(name, full) if options.quick else full)
    options.only = chosen(parser, options.only, PARTS)
    return options


def main() -> int:
    """Print the table, and write it as JSON when asked."""
    options = parsed()
    publish([(part, PARTS[part](options)) for part in options.only], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
