"""Times to first token of a real engine over prompt lengths, cached lengths and concurrency; written as JSON.

    PREFIXROUTE_VLLM_ENV=DIR python benchmarks/ttft_real.py [--engine vllm] [--repeat 7] [--json FILE]

One engine is started on loopback, measured, and ended. A cell is a number of equal requests sent at one moment, each
with one prefix that the engine was made to cache before; its value is their mean time to first token. Cells come in a
new random order each time around, so that what else runs on the machine falls on all of them alike. The median over
the rounds is written: `ttft_s` as the client saw it, and `own_s` without the time in which the engine's computing
thread was ready to run and had no core (Linux tells: /proc/PID/task/TID/schedstat). On an idle machine both are the
same; on a shared one `own_s` is what the engine takes. `prefixroute.plan.prefill.calibrate` reads either.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prefixroute_launch.launcher import LAUNCHERS, EngineSpec, launcher_for
from prefixroute_launch.processes import free_ports

LENGTHS = (128, 256, 384, 512, 768, 1024)
CACHED = (0.0, 0.25, 0.5, 0.75)
CONCURRENT = (1, 2, 4)
BLOCK = 32
CAPACITY_TOKENS = 65536
VOCABULARY = range(100, 1900)


class Cell(NamedTuple):
    """What is asked: requests of so many tokens, so many of them cached, at once."""

    prompt_tokens: int
    cached_tokens: int
    concurrent: int


class Seen(NamedTuple):
    """One round of a cell: mean seconds to first token, without waits for a core, and the cached tokens reported."""

    ttft_s: float
    own_s: float
    cached_tokens: int


Found = dict[Cell, list[Seen]]


def cells(quick: bool = False) -> list[Cell]:
    """Return all cells; cached lengths are whole blocks."""
    lengths, concurrent = (LENGTHS[::3], CONCURRENT[:2]) if quick else (LENGTHS, CONCURRENT)
    found = {Cell(n, int(n * share) // BLOCK * BLOCK, k) for n in lengths for share in CACHED for k in concurrent}
    return sorted(found)


class CoreWait:
    """How long the busiest thread of an engine's processes was kept from a core, all told."""

    def __init__(self, pid: int) -> None:
        self._group = pid
        self._before = self._ran()
        self._file: Path | None = None

    def choose(self) -> None:
        """Settle on the thread that computed most since this object was made."""
        now = self._ran()
        used = {path: ran - self._before.get(path, 0) for path, ran in now.items()}
        self._file = max(used, key=lambda path: used[path], default=None)

    def seconds(self) -> float:
        """Return the wait so far; 0 where nothing tells."""
        return int(self._file.read_text().split()[1]) / 1e9 if self._file is not None else 0.0

    def _ran(self) -> dict[Path, int]:
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(process.name)) == self._group:
                    for path in process.glob("task/*/schedstat"):
                        found[path] = int(path.read_text().split()[0])
            except (OSError, IndexError):
                continue  # ended meanwhile
        return found


class Bench:
    """An engine that is up, and what it is asked."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, rng: random.Random, waits: CoreWait) -> None:
        self._client, self._url, self._model, self._rng, self._waits = client, url, model, rng, waits

    async def measure(self, cell: Cell) -> Seen:
        """Send a cell's requests at one moment."""
        prefix = self._tokens(cell.cached_tokens)
        if prefix:
            await self._ask(prefix)
        tails = [self._tokens(cell.prompt_tokens - cell.cached_tokens) for _ in range(cell.concurrent)]
        asked = await asyncio.gather(*(self._ask(prefix + tail) for tail in tails))
        ttft, own, cached = zip(*asked, strict=True)
        return Seen(statistics.fmean(ttft), statistics.fmean(own), min(cached))

    def _tokens(self, n: int) -> list[int]:
        return self._rng.choices(VOCABULARY, k=n)

    async def _ask(self, prompt: list[int]) -> Seen:
        began, waited = time.perf_counter(), self._waits.seconds()
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        reply = await self._client.post(f"{self._url}/v1/completions", json=body)
        seconds, waited = time.perf_counter() - began, self._waits.seconds() - waited
        reply.raise_for_status()
        details: Any = reply.json()["usage"].get("prompt_tokens_details") or {}
        return Seen(seconds, max(seconds - waited, 1e-4), int(details.get("cached_tokens") or 0))


async def run(engine: str, repeat: int, seed: int, quick: bool, told: Callable[[Found], None]) -> Found:
    """Start the engine, measure all cells `repeat` times, end it; `told` hears after each round what was found."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that the engine ends as well
    port, events, replay = free_ports(3, socket.SOCK_STREAM)
    with tempfile.TemporaryDirectory(prefix="ttft-") as folder:
        spec = EngineSpec(
            name="e",
            port=port,
            events_endpoint=f"tcp://127.0.0.1:{events}",
            replay_endpoint=f"tcp://127.0.0.1:{replay}",
            topic="kv",
            block_size=BLOCK,
            capacity_blocks=CAPACITY_TOKENS // BLOCK,
            index=1,
            run_dir=Path(folder),
        )
        launcher = launcher_for(engine)(spec)
        found: Found = defaultdict(list)
        rng = random.Random(seed)
        try:
            running = await launcher.start()
            await launcher.wait_ready()
            async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
                waits = CoreWait(running.pid)
                bench = Bench(client, running.url, running.model, rng, waits)
                await bench.measure(Cell(512, 0, 2))
                waits.choose()
                for _ in range(repeat):
                    for cell in rng.sample(cells(quick), len(cells(quick))):
                        found[cell].append(await bench.measure(cell))
                    told(found)
        finally:
            await launcher.stop()
    return found


def as_json(engine: str, found: Found) -> str:
    """Return the medians as JSON, a row a line."""
    rows = [
        {
            **cell._asdict(),
            "cached_tokens": min(seen.cached_tokens for seen in times),
            "ttft_s": round(statistics.median(seen.ttft_s for seen in times), 5),
            "own_s": round(statistics.median(seen.own_s for seen in times), 5),
        }
        for cell, times in sorted(found.items())
    ]
    rounds = min(map(len, found.values()), default=0)
    text = json.dumps({"engine": engine, "rounds": rounds, "machine": platform.machine(), "rows": rows})
    return text.replace('{"prompt_tokens"', '\n{"prompt_tokens"') + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Times to first token of a real engine.")
    parser.add_argument("--engine", choices=tuple(LAUNCHERS), default="vllm")
    parser.add_argument("--repeat", type=int, default=7, metavar="N", help="rounds over all cells (7)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer cells")
    parser.add_argument("--json", metavar="FILE", default="-", help='where to write ("-": standard output)')
    options = parser.parse_args()

    def told(found: Found) -> None:
        # After each round: an hour's work is not lost with an engine that dies.
        if options.json != "-":
            Path(options.json).write_text(as_json(options.engine, found))

    found = asyncio.run(run(options.engine, options.repeat, options.seed, options.quick, told))
    if options.json == "-":
        print(as_json(options.engine, found), end="")


if __name__ == "__main__":
    main()
