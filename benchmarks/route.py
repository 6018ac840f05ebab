#!/usr/bin/env python3
"""What a routing decision costs: all of `Node.route`, booking included, and beside it `Node.report`.

    python benchmarks/route.py [--endpoints 4,64] [--blocks 64,512,4096] [--json [FILE]]

Rows: prompts as a list, as a packed numpy buffer, and as a chain prepared beforehand. *hit*: one endpoint holds the
whole prompt and half of them its first eighth; *half*: the prompt forks half way from what is held; *miss*: nobody
holds its first block. Every endpoint also holds 2,000 blocks that have nothing to do with the prompts. Times are per
decision, in microseconds, best and median of the repetitions; outcomes are reported after each repetition.
The floor is the same interpreter packing the list (`array('I', tokens)`), measured in the same run: compare with it,
since machines differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from array import array
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from workbench.bars import json_option

from prefixroute import BlocksStored, Domain, EngineBatch, Node, NodeSettings, Outcome

BLOCK = 16
OTHER_BLOCKS = 2000
SETTINGS = NodeSettings(datagram_bytes=65000, burst_bytes=64 << 20, suspect_after_s=1e8, forget_after_s=1e9)


def fleet(endpoints: int, held: dict[int, list[list[int]]]) -> Node:
    """A node that learnt `endpoints` - 1 peers by gossip; `held` lists the token sequences of each by number."""
    domain = Domain("bench", "bench", BLOCK)
    rng = random.Random(1)
    nodes = [Node(f"n{i}", domain, rng=rng, now=0.0, settings=SETTINGS) for i in range(endpoints)]
    asker = nodes[0]
    expected: dict[str, int] = {}
    for i, node in enumerate(nodes):
        endpoint = node.add_endpoint("0", url=f"http://n{i}", incarnation=1, now=0.0)
        other = [rng.randrange(128_000) for _ in range(OTHER_BLOCKS * BLOCK)]
        for j, tokens in enumerate([other, *held.get(i, [])]):
            n = len(tokens) // BLOCK
            first = 10**9 * (j + 1)
            handles = tuple(range(first, first + n))
            node.apply(endpoint, EngineBatch((BlocksStored(handles, None, tokens, BLOCK),)), 0.0)
        settle(node, 0.0)
        expected[f"{node.node}/0"] = node.residency(endpoint).canonical_blocks
        if i:
            node.add_peer("n0", "n0", 0.0)
            asker.add_peer(node.node, node.node, 0.0)
    by_name = {node.node: node for node in nodes}
    now = 0.0
    while {row.endpoint: row.blocks for row in asker.stats(now).endpoints} != expected:
        now += SETTINGS.interval_s
        for node in nodes:
            settle(node, now)
        while sent := [(node, datagram) for node in nodes for datagram in node.datagrams_to_send(now)]:
            for node, datagram in sent:
                by_name[str(datagram.address)].receive_datagram(datagram.data, node.node, now)
    settle(asker, now)
    asker.datagrams_to_send(now)
    asker.events()
    return asker


def settle(node: Node, now: float) -> None:
    """Let a node do what is due, and what it has put off."""
    while node.next_timer() <= now:
        node.handle_timer(now)


class Times(NamedTuple):
    """Microseconds a call."""

    best: float
    median: float


def timed(runs: list[int], inner: int) -> Times:
    """Turn the nanoseconds of runs of `inner` calls into times of one."""
    return Times(min(runs) / inner / 1000, median(runs) / inner / 1000)


def decide(node: Node, prompt: Any, inner: int, repeat: int) -> tuple[Times, Times]:
    """Time `route` and `report` apart. Each prompt is cancelled before it comes again: else it would be expected."""
    clock, now = time.perf_counter_ns, 1e6
    routes, reports = [], []
    for _ in range(repeat):
        routed = reported = 0
        for _ in range(inner):
            start = clock()
            decision = node.route(prompt, now)
            middle = clock()
            node.report(decision, Outcome.cancelled(), now)
            reported += clock() - middle
            routed += middle - start
        reports.append(reported)
        routes.append(routed)
    return timed(routes, inner), timed(reports, inner)


def pack(tokens: list[int], inner: int, repeat: int) -> Times:
    """Time the floor: packing the list."""
    runs = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        for _ in range(inner):
            array("I", tokens)
        runs.append(time.perf_counter_ns() - start)
    return timed(runs, inner)


def measure(endpoints: int, blocks: int, repeat: int) -> list[dict[str, Any]]:
    """All rows of one fleet size and prompt length."""
    rng = random.Random(blocks)
    whole = [rng.randrange(128_000) for _ in range(blocks * BLOCK)]
    eighth = whole[: max(blocks // 8, 1) * BLOCK]
    held = {i: [eighth] for i in range(0, endpoints, 2)}
    held[1] = [whole]
    node = fleet(endpoints, held)
    half = whole[: blocks // 2 * BLOCK] + [rng.randrange(128_000) for _ in range(blocks * BLOCK - blocks // 2 * BLOCK)]
    miss = [rng.randrange(128_000) for _ in range(blocks * BLOCK)]
    rows: list[dict[str, Any]] = []
    inner = max(4, 2048 // blocks)
    for case, tokens, depth in (("hit", whole, blocks), ("half", half, blocks // 2), ("miss", miss, 0)):
        decision = node.route(tokens, 1e6)
        deepest = max(candidate.depth for candidate in decision.candidates)
        assert deepest == depth, (case, deepest, depth)
        node.report(decision, Outcome.cancelled(), 1e6)
        buffer = np.array(tokens, np.uint32)
        floor = pack(tokens, inner, repeat)
        for form, prompt in (("list", tokens), ("buffer", buffer), ("chain", node.chain(buffer))):
            gc.collect()
            route, report = decide(node, prompt, inner, repeat)
            row = {"endpoints": endpoints, "blocks": blocks, "case": case, "form": form}
            figures = {"route_us": route.best, "route_median_us": route.median, "report_us": report.best}
            rows.append({**row, **{k: round(v, 2) for k, v in {**figures, "pack_us": floor.best}.items()}})
    return rows


COLUMNS = ("endpoints", "blocks", "case", "form", "route_us", "route_median_us", "report_us", "pack_us")


def main() -> int:
    """Print the table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", default="4,64", help="fleet sizes (4,64)")
    parser.add_argument("--blocks", default="64,512,4096", help="prompt lengths in blocks of 16 tokens (64,512,4096)")
    parser.add_argument("--repeat", type=int, default=15, help="repetitions (15)")
    json_option(parser)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    quiet = options.json == "-"
    if not quiet:
        print("".join(f"{column:>16}" for column in COLUMNS))
    for endpoints in map(int, options.endpoints.split(",")):
        for blocks in map(int, options.blocks.split(",")):
            for row in measure(endpoints, blocks, options.repeat):
                rows.append(row)
                if not quiet:
                    print("".join(f"{row[column]:>16}" for column in COLUMNS), flush=True)
    machine = {"python": platform.python_version(), "processor": platform.machine(), "numpy": np.__version__}
    text = json.dumps({"rows": rows, "machine": machine}, indent=1)
    if quiet:
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
