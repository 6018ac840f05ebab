#!/usr/bin/env python3
"""How a node's costs grow: decision time, memory and gossip, from 4 to 1,024 endpoints of 10,000 to 1,000,000 blocks.

    python benchmarks/scale.py [--quick] [--json [FILE]] [--markdown] [--plots FOLDER]

A cell is one node that learns all endpoints by gossip, from one relay, in a process of its own. Each endpoint publishes
what one with default settings would of that many blocks of chat: every block of 10,000, anchors of more; 3 blocks of
100 end a request. Prompts have 512 blocks, and the endpoints hold one of `depths` prefixes of them, evenly. Their other
keys are random; from `POOL_KEYS` on they are drawn from one pool, so that several endpoints have the same ones and the
largest cells fit 8 GB: a decision does not look at them, but they fill the index and what a processor caches of it.

Times are of `Node.route`, booking included: *fresh*, the first decisions after endpoints were ranked, and otherwise
after `WORN_DECISIONS` without a round between them, the best of five medians. The two differ where many endpoints
hold the same: those that are chosen sink in the ranking, and the next are looked for further down. A live node is
between the two, since a round ranks anew. The bar is for the worse. Memory is what the process grew by. Growth is the
slope of a straight line through the logarithms: 0 is flat, 1 proportional.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from workbench.bars import Row, publish

from prefixroute import Domain, Node, NodeSettings, Outcome, TokenChain
from prefixroute.endpoint.anchors import choose_stride, expected_anchors
from prefixroute.events import Journal
from prefixroute.keys.chain import wire_key
from prefixroute.keys.keyset import Delta
from prefixroute.replication.gossip import Gossip
from prefixroute.replication.wire import KEY_LIMIT
from prefixroute.replication.writer_set import OwnedSet

BLOCK, PROMPT_BLOCKS, PROMPTS = 16, 512, 8
DOMAIN = Domain("bench", "bench", BLOCK, secret=b"bench")
SETTINGS = NodeSettings(
    datagram_bytes=65536, burst_bytes=16 << 20, idle_interval_s=0.0, suspect_after_s=1e8, forget_after_s=1e9
)
ENDPOINTS = (4, 16, 64, 256, 1024)
BLOCKS = (10_000, 100_000, 1_000_000)
DEPTHS = (1, 3, 16, 64, 256)
TYPICAL = 3
"""Distinct depths where endpoints or blocks are varied."""

ENDS_SHARE = 0.03
CHANGED_SHARE = 0.01
"""Keys that are replaced to see what a delta takes."""

WORN_DECISIONS = 2000
"""Decisions after which times do not change any more; without them whatever is timed first looks twice as fast."""

POOL_KEYS = 8_000_000
PAGE_BYTES = 4096
RATIO_BAR = 1.5


class Case(NamedTuple):
    """What a cell is of."""

    endpoints: int
    blocks: int
    depths: int


class Cell(NamedTuple):
    """What a cell came to. Bytes of gossip are what one endpoint's set, or its change, took to arrive."""

    endpoints: int
    blocks: int
    depths: int
    anchor_stride: int
    keys: int
    index_keys: int
    fresh_us: float
    route_us: float
    chain_us: float
    miss_us: float
    memory_bytes: int
    snapshot_bytes: float
    delta_bytes: float


# --- a cell ------------------------------------------------------------------------------------------------


def measured(case: Case) -> Cell:
    """Build a cell and measure it."""
    rng, chance = np.random.default_rng(1), random.Random(1)
    ends = round(ENDS_SHARE * case.blocks)
    anchor_stride = choose_stride(case.blocks, ends, NodeSettings().digest_bytes)
    n_keys = round(expected_anchors(case.blocks, ends, anchor_stride))
    prompts = [[chance.randrange(128_000) for _ in range(PROMPT_BLOCKS * BLOCK)] for _ in range(PROMPTS)]
    before = resident_bytes()
    node = Node("node", DOMAIN, rng=chance, now=0.0, settings=SETTINGS)
    node.add_endpoint(incarnation=1, now=0.0)
    relay = Relay(node)
    shared = [
        anchors([node.chain(prompt) for prompt in prompts], case.depths, j, anchor_stride) for j in range(case.depths)
    ]
    pool = np.unique(rng.integers(0, KEY_LIMIT, min(POOL_KEYS, (case.endpoints - 1) * n_keys) + 1000, np.uint64))
    at = 0
    others: list[list[int]] = []
    for i in range(case.endpoints - 1):
        held = shared[i % case.depths]
        filler = np.take(pool, range(at, at + max(1, n_keys - len(held))), mode="wrap")
        at += len(filler)
        relay.publish(f"n{i}/0", held.union(filler.tolist()), set(), anchor_stride)
        others.append(filler[: max(1, round(CHANGED_SHARE * n_keys))].tolist())
    snapshots = relay.deliver()
    for i, gone in enumerate(others):
        come = {chance.randrange(KEY_LIMIT) for _ in gone}
        relay.publish(f"n{i}/0", come, set(gone), anchor_stride)
    deltas = relay.deliver()
    index_keys = node.stats(relay.now).index_keys
    del relay, pool, others
    gc.collect()
    memory = resident_bytes() - before
    far = [[token + 200_000 for token in prompt] for prompt in prompts]
    peers = case.endpoints - 1
    fresh = _median_us(node, prompts)
    for _ in range(WORN_DECISIONS // (10 * PROMPTS)):
        _median_us(node, prompts)
    return Cell(
        *case,
        anchor_stride,
        n_keys,
        index_keys,
        fresh,
        route_us(node, prompts),
        route_us(node, [node.chain(prompt) for prompt in prompts]),
        route_us(node, far),
        memory,
        snapshots / peers,
        deltas / peers,
    )


def anchors(chains: list[TokenChain], depths: int, which: int, anchor_stride: int) -> set[int]:
    """What an endpoint publishes that holds one of the `depths` prefixes of each prompt."""
    last = PROMPT_BLOCKS * (which + 1) // depths
    published = {1, last, *range(anchor_stride, last + 1, anchor_stride)}
    return {wire_key(chain.key(depth)) for chain in chains for depth in published}


def route_us(node: Node, prompts: Sequence[Any], repeat: int = 5) -> float:
    """Time of a decision: the best of several medians."""
    return min(_median_us(node, prompts) for _ in range(repeat))


def _median_us(node: Node, prompts: Sequence[Any], rounds: int = 10) -> float:
    runs: list[int] = []
    now = 1e6
    for _ in range(rounds):
        for prompt in prompts:
            start = time.perf_counter_ns()
            decision = node.route(prompt, now)
            runs.append(time.perf_counter_ns() - start)
            # Else the prompt would be expected to be held from then on.
            node.report(decision, Outcome.cancelled(), now)
    return median(runs) / 1000


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Relay:
    """Speaks to a node for all other endpoints, as any node may."""

    def __init__(self, node: Node) -> None:
        self.now = 0.0
        self._node = node
        self._gossip = Gossip("relay", DOMAIN, SETTINGS, random.Random(2), 0.0, Journal(), lambda *_: None)
        self._gossip.peers.add("node", "node", 0.0)
        node.add_peer("relay", "relay", 0.0)

    def publish(self, endpoint: str, come: set[int], gone: set[int], anchor_stride: int) -> None:
        """Let an endpoint step its version."""
        members = self._gossip.members
        copy = members.copies.get(endpoint) or members.join(endpoint, 1, "http://peer", self.now)
        assert isinstance(copy.keys, OwnedSet)
        copy.keys.stride = anchor_stride
        copy.keys.gather(Delta(come, gone))
        copy.keys.publish(self.now)

    def deliver(self) -> int:
        """Exchange until the node has everything; return the bytes that went to it."""
        node, sent = self._node, 0
        while not self._whole():
            assert self.now < 3600, "the sets do not arrive"
            self.now += SETTINGS.interval_s
            self._gossip.exchange(self.now)
            sent += self._carry()
            while node.next_timer() <= self.now:
                node.handle_timer(self.now)
            sent += self._carry()
        node.events()
        return sent

    def _carry(self) -> int:
        """Carry datagrams until there are none. Only one of the two began an exchange: else what is owed goes twice."""
        sent = 0
        while True:
            self._gossip.outbox.pack()
            out, back = self._gossip.outbox.take(), self._node.datagrams_to_send(self.now)
            if not out and not back:
                return sent
            for _, data in out:
                sent += len(data)
                self._node.receive_datagram(data, "relay", self.now)
            for _, data in back:
                self._gossip.receive(data, "node", self.now)

    def _whole(self) -> bool:
        theirs = self._node.digests()
        ours = self._gossip.members.copies
        return all(name in theirs and theirs[name].version == copy.keys.version for name, copy in ours.items())


# --- all cells ---------------------------------------------------------------------------------------------


def cases(endpoints: Sequence[int], blocks: Sequence[int], depths: Sequence[int]) -> list[Case]:
    """The cells: endpoints by blocks, and distinct depths at the most endpoints and the middle number of blocks."""
    made = [Case(n, m, TYPICAL) for m in blocks for n in endpoints]
    made += [Case(max(endpoints), sorted(blocks)[len(blocks) // 2], d) for d in depths if d != TYPICAL]
    return sorted(made, key=lambda case: case.endpoints * case.blocks)


def run(chosen: list[Case]) -> Iterator[Cell]:
    """Measure all cells, each in a new process."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(measured, chosen)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent of growth: the slope of a line through the logarithms."""
    x, y = np.log([[float(a), float(b)] for a, b in points]).T
    return float(np.polyfit(x, y, 1)[0])


class Growth(NamedTuple):
    """Cells that differ in one thing only."""

    title: str
    across: str
    cells: list[Cell]
    x: Callable[[Cell], float]


def growths(cells: list[Cell]) -> list[Growth]:
    """What is varied."""
    usual = [cell for cell in cells if cell.depths == TYPICAL]
    made = []
    for blocks in sorted({cell.blocks for cell in usual}):
        some = [cell for cell in usual if cell.blocks == blocks]
        made.append(Growth(f"{blocks:,} blocks each", "endpoints", some, lambda cell: cell.endpoints))
    counts = sorted({cell.endpoints for cell in usual})
    middle = counts[len(counts) // 2]
    some = [cell for cell in usual if cell.endpoints == middle]
    made.append(Growth(f"{middle} endpoints", "blocks", some, lambda cell: cell.blocks))
    for deep in [cell for cell in cells if cell.depths != TYPICAL][:1]:
        some = sorted(cell for cell in cells if (cell.endpoints, cell.blocks) == (deep.endpoints, deep.blocks))
        title = f"{deep.endpoints:,} endpoints, {deep.blocks:,} blocks each"
        made.append(Growth(title, "distinct depths", some, lambda cell: cell.depths))
    return made


def rows(cells: list[Cell]) -> Iterator[Row]:
    """All figures, and how they grow."""
    for cell in cells:
        name = f"{cell.endpoints:,} endpoints, {cell.blocks:,} blocks, {cell.depths} depths"
        yield Row(f"{name}: decision from a list", cell.route_us, "us")
        yield Row(f"{name}: decision from a list, fresh ranking", cell.fresh_us, "us")
        yield Row(f"{name}: decision from a chain", cell.chain_us, "us")
        yield Row(f"{name}: decision, cold prompt", cell.miss_us, "us")
        yield Row(f"{name}: memory", cell.memory_bytes / 1e6, "MB")
        yield Row(f"{name}: memory per key in the index", cell.memory_bytes / cell.index_keys, "B")
        yield Row(f"{name}: snapshot of an endpoint", cell.snapshot_bytes / 1e3, "kB")
        yield Row(f"{name}: delta of 1 % of its keys", cell.delta_bytes / 1e3, "kB")
    for growth in growths(cells):
        points = [(growth.x(cell), cell) for cell in growth.cells]
        for what, figure in FIGURES.items():
            if len(points) > 1:
                fitted = slope([(x, figure(cell)) for x, cell in points])
                yield Row(f"growth of {what} with {growth.across}, {growth.title}", fitted, "slope")
        if growth.across == "endpoints":
            ratio = growth.cells[-1].route_us / growth.cells[0].route_us
            first, last = growth.cells[0].endpoints, growth.cells[-1].endpoints
            yield Row(f"decision at {last:,} endpoints over {first}, {growth.title}", ratio, "ratio", RATIO_BAR)


FIGURES: dict[str, Callable[[Cell], float]] = {
    "decision, fresh ranking": lambda cell: cell.fresh_us,
    "decision from a list": lambda cell: cell.route_us,
    "decision from a chain": lambda cell: cell.chain_us,
    "memory": lambda cell: cell.memory_bytes,
    "gossip to a joiner": lambda cell: cell.snapshot_bytes * (cell.endpoints - 1),
}


# --- documents ---------------------------------------------------------------------------------------------


def markdown(cells: list[Cell]) -> str:
    """The tables of docs/performance.md."""
    lines = [
        "| endpoints | blocks each | depths | stride | keys published | index keys | fresh us | list us | chain us "
        "| cold us | memory MB | snapshot kB | 1 % delta kB |",
        "|---" * 13 + "|",
    ]
    for c in cells:
        times = f"{c.fresh_us:.0f} | {c.route_us:.0f} | {c.chain_us:.0f} | {c.miss_us:.0f}"
        sizes = f"{c.memory_bytes / 1e6:,.0f} | {c.snapshot_bytes / 1e3:.1f} | {c.delta_bytes / 1e3:.2f}"
        head = f"{c.endpoints:,} | {c.blocks:,} | {c.depths} | {c.anchor_stride} | {c.keys:,} | {c.index_keys:,}"
        lines.append(f"| {head} | {times} | {sizes} |")
    lines += ["", f"| growth of | with | at | {' | '.join(FIGURES)} |", "|---" * (3 + len(FIGURES)) + "|"]
    for growth in growths(cells):
        if len(growth.cells) > 1:
            fitted = [slope([(growth.x(c), figure(c)) for c in growth.cells]) for figure in FIGURES.values()]
            span = f"{growth.x(growth.cells[0]):,} to {growth.x(growth.cells[-1]):,}"
            figures = " | ".join(f"{value:.2f}" for value in fitted)
            lines.append(f"| {span} | {growth.across} | {growth.title} | {figures} |")
    return "\n".join(lines)


PLOTS: tuple[tuple[str, str, str, Callable[[Cell], float]], ...] = (
    ("scale-time.png", "decision from a list of 8,192 tokens", "us", lambda cell: cell.route_us),
    ("scale-memory.png", "memory of a node", "MB", lambda cell: cell.memory_bytes / 1e6),
    (
        "scale-gossip.png",
        "bytes to a node that joins",
        "MB",
        lambda cell: cell.snapshot_bytes * (cell.endpoints - 1) / 1e6,
    ),
)


def plot(cells: list[Cell], folder: Path) -> None:
    """Draw each figure against the number of endpoints. Needs matplotlib (extra `sim` or `demo`)."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    for file, title, unit, figure in PLOTS:
        drawing, axis = pyplot.subplots(figsize=(6.5, 4.2))
        for growth in growths(cells):
            if growth.across == "endpoints":
                x = [cell.endpoints for cell in growth.cells]
                axis.plot(x, [figure(cell) for cell in growth.cells], marker="o", label=growth.title)
        axis.set(xscale="log", yscale="log", xlabel="endpoints", ylabel=unit, title=title)
        axis.set_xticks(sorted({cell.endpoints for cell in cells}))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
        if unit == "us":
            axis.set_ylim(10, 10_000)
        axis.grid(alpha=0.3)
        axis.legend()
        drawing.savefig(folder / file, dpi=110, bbox_inches="tight")
        pyplot.close(drawing)


def numbers(text: str) -> list[int]:
    """Numbers in a list."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure, and print or write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 and 64 endpoints, 10,000 and 100,000 blocks")
    for name, values in (("endpoints", ENDPOINTS), ("blocks", BLOCKS), ("depths", DEPTHS)):
        parser.add_argument(f"--{name}", type=numbers, default=values, metavar="N,...")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write rows as JSON (no FILE: to stdout)")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown instead of rows")
    parser.add_argument("--plots", metavar="FOLDER", help="draw figures there (docs/img)")
    options = parser.parse_args()
    if options.quick:
        options.endpoints, options.blocks, options.depths = ENDPOINTS[:3:2], BLOCKS[:2], DEPTHS[:3]
    cells: list[Cell] = []
    for cell in run(cases(options.endpoints, options.blocks, options.depths)):
        cells.append(cell)
        print(f"{cell.endpoints:,} x {cell.blocks:,}, {cell.depths} depths: measured", file=sys.stderr, flush=True)
    if options.plots:
        plot(cells, Path(options.plots))
    if options.markdown:
        print(markdown(cells))
    if options.json or not options.markdown:
        publish([("scale", rows(cells))], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
