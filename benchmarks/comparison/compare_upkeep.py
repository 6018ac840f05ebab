"""The parts of the comparison that are no decisions: prompts that come and go, and memory.

As a program it weighs one index, in a process of its own, and prints bytes:

    python -m comparison.compare_upkeep NAME LAYOUT ENDPOINTS BLOCKS PROMPTS

Rules:
1. Ours takes an engine's events as bytes, and so does Dynamo's tree; the others take prompts.
2. Memory of what is written in Python is what its allocations hold; of what is not, the growth of the process, over
   one that holds a block for each endpoint. So threads, sockets and code do not count.
3. *shared*: all endpoints hold the same prompts; *distinct*: each holds its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comparison.compare_report import Row, bytes_row, row
from comparison.contest import TALLY, Taken, taken, times_of
from comparison.ours import OursChurn, allocated, index_bytes, tree_bytes
from comparison.rivals import RIVALS, Churn
from comparison.worlds import CASES, World, asker, tokens_of

Say = Callable[[str], None]
TRIES = 5
NATIVE = ("dynamo service", "dynamo tree")
"""Rivals whose index is no Python."""

PROGRAM, BENCHMARKS = "comparison.compare_upkeep", Path(__file__).parents[1]
WEIGHED_ENDPOINTS, WEIGHED_BLOCKS, WEIGHED_PROMPTS = 64, 512, 8


# --- ingest ------------------------------------------------------------------------------------------------


def ingest(options: argparse.Namespace, say: Say) -> Iterator[Row]:
    """Prompts that are stored and removed again, beside others that stay; microseconds per block."""
    makers: dict[str, Callable[[Sequence[list[int]]], Churn]] = {"ours": OursChurn}
    makers |= {name: churn for name in options.present if (churn := RIVALS[name].churn) is not None}
    for blocks in options.blocks:
        rng = random.Random(blocks)
        lot = max(2, min(16, 2048 // blocks))
        prompts = [tokens_of(blocks, rng) for _ in range(3 * lot)]
        runs: dict[str, dict[str, list[Taken]]] = {"store": {}, "remove": {}}
        churns: dict[str, Any] = {}
        names = list(makers)
        for i in range(options.rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                for step, run in _in_and_out(churns, name, makers[name], prompts, lot).items():
                    runs[step].setdefault(name, []).append(run)
                    TALLY.count(run)
        for step, by_name in runs.items():
            times = {name: times_of(taken, lot * blocks) for name, taken in by_name.items()}
            yield row(f"ingest, {step}, per block", 1, blocks, times)


def _in_and_out(
    churns: dict[str, Any],
    name: str,
    make: Callable[[Sequence[list[int]]], Churn],
    prompts: Sequence[list[int]],
    lot: int,
) -> dict[str, Taken]:
    """Store `lot` prompts, and remove as many: of the tries, what was least disturbed of each."""
    best: dict[str, Taken] = {}
    for _ in range(TRIES):
        if name not in churns:
            churns[name] = make(prompts)
            for i in range(2 * lot):
                churns[name].store(i)
            gc.collect()
        remove = getattr(churns[name], "remove", None)
        for step, act in (("store", churns[name].store), ("remove", remove)):
            if act is None:
                # It cannot forget one endpoint's prompt: next comes an index of its own.
                del churns[name]
                continue
            run = taken(partial(_each, act, range(2 * lot, 3 * lot)))
            best[step] = min(best.get(step, run), run)
        if all(run.quiet for run in best.values()):
            break
        time.sleep(0.002)
    return best


def _each(act: Callable[[int], None], which: range) -> int:
    start = time.perf_counter_ns()
    for i in which:
        act(i)
    return time.perf_counter_ns() - start


# --- memory ------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace, say: Say) -> Iterator[Row]:
    """Bytes of the tree and the index, and of a whole fleet's knowledge beside that of the rivals."""
    prompts = 8 if options.quick else 64
    yield bytes_row("memory, radix tree, per block", 1, 64, tree_bytes(prompts, 64), {})
    yield bytes_row("memory, index, per key", 4, 1, index_bytes(25_000 * (1 if options.quick else 4), 4), {})
    endpoints, blocks, each = WEIGHED_ENDPOINTS, WEIGHED_BLOCKS // (8 if options.quick else 1), WEIGHED_PROMPTS
    entries = endpoints * blocks * each
    for layout in ("shared", "distinct"):
        used: dict[str, float] = {}
        for name in ("ours", *options.present):
            command = [sys.executable, "-m", PROGRAM, name, layout, str(endpoints), str(blocks), str(each)]
            done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False, timeout=600)
            if done.returncode:
                say(f"{name}: memory left out, {done.stderr.strip().splitlines()[-1:]}")
                continue
            used[name] = float(done.stdout.split()[-1])
        ours = used.pop("ours")
        pairs = {name: value / entries for name, value in used.items()}
        yield bytes_row(f"memory, {layout}, per (endpoint, block)", endpoints, blocks, ours / entries, pairs)
        if layout == "shared":
            alone = {name: value / (blocks * each) for name, value in used.items()}
            yield bytes_row(f"memory, {layout}, per block", endpoints, blocks, ours / (blocks * each), alone)


def layout_of(layout: str, endpoints: int, blocks: int, prompts: int) -> World:
    """A world in which nobody asks."""
    rng = random.Random(layout)
    same = [tokens_of(blocks, rng) for _ in range(prompts)]
    held = {
        i: same if layout == "shared" else [tokens_of(blocks, rng) for _ in range(prompts)] for i in range(endpoints)
    }
    return World(endpoints, blocks, held, {case: [] for case in CASES}, dict.fromkeys(CASES, 0))


def weigh(name: str, layout: str, endpoints: int, blocks: int, prompts: int) -> int:
    """Bytes that an index of such a world takes in this process."""
    given = layout_of(layout, endpoints, blocks, prompts)
    if name == "ours":
        return allocated(lambda: asker(given))
    make = RIVALS[name].make
    small = make(layout_of("distinct", endpoints, 1, 1))
    try:
        if name not in NATIVE:
            return allocated(lambda: make(given))
        before = _resident()
        index = make(given)
        gc.collect()
        grown = _resident() - before
        index.close()
    finally:
        small.close()
    return grown


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(weigh(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])))
