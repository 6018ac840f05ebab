#!/usr/bin/env python3
"""What a flood of datagrams costs a node that serves.

    python benchmarks/hostile.py [--rates 2000,10000,50000] [--seconds 3] [--json FILE]

Two nodes gossip over UDP on the loopback, each with its driver, in one event loop with requests: a request is routed,
given its first token and reported, one after another, as fast as the loop lets it. Another process sends junk to the
first node's socket: *forged* datagrams with a magic and no tag, which cost most of all that has no secret. Rows tell
the share of a processor that goes into reading and refusing, which is what requests lose (two runs with and without a
flood differ by more on a busy machine); datagrams that were read, the peer's included; processor time for each; and
whether the peer was unheard at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from workbench.bars import Row, json_option, publish

from prefixroute import Domain, Node, Outcome
from prefixroute.aio import Driver, UdpTransport

DOMAIN = Domain("bench", "bench", 16, secret=b"a secret of sixteen bytes")
PROMPTS = 64
WORK_S = 0.0005
"""What a server does for a request beside routing: reading and writing HTTP. It is burnt, not slept."""


class Measured(NamedTuple):
    """One run: seconds of it, processor time for reading, datagrams read, requests served, and how it ended."""

    took_s: float
    read_s: float
    seen: int
    requests: int
    heard: bool


class Timed(UdpTransport):
    """Counts the processor time that reading takes, screening included."""

    read_s = 0.0

    def _read(self) -> None:
        began = time.thread_time()
        super()._read()
        self.read_s += time.thread_time() - began


def flood(address: tuple[str, int], rate: float, stop: Any) -> None:
    """Send junk at `rate` a second until told to stop."""
    rng, out = random.Random(1), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    junk = [b"PRT2" + rng.randbytes(196) for _ in range(64)]
    began, sent = time.perf_counter(), 0
    while not stop.is_set():
        due = (time.perf_counter() - began) * rate
        while sent < due:
            out.sendto(junk[sent % 64], address)
            sent += 1
        time.sleep(0.001)


def burn(seconds: float) -> None:
    """Use the processor for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def measure(rate: float, seconds: float) -> Measured:
    """Serve for some seconds under a flood of `rate` datagrams a second."""
    nodes: list[Node] = []
    drivers: list[Driver] = []
    sockets = [await Timed.open() for _ in range(2)]
    for name in ("a", "b"):
        node = Node(name, DOMAIN, rng=random.Random(), now=time.monotonic())
        node.add_endpoint("0", url=f"http://{name}", incarnation=time.time_ns(), now=time.monotonic())
        nodes.append(node)
        drivers.append(Driver(node, sockets[len(drivers)]))
    for mine, other in ((0, 1), (1, 0)):
        nodes[mine].add_peer(nodes[other].node, sockets[other].address, time.monotonic())
    rng = random.Random(2)
    prompts = [[rng.randrange(32000) for _ in range(800)] for _ in range(PROMPTS)]
    stop = multiprocessing.Event()
    attacker = multiprocessing.Process(target=flood, args=(sockets[0].address, rate, stop), daemon=True)
    async with drivers[0], drivers[1]:
        await asyncio.sleep(1.0)
        attacker.start()
        await asyncio.sleep(0.5)
        node, now, read = nodes[0], drivers[0].now, sockets[0]
        seen, read_s, began, requests = node.counters["datagrams_received"], _read_s(read), time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            decision = node.route(prompts[requests % PROMPTS], now())
            burn(WORK_S)
            node.first_token(decision, now())
            node.report(decision, Outcome.served(cached_tokens=0, ttft_s=0.01), now())
            requests += 1
            await asyncio.sleep(0)
        took = time.perf_counter() - began
        came = node.counters["datagrams_received"] - seen
        heard = node.stats(now()).peers["b"] == "heard"
        stop.set()
        attacker.join()
    return Measured(took, _read_s(read) - read_s, came, requests, heard)


def _read_s(transport: UdpTransport) -> float:
    assert isinstance(transport, Timed)
    return transport.read_s


def rows_of(rates: list[float], seconds: float) -> Iterator[Row]:
    """Measure at each rate."""
    for rate in rates:
        one = asyncio.run(measure(rate, seconds))
        what = f"flood of {rate:,.0f} forged datagrams a second: "
        yield Row(what + "processor for reading and refusing", one.read_s / one.took_s, "of one", 0.05)
        yield Row(what + "read, the kernel drops the others", one.seen / one.took_s, "datagrams/s")
        yield Row(what + "processor time each", 1e6 * one.read_s / max(1, one.seen), "us")
        yield Row(what + "peer unheard at the end", float(not one.heard), "peers")


def main() -> int:
    """Measure each rate and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="2000,10000,50000")
    parser.add_argument("--seconds", type=float, default=3.0)
    json_option(parser)
    options = parser.parse_args()
    publish([("flood", rows_of([float(rate) for rate in options.rates.split(",")], options.seconds))], options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
