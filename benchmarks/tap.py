#!/usr/bin/env python3
"""What the in-process tap costs an engine: time of `publish` on the step loop, and until a follower has the batch.

    python benchmarks/tap.py [--quick] [--json FILE]

A batch is what a step brings that prefills 1,024 tokens under eviction: one store of 32 blocks of 32 tokens, one
removal of 32 handles, as objects of the engine's kind. *publish*: alone on its thread while the tap's thread works
beside it in the same process, steps a millisecond apart; the median and the 99th percentile. *queue.Queue*: a put into
what the engines' own ZeroMQ publishers have there. *thread*: the tap's work on a batch, which competes with the engine
for the interpreter. *arrival*: from `publish` to `on_batch`, follower in the same process. Times are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec
import prefixroute_vllm
from prefixroute_inproc import Tap, TapFollower, sources_of_tap
from workbench.bars import Row, publish

BLOCKS, BLOCK = 32, 32
STEP_S = 0.001


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str | None = "GPU"


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As vLLM's."""

    block_hashes: list[int]
    medium: str | None = "GPU"


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As vLLM's."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def batch(number: int) -> EventBatch:
    """What one step brings."""
    handles = [(number * BLOCKS + i) * 0x9E3779B97F4A7C15 % (1 << 64) for i in range(BLOCKS)]
    tokens = [(number * 7 + i) % 4096 for i in range(BLOCKS * BLOCK)]
    return EventBatch(float(number), [BlockRemoved(handles), BlockStored(handles, None, tokens, BLOCK)])


def timed(call: Callable[[EventBatch], object], batches: list[EventBatch], step_s: float) -> list[float]:
    """Microseconds of each call, at most one a step."""
    taken = []
    for one in batches:
        begin = time.perf_counter()
        call(one)
        taken.append((time.perf_counter() - begin) * 1e6)
        time.sleep(step_s)
    return taken


def cost(folder: Path, count: int) -> Iterator[Row]:
    """Of publishing, on the engine's thread and on the tap's."""
    batches = [batch(number) for number in range(count)]
    tap = Tap("vllm", path=str(folder / "tap"))
    tap.start()
    taken = timed(tap.publish, batches, STEP_S)
    tap.close()
    yield Row("publish, median", median(taken), "us/batch")
    yield Row("publish, 99th percentile", quantiles(taken, n=100)[98], "us/batch")
    idle: queue.Queue[Any] = queue.Queue(maxsize=count)
    yield Row("queue.Queue.put, median", median(timed(idle.put, batches, STEP_S)), "us/batch")
    by_hand = Tap("vllm", path=str(folder / "by-hand"))
    for one in batches:
        by_hand.publish(one)
    begin = time.perf_counter()
    while by_hand.stats().queued:
        by_hand.turn()
    yield Row("thread, mean", (time.perf_counter() - begin) / count * 1e6, "us/batch")
    by_hand.close()


def arrival(folder: Path, count: int) -> Iterator[Row]:
    """Of a batch at a follower."""
    yield Row("arrival at a follower, median", median(asyncio.run(_arrivals(str(folder / "arrival"), count))), "us")


async def _arrivals(path: str, count: int) -> list[float]:
    taken: list[float] = []
    arrived = asyncio.Event()
    (source,) = sources_of_tap(f"tap://{path}")
    follower = TapFollower(source, lambda _: arrived.set(), prefixroute_vllm.ENGINE)
    tap = Tap("vllm", path=path)
    tap.start()
    following = asyncio.create_task(follower.run())
    for number in range(count):
        arrived.clear()
        one = batch(number)
        begin = time.perf_counter()
        tap.publish(one)
        await arrived.wait()
        taken.append((time.perf_counter() - begin) * 1e6)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    tap.close()
    return taken[1:]  # the first one had to wait for the connection


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description="What the in-process tap costs an engine.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the batches")
    parser.add_argument("--json", help='write the rows here too; "-" for standard output alone')
    args = parser.parse_args()
    count = 300 if args.quick else 3000
    with tempfile.TemporaryDirectory(prefix="tap-") as folder:
        publish([("cost", cost(Path(folder), count)), ("arrival", arrival(Path(folder), count))], args.json)


if __name__ == "__main__":
    main()
