#!/usr/bin/env python3
"""What a flood of datagrams costs a node that serves: requests under it, and processor time for each datagram.

    python benchmarks/hostile.py [--rates 2000,10000,50000] [--seconds 3] [--json FILE]

Two nodes gossip over UDP on the loopback, each with its driver, in one event loop with requests: a request is routed,
given its first token and reported, one after another, as fast as the loop lets it. Another process sends junk to the
first node's socket: *forged* datagrams with a magic and no tag, which cost most of all that has no secret. Rows tell
requests lost for each second of this process's processor time, against the same flood of a socket that nobody reads: so
it does not matter who else uses the machine, and what the kernel does for the sender is not counted;
datagrams that were read, the peer's included; processor time for each, beyond what requests took; and whether the peer
was unheard at the end.
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

from figures import Row, json_option, publish

from prefixroute import Domain, Node, Outcome
from prefixroute.aio import Driver, UdpTransport

DOMAIN = Domain("bench", "bench", 16, secret=b"a secret of sixteen bytes")
PROMPTS = 64
WORK_S = 0.0005
"""What a server does for a request beside routing: reading and writing HTTP. It is burnt, not slept."""


class Measured(NamedTuple):
    """One run: requests in a second of processor time, datagrams in a second, and how it ended."""

    requests_per_cpu_s: float
    seen_per_s: float
    cpu_s: float
    requests: int
    heard: bool


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


async def measure(rate: float, seconds: float, elsewhere: bool = False) -> Measured:
    """Serve for some seconds under a flood of `rate` datagrams a second, which may be of a socket that nobody reads."""
    nodes: list[Node] = []
    drivers: list[Driver] = []
    sockets = [await UdpTransport.open() for _ in range(2)]
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
    sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sink.bind(("127.0.0.1", 0))
    target = sink.getsockname() if elsewhere else sockets[0].address
    attacker = multiprocessing.Process(target=flood, args=(target, rate, stop), daemon=True)
    async with drivers[0], drivers[1]:
        await asyncio.sleep(1.0)
        attacker.start()
        await asyncio.sleep(0.5)
        node, now = nodes[0], drivers[0].now
        seen, cpu, began, requests = node.counters["datagrams_received"], time.process_time(), time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            decision = node.route(prompts[requests % PROMPTS], now())
            burn(WORK_S)
            node.first_token(decision, now())
            node.report(decision, Outcome.served(cached_tokens=0, ttft_s=0.01), now())
            requests += 1
            await asyncio.sleep(0)
        took, spent = time.perf_counter() - began, time.process_time() - cpu
        came = node.counters["datagrams_received"] - seen
        heard = node.stats(now()).peers["b"] == "heard"
        stop.set()
        attacker.join()
    sink.close()
    return Measured(requests / spent, came / took, spent, requests, heard)


def rows_of(rates: list[float], seconds: float) -> Iterator[Row]:
    """Measure at each rate, and beside it with the same flood of another socket."""
    for rate in rates:
        calm = asyncio.run(measure(rate, seconds, elsewhere=True))
        one = asyncio.run(measure(rate, seconds))
        what = f"flood of {rate:,.0f} forged datagrams a second: "
        lost = 1 - one.requests_per_cpu_s / calm.requests_per_cpu_s
        extra_s = one.cpu_s - one.requests / calm.requests_per_cpu_s
        yield Row(what + "requests lost, for each second of processor time", max(0.0, lost), "share", 0.05)
        yield Row(what + "read, the kernel drops the others", one.seen_per_s, "datagrams/s")
        yield Row(what + "processor time each", 1e6 * extra_s / max(1.0, one.seen_per_s * seconds), "us")
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
