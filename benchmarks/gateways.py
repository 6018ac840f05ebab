#!/usr/bin/env python3
"""What a gateway adds to a request, in time and in CPU: the sidecar, and the rivals that PyPI has, before stub workers.

    python benchmarks/gateways.py [--json [FILE]] [--env DIR]... [--requests 100] [--rounds 3]

Rows: the sidecar serving from its own engine, the same forwarding once to a peer's, and each rival's `cache_aware`,
with prompts of 1,000 and 16,000 tokens as texts and as token ids, four fifths of them a prefix that is cached, answers
streamed. *direct* is the worker alone. *first* is the time to the first event, *whole* to the last; *added* is the
median, or the 99th percentile, less that of *direct* in the same run; *CPU* is user and system time a request, of all
the gateway's processes, both sidecars where two take part. *idle* is what the gateway takes with no request at all.

Method: two workers, one client, a closed loop of one connection (--clients N: N). The gateways take turns, block
by block, so that all see the same machine. `--env`: a virtual environment that holds rivals (default: this one); one
that is not installed, or does not take a kind of prompt, has a row that says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from workbench.gateway_setups import RIVALS, Gateway, rivals, sidecars, workers
from workbench.stub_worker import MODEL, VOCABULARY, words

GROUPS = 6
SHARED = 0.8
DEADLINE_S = 40.0
SETTLE_S = 1.5
TARGET = b"x-prefixroute-target: "


class Case(NamedTuple):
    """A kind of prompt."""

    form: str
    tokens: int

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.tokens // 1000}k {self.form}"


class Timing(NamedTuple):
    """One request: seconds to its first event and to its end, and which endpoint served it, where that is told."""

    first_s: float
    whole_s: float
    target: str


class Refused(Exception):  # noqa: N818 - an answer, not an error of the program
    """The gateway did not answer with a stream."""


class Client(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self._reply = bytearray()
        self._first_at = 0.0
        self._done: asyncio.Future[float] | None = None

    @classmethod
    async def open(cls, port: int) -> Client:
        """Connect."""
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Note when the first event and the end come."""
        now = time.perf_counter()
        self._reply += data
        if not self._first_at and b"data:" in self._reply:
            self._first_at = now
        streamed = b"data: [DONE]" in self._reply[-64:] and self._reply.endswith(b"0\r\n\r\n")
        refused = not self._reply.startswith(b"HTTP/1.1 200")
        if (streamed or refused) and self._done is not None and not self._done.done():
            self._done.set_result(now)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what waits."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(Refused("connection lost"))

    async def ask(self, body: bytes, headers: bytes = b"") -> Timing:
        """Send one request. Raises Refused for another status than 200, and OSError."""
        self._reply.clear()
        self._first_at = 0.0
        self._done = asyncio.get_running_loop().create_future()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        began = time.perf_counter()
        self.transport.write(head + headers + b"content-length: %d\r\n\r\n" % len(body) + body)
        end = await asyncio.wait_for(self._done, DEADLINE_S)
        if not self._reply.startswith(b"HTTP/1.1 200"):
            raise Refused(bytes(self._reply[:200]).decode("latin1"))
        told = bytes(self._reply).partition(TARGET)[2].partition(b"\r\n")[0].decode()
        return Timing(self._first_at - began, end - began, told)


class Prompts:
    """Bodies of requests: prompts of one of `GROUPS` prefixes a gateway and case, and a tail that nobody has seen."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes: dict[tuple[str, Case], list[list[int]]] = {}

    def bodies(self, owner: str, case: Case, count: int, *, groups_in_turn: bool = False) -> list[bytes]:
        """`count` bodies; with `groups_in_turn` each prefix as often as the others."""
        prefixes = self._prefixes.setdefault(
            (owner, case), [self._ids(int(case.tokens * SHARED)) for _ in range(GROUPS)]
        )
        made = []
        for n in range(count):
            prefix = prefixes[n % GROUPS] if groups_in_turn else self._rng.choice(prefixes)
            ids = prefix + self._ids(case.tokens - len(prefix))
            prompt = ids if case.form == "tokens" else words(ids)
            options = {"max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
            made.append(json.dumps({"model": MODEL, "prompt": prompt, **options}).encode())
        return made

    def _ids(self, count: int) -> list[int]:
        return self._rng.choices(range(VOCABULARY), k=count)


@dataclass
class Samples:
    """What was measured of one gateway and case."""

    timings: list[Timing] = field(default_factory=list)
    cpu_s: float = 0.0
    why_not: str = ""

    @property
    def targets(self) -> dict[str, int]:
        """How many requests each endpoint served."""
        return dict(Counter(timing.target for timing in self.timings))


async def drive(gateway: Gateway, bodies: Sequence[bytes], clients: int, into: Samples) -> None:
    """Send all bodies in a closed loop, and add what that took."""
    queue = iter(bodies)

    async def loop() -> None:
        client = await Client.open(gateway.port)
        try:
            for body in queue:
                into.timings.append(await client.ask(body))
        finally:
            client.transport.close()

    before = sum(process.cpu_s for process in gateway.processes)
    await asyncio.gather(*(loop() for _ in range(clients)))
    into.cpu_s += sum(process.cpu_s for process in gateway.processes) - before


async def serving(gateway: Gateway, body: bytes) -> Gateway:
    """The gateway when it answers; with a reason when it does not."""
    end = time.monotonic() + DEADLINE_S
    why = "did not serve"
    while not gateway.why_not and time.monotonic() < end:
        if not all(process.alive for process in gateway.processes):
            return gateway._replace(why_not="ended: " + gateway.processes[0].log.read_text()[-200:])
        try:
            client = await Client.open(gateway.port)
            with contextlib.closing(client.transport):
                await client.ask(body)
            return gateway
        except (OSError, Refused, asyncio.TimeoutError) as error:
            why = str(error)
        await asyncio.sleep(0.2)
    return gateway if gateway.why_not else gateway._replace(why_not=why)


async def warm(port: int, bodies: Sequence[bytes], headers: bytes = b"") -> None:
    """Send bodies, whatever becomes of them."""
    with contextlib.suppress(Refused, OSError):
        client = await Client.open(port)
        with contextlib.closing(client.transport):
            for body in bodies:
                await client.ask(body, headers)


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything; return what is written as JSON."""
    cases = [Case(form, size) for size in args.sizes for form in ("text", "tokens")]
    prompts, samples, idle = Prompts(1), {}, {}
    probe = prompts.bodies("probe", Case("text", 1000), 1)[0]
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(workers(2, folder))
        for port in ports:
            await serving(Gateway("worker", port), probe)
        pair = stack.enter_context(sidecars(ports, folder, args.python))
        others = stack.enter_context(rivals(args.rivals, args.env or [Path(sys.prefix)], ports, folder))
        for one in pair:
            if (await serving(one, probe)).why_not:
                raise SystemExit(f"the sidecar {one.name} does not serve: {one.processes[0].log.read_text()[-2000:]}")
        both = tuple(process for one in pair for process in one.processes)
        gateways = [Gateway("direct", ports[0]), Gateway("ours, local", pair[0].port, pair[0].processes)]
        gateways.append(Gateway("ours, forwarded", pair[0].port, both))
        gateways += [await serving(rival, probe) for rival in others]
        for case in cases:
            for gateway in gateways:
                samples[gateway.name, case] = Samples(why_not=gateway.why_not)
                if gateway.why_not:
                    continue
                first = prompts.bodies(gateway.name, case, 2 * GROUPS, groups_in_turn=True)
                if gateway.name == "ours, forwarded":
                    await warm(pair[1].port, first, b"x-prefixroute-hop: 1\r\n")
                else:
                    await warm(gateway.port, first)
        await asyncio.sleep(SETTLE_S)
        for gateway in gateways:
            idle[gateway.name] = sum(process.cpu_s for process in gateway.processes)
        await asyncio.sleep(args.idle_s)
        for gateway in gateways:
            idle[gateway.name] = (
                sum(process.cpu_s for process in gateway.processes) - idle[gateway.name]
            ) / args.idle_s
        for _ in range(args.rounds):
            for case in cases:
                for gateway in gateways:
                    into = samples[gateway.name, case]
                    if into.why_not:
                        continue
                    try:
                        await drive(gateway, prompts.bodies(gateway.name, case, args.requests), args.clients, into)
                    except (OSError, Refused, asyncio.TimeoutError) as error:
                        into.why_not = " ".join(str(error).split())
    names = [gateway.name for gateway in gateways]
    rows = [row(name, case, samples[name, case], samples["direct", case]) for case in cases for name in names]
    return {
        "rows": rows,
        "idle_ms_per_s": {name: 1e3 * value for name, value in idle.items()},
        "machine": machine(args),
    }


def row(name: str, case: Case, got: Samples, floor: Samples) -> dict[str, Any]:
    """One row of the table."""
    begun: dict[str, Any] = {"gateway": name, "prompt": case.form, "tokens": case.tokens}
    if got.why_not or not got.timings:
        return {**begun, "why_not": got.why_not}
    first, whole = [one.first_s for one in got.timings], [one.whole_s for one in got.timings]
    floor_first, floor_whole = [one.first_s for one in floor.timings], [one.whole_s for one in floor.timings]
    return {
        **begun,
        "requests": len(first),
        "first_ms": 1e3 * median(first),
        "added_ms": 1e3 * (median(first) - median(floor_first)),
        "added_p99_ms": 1e3 * (percentile(first) - percentile(floor_first)),
        "added_whole_ms": 1e3 * (median(whole) - median(floor_whole)),
        "cpu_ms": 1e3 * got.cpu_s / len(first),
        "targets": got.targets,
    }


def percentile(values: Sequence[float], share: float = 0.99) -> float:
    """The value that `share` of the others do not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "clients": args.clients,
        "requests": args.requests * args.rounds,
        "loop": "uvloop" if "uvloop" in sys.modules else "asyncio",
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'prompt':<12}{'gateway':<18}{'first ms':>9}{'added':>8}{'p99':>8}{'whole':>8}{'CPU ms':>8}  served by")
    for one in result["rows"]:
        head = f"{Case(one['prompt'], one['tokens']).name:<12}{one['gateway']:<18}"
        if "why_not" in one:
            print(f"{head} {one['why_not'][:100]}")
            continue
        figures = (one["added_ms"], one["added_p99_ms"], one["added_whole_ms"], one["cpu_ms"])
        served = ", ".join(f"{name} {count}" for name, count in one["targets"].items() if name)
        print(f"{head}{one['first_ms']:>9.2f}{''.join(f'{value:>8.2f}' for value in figures)}  {served}")
    print("idle, ms of CPU a second: " + ", ".join(f"{k} {v:.1f}" for k, v in result["idle_ms_per_s"].items() if v))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON there, or instead of the table"
    )
    parser.add_argument("--env", action="append", type=Path, metavar="DIR")
    parser.add_argument("--rivals", type=lambda text: [name for name in text.split(",") if name], default=[*RIVALS])
    parser.add_argument("--requests", type=int, default=100, help="a block, of one case and gateway")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1000, 16000])
    parser.add_argument("--idle-s", type=float, default=4.0, help="how long the gateways are watched without requests")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the sidecars")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            import uvloop
        except ImportError:
            result = asyncio.run(measure(args, Path(folder)))
        else:
            result = uvloop.run(measure(args, Path(folder)))
    if args.json == "-":
        print(json.dumps(result, indent=1))
        return
    show(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
