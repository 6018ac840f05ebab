"""The asyncio edge: the driver over UDP on loopback, over a transport in memory, and over transports that fail.

Nothing sleeps for a fixed time: `until` asks again and again, until a deadline that only a failure meets.
"""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import pytest

from prefixroute import (
    DatagramRejected,
    Domain,
    LoadReport,
    Node,
    NodeEvent,
    NodeSettings,
    PeerChanged,
    PushBackChanged,
    UsageError,
)
from prefixroute.aio import MAX_QUEUED_DATAGRAMS, READ_AT_ONCE, Driver, Transport, UdpTransport
from prefixroute.endpoint.local import PORTION_BLOCKS
from prefixroute.testing import stored

DEADLINE_S = 30.0
DOMAIN = Domain("m", "t")
QUICK = NodeSettings(interval_s=0.02, suspect_after_s=20.0)
SLOW = NodeSettings(interval_s=3600.0, suspect_after_s=7200.0, forget_after_s=9999.0)
PROMPT = list(range(1000, 1000 + 20 * 16 + 1))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end, and see that no task is left and nothing is complained of."""

    async def watched() -> None:
        complaints: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        await asyncio.wait_for(main, DEADLINE_S)
        await asyncio.sleep(0)
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert complaints == []

    asyncio.run(watched())
    gc.collect()


async def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)


def new(name: str, settings: NodeSettings = QUICK) -> Node:
    return Node(name, DOMAIN, rng=random.Random(name), now=time.monotonic(), settings=settings)


class Wire:
    """A transport in memory: mailboxes by name."""

    def __init__(self, mailboxes: dict[str, asyncio.Queue[tuple[bytes, Hashable]]], name: str) -> None:
        self.mailboxes = mailboxes
        self.name = name
        self.closed = 0
        mailboxes[name] = asyncio.Queue()

    async def send(self, address: Hashable, data: bytes) -> None:
        self.mailboxes[str(address)].put_nowait((data, self.name))

    async def receive(self) -> tuple[bytes, Hashable]:
        return await self.mailboxes[self.name].get()

    async def close(self) -> None:
        self.closed += 1


# --- over UDP ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_nodes_learn_of_each_other_over_udp(n: int) -> None:
    async def main() -> None:
        nodes = [new(f"n{i}") for i in range(n)]
        transports = [await UdpTransport.open() for _ in nodes]
        drivers = [Driver(node, transport) for node, transport in zip(nodes, transports, strict=True)]
        for i, node in enumerate(nodes):
            node.add_endpoint("0", url=f"http://n{i}", incarnation=1, now=drivers[i].now())
            for j, transport in enumerate(transports):
                if j != i:
                    node.add_peer(f"n{j}", transport.address, drivers[i].now())
        for driver in drivers:
            await driver.__aenter__()
        last = nodes[-1]
        last.apply(f"{last.node}/0", stored(PROMPT), drivers[-1].now())
        drivers[-1].wake()
        await until(lambda: all(len(node.stats(time.monotonic()).endpoints) == n for node in nodes))
        await until(lambda: all(node.stats(time.monotonic()).index_keys == 20 for node in nodes))
        decision = nodes[0].route(PROMPT, drivers[0].now())
        assert decision.matched_tokens == 320
        assert decision.target == f"{last.node}/0"
        row = next(row for row in nodes[0].stats(drivers[0].now()).endpoints if row.endpoint == decision.target)
        assert 0 < row.rtt_s < 5
        for driver in drivers:
            await driver.close()
        assert not any("errors" in name or "rejected" in name for node in nodes for name in node.counters)

    run(main())


def test_a_udp_transport_carries_datagrams_between_its_addresses() -> None:
    async def main() -> None:
        a, b = await UdpTransport.open(), await UdpTransport.open("127.0.0.1", 0)
        assert a.address[0] == "127.0.0.1"
        assert a.address != b.address
        await a.send(b.address, b"one")
        assert await b.receive() == (b"one", a.address)
        await a.send("{}:{}".format(*b.address), b"two")
        assert await b.receive() == (b"two", a.address)
        with pytest.raises(UsageError, match=r"a UDP address is \(host, port\)"):
            await a.send(7001, b"three")
        for contact in ("", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:99999", "[::1]:x"):
            with pytest.raises(OSError, match="no numeric host:port"):
                await a.send(contact, b"four")
        await a.close()
        await b.close()
        await b.close()

    run(main())


def test_an_address_in_use_is_an_error_at_once() -> None:
    async def main() -> None:
        a = await UdpTransport.open()
        with pytest.raises(OSError):
            await UdpTransport.open(*a.address)
        await a.close()

    run(main())


def test_datagrams_to_a_dead_peer_do_no_harm() -> None:
    async def main() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
            gone.bind(("127.0.0.1", 0))
            address = gone.getsockname()
        node = new("a")
        transport = await UdpTransport.open()
        async with Driver(node, transport) as driver:
            node.add_peer("b", address, driver.now())
            await until(lambda: node.counters["rounds"] >= 5)

    run(main())


def test_a_full_inbox_drops_the_newest_as_a_kernel_would() -> None:
    async def main() -> None:
        transport = await UdpTransport.open()
        for i in range(MAX_QUEUED_DATAGRAMS):
            transport._inbox.put_nowait((b"%d" % i, ("127.0.0.1", 1)))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(b"more", transport.address)
        transport._read()
        received = [(await transport.receive())[0] for _ in range(MAX_QUEUED_DATAGRAMS)]
        assert received == [b"%d" % i for i in range(MAX_QUEUED_DATAGRAMS)]
        assert transport._inbox.empty()
        await transport.close()

    run(main())


def test_of_a_flood_a_bounded_share_is_read_and_good_datagrams_come_through() -> None:
    async def main() -> None:
        transport = await UdpTransport.open()
        transport.screen = lambda data, source: data == b"good"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            for _ in range(2 * READ_AT_ONCE):
                other.sendto(b"junk", transport.address)
            other.sendto(b"good", transport.address)
            transport._read()
            # It reads no more for a while, and then what was left.
            assert transport._pause is not None
            assert transport._inbox.empty()
            assert (await transport.receive())[0] == b"good"
        await transport.close()

    run(main())


def test_junk_from_the_network_is_told_and_survived() -> None:
    async def main() -> None:
        events: list[NodeEvent] = []
        transport = await UdpTransport.open()
        async with Driver(new("a"), transport, events.append):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                other.sendto(b"GET / HTTP/1.1\r\n\r\n", transport.address)
            await until(lambda: events)
        assert [event.kind for event in events if isinstance(event, DatagramRejected)] == ["truncated"]

    run(main())


# --- over a transport of the caller's ----------------------------------------------------------------------


def test_any_transport_will_do_and_is_closed_at_the_end() -> None:
    async def main() -> None:
        mailboxes: dict[str, asyncio.Queue[tuple[bytes, Hashable]]] = {}
        wires = [Wire(mailboxes, name) for name in "ab"]
        a, b = new("a"), new("b")
        told: dict[str, list[NodeEvent]] = {"a": [], "b": []}
        a.add_peer("b", "b", time.monotonic())
        b.add_peer("a", "a", time.monotonic())
        b.add_endpoint("0", incarnation=1, now=time.monotonic())
        async with Driver(a, wires[0], told["a"].append), Driver(b, wires[1], told["b"].append):
            await until(lambda: a.stats(0.0).endpoints)
            await until(lambda: PeerChanged("a", "heard") in told["b"])
        assert PeerChanged("b", "heard") in told["a"]
        assert [wire.closed for wire in wires] == [1, 1]
        assert a.events() == [], "events go to the callback"

    run(main())


def test_a_clock_of_the_callers_is_used() -> None:
    async def main() -> None:
        now = [5000.0]
        node = Node("a", DOMAIN, rng=random.Random(1), now=now[0], settings=QUICK)
        async with Driver(node, Wire({}, "a"), clock=lambda: now[0]) as driver:
            assert driver.now() == 5000.0
            await until(lambda: node.counters["rounds"] == 1)
            now[0] += 1.0
            driver.wake()
            await until(lambda: node.counters["rounds"] == 2)
            assert node.next_timer() > 5001.0

    run(main())


def test_waking_the_driver_delivers_news_before_the_next_round() -> None:
    async def main() -> None:
        events: list[NodeEvent] = []
        node = new("a", SLOW)
        endpoint = node.add_endpoint("0", incarnation=1, now=time.monotonic())
        async with Driver(node, Wire({}, "a"), events.append) as driver:
            await until(lambda: node.counters["rounds"] == 1)
            node.set_load(endpoint, LoadReport(refusing=True, reason="draining"), driver.now())
            assert events == []
            driver.wake()
            await until(lambda: events)
        assert events == [PushBackChanged("a/0", "refusing", "draining")]
        assert node.counters["rounds"] == 1

    run(main())


def test_a_wake_while_the_driver_is_sending_is_not_lost() -> None:
    async def main() -> None:
        events: list[NodeEvent] = []
        node = new("a", SLOW)
        node.add_peer("b", "b", time.monotonic())
        endpoint = node.add_endpoint("0", incarnation=1, now=time.monotonic())

        class Slow(Wire):
            async def send(self, address: Hashable, data: bytes) -> None:
                await asyncio.sleep(0)
                # The node's news comes while the round's datagrams are under way, after events were collected.
                asyncio.get_running_loop().call_soon(self.news)

            def news(self) -> None:
                node.set_load(endpoint, LoadReport(refusing=True), driver.now())
                driver.wake()

        driver = Driver(node, Slow({}, "a"), events.append)
        async with driver:
            await until(lambda: any(isinstance(event, PushBackChanged) for event in events))

    run(main())


# --- leaving -----------------------------------------------------------------------------------------------


def test_closing_twice_is_harmless_and_waiting_afterwards_returns() -> None:
    async def main() -> None:
        wire = Wire({}, "a")
        driver = Driver(new("a"), wire)
        await driver.wait()
        async with driver:
            await driver.close()
            await driver.wait()
        assert wire.closed == 2

    run(main())


def test_closing_right_after_a_wake_does_not_hang() -> None:
    async def main() -> None:
        for _ in range(20):
            node = new("a")
            driver = Driver(node, Wire({}, "a"))
            async with driver:
                await until(lambda node=node: node.counters["rounds"])
                driver.wake()

    run(main())


def test_closing_before_the_first_step_is_harmless() -> None:
    async def main() -> None:
        async with Driver(new("a"), Wire({}, "a")):
            pass

    run(main())


def test_waiting_ends_when_the_driver_is_closed_elsewhere() -> None:
    async def main() -> None:
        driver = Driver(new("a"), Wire({}, "a"))
        async with driver:
            waiting = asyncio.create_task(driver.wait())
            await asyncio.sleep(0)
        await waiting

    run(main())


def test_cancelling_the_body_leaves_nothing_behind() -> None:
    async def main() -> None:
        wire = Wire({}, "a")
        entered = asyncio.Event()

        async def serve() -> None:
            async with Driver(new("a"), wire) as driver:
                entered.set()
                await driver.wait()

        task = asyncio.create_task(serve())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert wire.closed == 1

    run(main())


def test_an_error_of_the_body_passes_through() -> None:
    async def main() -> None:
        wire = Wire({}, "a")
        with pytest.raises(KeyError):
            async with Driver(new("a"), wire):
                raise KeyError("mine")
        assert wire.closed == 1

    run(main())


# --- failing transports ------------------------------------------------------------------------------------


class Broken(Wire):
    """A transport whose first sends fail, or whose receiving does."""

    def __init__(self, send_error: Exception | None = None, receive_error: Exception | None = None) -> None:
        super().__init__({}, "a")
        self.send_error = send_error
        self.receive_error = receive_error

    async def send(self, address: Hashable, data: bytes) -> None:
        if self.send_error is not None:
            raise self.send_error

    async def receive(self) -> tuple[bytes, Hashable]:
        if self.receive_error is not None:
            raise self.receive_error
        return await super().receive()


def peered(name: str = "a") -> Node:
    node = new(name)
    node.add_peer("b", "b", time.monotonic())
    return node


def test_an_error_in_sending_is_counted_and_gossip_goes_on() -> None:
    async def main() -> None:
        node = peered()
        async with Driver(node, Broken(send_error=OSError("network is unreachable"))):
            await until(lambda: node.counters["send_errors"] >= 5)
        assert node.counters["rounds"] >= 5

    run(main())


def test_transports_keep_the_protocol() -> None:
    async def main() -> None:
        udp = await UdpTransport.open()
        transports: list[Transport] = [udp, Wire({}, "a")]
        for transport in transports:
            await transport.close()

    run(main())


def test_nodes_learn_each_other_over_udp_from_one_seed_and_hear_one_leave() -> None:
    async def main() -> None:
        wires = [await UdpTransport.open() for _ in range(4)]
        drivers = []
        for i, wire in enumerate(wires):
            settings = NodeSettings(interval_s=0.02, learn_peers=True, contact="{}:{}".format(*wire.address))
            node = Node(f"n{i}", DOMAIN, rng=random.Random(i), now=time.monotonic(), settings=settings)
            node.add_endpoint("0", url=f"http://n{i}", incarnation=1, now=time.monotonic())
            if i:
                node.add_peer("n0", wires[0].address, time.monotonic())
            drivers.append(Driver(node, wire))
        for driver in drivers:
            await driver.__aenter__()
        await until(lambda: all(len(d.node.stats(d.now()).peers) == 3 for d in drivers))
        await until(lambda: all(len(d.node.digests()) == 4 for d in drivers))
        await drivers[3].leave()
        await until(lambda: all(len(d.node.digests()) == 3 for d in drivers[:3]))
        assert "n3/0" not in drivers[3].node.digests()
        await drivers[3].leave()
        for driver in drivers[:3]:
            await driver.close()

    run(main())


class Flood:
    """A transport that always has another datagram, until `left` are taken."""

    def __init__(self, left: int) -> None:
        self.left = left

    async def send(self, address: Hashable, data: bytes) -> None:
        return

    async def receive(self) -> tuple[bytes, Hashable]:
        if not self.left:
            await asyncio.get_running_loop().create_future()
        self.left -= 1
        return b"no datagram", "somebody"

    async def close(self) -> None:
        return


def test_the_event_loop_goes_on_between_two_datagrams() -> None:
    async def main() -> None:
        flood = Flood(200)
        turns = 0
        async with Driver(Node("a", DOMAIN, rng=random.Random(1), now=0.0, settings=SLOW), flood):
            while flood.left:
                turns += 1
                await asyncio.sleep(0)
        assert turns >= 200

    run(main())


def test_the_event_loop_goes_on_between_two_slices() -> None:
    async def main() -> None:
        node = Node("a", DOMAIN, rng=random.Random(1), now=0.0, settings=SLOW)
        node.add_endpoint(incarnation=1, now=0.0)
        turns = 0
        async with Driver(node, Flood(0)) as driver:
            await asyncio.sleep(0)
            node.apply("a/0", stored(list(range(20 * PORTION_BLOCKS * 16))), driver.now())
            driver.wake()
            while node.residency("a/0").canonical_blocks < 20 * PORTION_BLOCKS:
                turns += 1
                await asyncio.sleep(0)
        assert turns >= 10

    run(main())
