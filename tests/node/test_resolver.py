"""Names of hosts: resolved off the event loop, again when they change, and told when they are not."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from prefixroute import AddressFailed, Domain, Node, NodeEvent
from prefixroute.aio import Driver, UdpTransport
from prefixroute.resolver import MAX_LOOKUPS, MAX_WAITING, Resolver, host_and_port

PLACE = ("127.0.0.1", 7000)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.005)


class Told:
    """What a resolver found and what failed."""

    def __init__(self, ask: Callable[[str, int], tuple[Any, ...]], **more: float) -> None:
        self.found: list[tuple[Any, bytes]] = []
        self.failed: list[tuple[object, str]] = []
        self.resolver = Resolver(
            socket.AF_INET,
            lambda address, data: self.found.append((address, data)),
            lambda address, reason: self.failed.append((address, reason)),
            ask,
            **more,
        )


@pytest.mark.parametrize("address", ["node-2.svc:7000", ("node-2.svc", 7000)])
def test_what_is_sent_to_a_name_waits_for_its_answer_and_nobody_waits_with_it(address: Any) -> None:
    async def main() -> None:
        answers = threading.Event()

        def ask(host: str, port: int) -> tuple[Any, ...]:
            assert (host, port) == ("node-2.svc", 7000)
            answers.wait(30)
            return b.address

        a, b = await UdpTransport.open(ask=ask), await UdpTransport.open()
        await a.send(address, b"waits")
        await a.send(b.address, b"goes")
        assert (await b.receive())[0] == b"goes"
        answers.set()
        assert (await b.receive())[0] == b"waits"
        await a.send(address, b"goes at once")
        assert (await b.receive())[0] == b"goes at once"
        await a.close()
        await b.close()

    run(main())


def test_a_name_that_changes_is_followed() -> None:
    async def main() -> None:
        places = [("127.0.0.1", 1), ("127.0.0.1", 2)]
        told = Told(lambda host, port: places[0], again_s=0.0)
        look_up = told.resolver.look_up
        assert look_up("n:1", b"x") is None
        await until(lambda: told.found == [(("127.0.0.1", 1), b"x")])
        del places[0]
        await until(lambda: look_up("n:1", b"y") == ("127.0.0.1", 2))

    run(main())


def test_a_failure_is_told_once_and_what_was_known_holds() -> None:
    async def main() -> None:
        answers: list[Any] = [OSError("no such name")]

        def ask(host: str, port: int) -> tuple[Any, ...]:
            if isinstance(answers[0], Exception):
                raise answers[0]
            return PLACE

        told = Told(ask, again_s=0.0)
        look_up = told.resolver.look_up
        assert look_up("n:1", b"x") is None
        await until(lambda: told.failed == [("n:1", "no such name")])
        with pytest.raises(OSError, match="'n' is not resolved: no such name"):
            look_up("n:1", b"x")
        answers[0] = PLACE
        told.resolver._names["n:1"].next_at = 0.0
        with pytest.raises(OSError):
            look_up("n:1", b"x")
        await until(lambda: told.resolver._names["n:1"].found == PLACE)
        answers[0] = ValueError("rubbish")
        await until(lambda: look_up("n:1", b"x") == PLACE and len(told.failed) == 2)
        assert told.failed[1] == ("n:1", "rubbish")
        assert look_up("n:1", b"x") == PLACE

    run(main())


def test_a_silent_resolver_is_told_and_costs_a_bounded_number_of_threads_and_datagrams() -> None:
    async def main() -> None:
        answers, asked = threading.Event(), []

        def ask(host: str, port: int) -> tuple[Any, ...]:
            asked.append(host)
            answers.wait(30)
            return PLACE

        told = Told(ask, patience_s=0.05)
        for i in range(50):
            assert told.resolver.look_up(f"n{i}:1", b"x") is None
        for _ in range(100):
            told.resolver.look_up("n0:1", b"x")
        assert len(told.resolver._names["n0:1"].waiting) == MAX_WAITING
        await until(lambda: len(told.failed) == 50)
        assert len(asked) == MAX_LOOKUPS
        assert all("no answer within" in reason for _, reason in told.failed)
        answers.set()
        await until(lambda: len(asked) == 50)
        await until(lambda: told.resolver._names["n49:1"].found == PLACE)

    run(main())


def test_a_driver_tells_and_counts_a_name_that_is_not_resolved_and_goes_on() -> None:
    async def main() -> None:
        def ask(host: str, port: int) -> tuple[Any, ...]:
            raise OSError("no such name")

        told: list[NodeEvent] = []
        domain = Domain("model", "tokenizer")
        node, other = (Node(name, domain, rng=random.Random(i), now=0.0) for i, name in enumerate("ab"))
        transport, there = await UdpTransport.open(ask=ask), await UdpTransport.open()
        async with Driver(node, transport, told.append) as driver, Driver(other, there) as beside:
            other.add_endpoint("0", incarnation=1, now=beside.now())
            other.add_peer("a", transport.address, beside.now())
            node.add_peer("b", there.address, driver.now())
            node.add_peer("c", "node-2.svc:7000", driver.now())
            await until(lambda: node.counters["names_unresolved"] == 1 and bool(told))
            await until(lambda: "b/0" in node.digests())
            await until(lambda: node.counters["send_errors"] > 0)
        assert [e for e in told if isinstance(e, AddressFailed)] == [AddressFailed("node-2.svc:7000", "no such name")]

    run(main())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7000", PLACE),
        ("[::1]:7000", ("::1", 7000)),
        ("node-2.svc:7000", ("node-2.svc", 7000)),
        (("node-2.svc", 7000), ("node-2.svc", 7000)),
        *((bad, None) for bad in ("", "x", ":1", "x:", "x:0", "x:65536", "a b:1", "a/b:1", "x\0:1", "x" * 300 + ":1")),
        *((bad, None) for bad in (("x",), ("x", "y"), ("x", None), (7, 7), ())),
    ],
)
def test_a_host_and_a_port_are_read_and_nothing_else(address: Any, expected: Any) -> None:
    if expected is None:
        with pytest.raises(OSError, match="host:port"):
            host_and_port(address)
    else:
        assert host_and_port(address) == expected
