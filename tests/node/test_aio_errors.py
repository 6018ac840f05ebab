"""The driver does not die: whatever its transport, its callback or its clock does, gossip goes on, and is told once.

Each fleet here is a node with the fault beside one that is well, over mailboxes in memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from test_aio import DOMAIN, QUICK, Wire, new, run, until

from prefixroute import ClockJumped, Node, NodeEvent, NodeSettings, UsageError, metrics
from prefixroute.aio import MOST_SENDS, RETRY_S, SEND_S, Driver
from prefixroute.testing import stored

NOW = time.monotonic


class LibraryError(Exception):
    """As an HTTP client's own: no OSError."""


class Odd(BaseException):
    """As some frameworks cancel with."""


ERRORS = [
    OSError("no"),
    LibraryError("no"),
    Odd("no"),
    asyncio.CancelledError(),
    asyncio.TimeoutError(),
    StopIteration(),
]


class Faulty(Wire):
    """Fails as it is told to, each time."""

    def __init__(self, mailboxes: dict[str, Any], name: str) -> None:
        super().__init__(mailboxes, name)
        self.on_send: Callable[[Hashable], Any] | None = None
        self.on_receive: Callable[[], Any] | None = None
        self.received = 0

    async def send(self, address: Hashable, data: bytes) -> None:
        if self.on_send is not None:
            await self.on_send(address)
        await super().send(address, data)

    async def receive(self) -> tuple[bytes, Hashable]:
        self.received += 1
        if self.on_receive is not None:
            return await self.on_receive()
        return await super().receive()


def raising(error: BaseException) -> Callable[..., Any]:
    async def fail(*_: object) -> None:
        raise error

    return fail


class Fleet:
    """a, whose transport is faulty, and b and c, which are well."""

    def __init__(self, on_event: Callable[[NodeEvent], None] | None = None, **more: Any) -> None:
        mailboxes: dict[str, Any] = {}
        self.wire = Faulty(mailboxes, "a")
        self.nodes = {name: new(name) for name in "abc"}
        for name, node in self.nodes.items():
            node.add_endpoint("0", incarnation=1, now=NOW())
            for other in "abc":
                if other != name:
                    node.add_peer(other, other, NOW())
        self.a = self.nodes["a"]
        self.driver = Driver(self.a, self.wire, on_event, **more)
        self.drivers = [self.driver, *(Driver(self.nodes[name], Wire(mailboxes, name)) for name in "bc")]

    async def __aenter__(self) -> Fleet:
        for driver in self.drivers:
            await driver.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for driver in self.drivers:
            await driver.close()

    def heard(self) -> bool:
        """Whether all know of all endpoints."""
        return all(len(node.digests()) == 3 for node in self.nodes.values())


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "prefixroute.aio" and record.levelno == level
    ]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_any_error_of_send_is_counted_told_once_and_gossip_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.wire.on_send = raising(error)
        async with fleet:
            await until(lambda: fleet.a.counters["send_errors"] >= 10)
            assert not fleet.heard()
            fleet.wire.on_send = None
            await until(fleet.heard)
        assert "driver_ended" not in fleet.a.counters

    run(main())
    assert len(logged(caplog)) == 1
    assert "a send of the transport fails" in logged(caplog)[0]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_receiving_is_tried_again_after_a_pause(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.wire.on_receive = raising(error)
        began = NOW()
        async with fleet:
            await until(lambda: fleet.a.counters["receive_errors"] >= 3)
            assert NOW() - began >= 3 * RETRY_S, "1 and 2 pauses"
            assert fleet.wire.received <= 5
            assert fleet.a.counters["rounds"] >= 1
            fleet.wire.on_receive = None
            await until(fleet.heard)

    run(main())
    assert len(logged(caplog)) == 1


@pytest.mark.parametrize("rubbish", [None, "text", (b"x",), (None, "b"), ("text", "b"), (b"x", "b", 1), 7, (7, "b")])
def test_what_receive_returns_wrongly_is_counted(rubbish: object, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet = Fleet()

        async def garbage() -> Any:
            return rubbish

        fleet.wire.on_receive = garbage
        async with fleet:
            await until(lambda: fleet.a.counters["receive_errors"] >= 2)
            fleet.wire.on_receive = None
            await until(fleet.heard)

    run(main())
    assert 1 <= len(logged(caplog)) <= 2


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_of_the_callback_is_counted_and_the_next_event_comes(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[NodeEvent] = []

    def on_event(event: NodeEvent) -> None:
        told.append(event)
        raise error

    async def main() -> None:
        fleet = Fleet(on_event)
        async with fleet:
            await until(fleet.heard)
            await until(lambda: len(told) >= 4)
        assert fleet.a.counters["event_errors"] == len(told)

    run(main())
    assert len(logged(caplog)) == 1


def test_a_send_that_hangs_is_cut_off_and_the_others_are_heard_meanwhile() -> None:
    async def main() -> None:
        fleet = Fleet()
        hung: list[float] = []

        async def hang(address: Hashable) -> None:
            if address == "b":
                began = NOW()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    hung.append(NOW() - began)

        fleet.wire.on_send = hang
        async with fleet:
            await until(lambda: "c/0" in fleet.a.digests() and "a/0" in fleet.nodes["c"].digests())
            assert hung == [], "before the first was cut off"
            rounds = fleet.a.counters["rounds"]
            await until(lambda: fleet.a.counters["send_errors"] >= 3)
            assert fleet.a.counters["rounds"] > rounds + 3
            assert all(took >= 0.9 * SEND_S for took in hung)
            await until(fleet.heard)  # b hears of a through c

    run(main())


def test_sends_that_cannot_even_be_cut_off_are_bounded_and_closing_does_not_wait_for_them() -> None:
    async def main() -> None:
        fleet = Fleet()
        waiting = asyncio.Event()
        under_way = [0]

        async def stubborn(address: Hashable) -> None:
            under_way[0] += address == "b"
            while address == "b" and not waiting.is_set():
                try:
                    await waiting.wait()
                except asyncio.CancelledError:
                    continue

        fleet.wire.on_send = stubborn
        async with fleet:
            await until(lambda: fleet.a.counters["sends_dropped"] >= 5)
            assert under_way[0] == MOST_SENDS
            assert "a/0" in fleet.nodes["c"].digests()
        assert fleet.wire.closed == 1
        waiting.set()
        await asyncio.sleep(0.01)

    run(main())


def test_a_plain_function_may_send() -> None:
    class Plain(Faulty):
        def send(self, address: Hashable, data: bytes) -> int:  # type: ignore[override]
            self.mailboxes[str(address)].put_nowait((data, self.name))
            return len(data)

    async def main() -> None:
        fleet = Fleet()
        fleet.driver.transport = Plain(fleet.wire.mailboxes, "a")
        async with fleet:
            await until(fleet.heard)
        assert "send_errors" not in fleet.a.counters

    run(main())


def test_an_error_of_the_node_or_the_clock_is_counted_and_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        broken = [False]

        def clock() -> float:
            if broken[0]:
                raise LibraryError("no clock")
            return NOW()

        fleet = Fleet(clock=clock)
        async with fleet:
            await until(fleet.heard)
            broken[0] = True
            await until(lambda: fleet.a.counters["node_errors"] >= 3)
            broken[0] = False
            rounds = fleet.a.counters["rounds"]
            fleet.driver.wake()
            await until(lambda: fleet.a.counters["rounds"] >= rounds + 3)

    run(main())
    assert len(logged(caplog)) == 1


def test_a_clock_that_is_set_back_by_an_hour_does_not_stop_gossip() -> None:
    async def main() -> None:
        back_s = [0.0]
        told: list[NodeEvent] = []
        fleet = Fleet(told.append, clock=lambda: NOW() - back_s[0])
        async with fleet:
            await until(fleet.heard)
            back_s[0] = 3600.0
            rounds = fleet.a.counters["rounds"]
            await until(lambda: fleet.a.counters["rounds"] >= rounds + 5)
            assert len([event for event in told if isinstance(event, ClockJumped)]) == 1
            assert all(0 <= row.age_s < 10 for row in fleet.a.stats(fleet.driver.now()).endpoints)

    run(main())


# --- the end -----------------------------------------------------------------------------------------------


def test_a_driver_that_ends_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet = Fleet()
        async with fleet:
            await until(fleet.heard)
            fleet.driver._tasks[1].cancel()
            await until(lambda: fleet.a.counters["driver_ended"])
            assert fleet.a.stats(NOW()).counters["driver_ended"] == 1
            assert b'prefixroute_driver_ended_total{node="a"} 1.0' in metrics.render(fleet.a, NOW())
        assert fleet.wire.closed == 1

    run(main())
    (line,) = logged(caplog, logging.ERROR)
    assert "its driver has ended" in line


def test_a_driver_that_is_closed_has_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet = Fleet()
        async with fleet:
            await until(fleet.heard)
        assert "driver_ended" not in fleet.a.counters

    run(main())
    assert logged(caplog, logging.ERROR) == []


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_real_cancellation_still_ends_it(call: str) -> None:
    """While the transport waits, as while it fails."""

    async def main() -> None:
        for error in (None, asyncio.CancelledError()):
            fleet = Fleet()
            setattr(fleet.wire, f"on_{call}", raising(error) if error else None)
            async with fleet:
                await until(lambda fleet=fleet: fleet.a.counters["rounds"] >= 2)

    run(main())


# --- what a transport says of itself -------------------------------------------------------------------------


class Small(Faulty):
    max_datagram: Any = 1000

    async def send(self, address: Hashable, data: bytes) -> None:
        self.sizes.append(len(data))
        await super().send(address, data)

    sizes: list[int]


def test_no_datagram_is_larger_than_the_transport_carries_even_when_that_changes() -> None:
    async def main() -> None:
        mailboxes: dict[str, Any] = {}
        wires = {name: Small(mailboxes, name) for name in "ab"}
        nodes = {name: new(name, NodeSettings(interval_s=0.02, datagram_bytes=9000)) for name in "ab"}
        drivers = []
        for name, other in (("a", "b"), ("b", "a")):
            wires[name].sizes = []
            nodes[name].add_peer(other, other, NOW())
            drivers.append(Driver(nodes[name], wires[name]))
        endpoint = nodes["a"].add_endpoint("0", incarnation=1, now=NOW())

        def equal(blocks: int) -> bool:
            """Whether b holds what a has published of at least so many blocks."""
            ours, theirs = (node.digests().get(endpoint) for node in nodes.values())
            if ours is None or theirs is None or nodes["a"].residency(endpoint).canonical_blocks < blocks:
                return False
            return len(ours.keys) * ours.every >= 0.9 * blocks and list(ours.keys) == list(theirs.keys)

        async with drivers[0], drivers[1]:
            for most, blocks in ((1000, 1500), (4000, 3000), (900, 4500), (None, 6000)):
                wires["a"].max_datagram = most
                # One more sending, and it is known.
                sent = len(wires["a"].sizes)
                await until(lambda sent=sent: len(wires["a"].sizes) > sent + 2)
                wires["a"].sizes.clear()
                nodes["a"].apply(endpoint, stored(list(range(16 * blocks))), drivers[0].now())
                drivers[0].wake()
                await until(lambda blocks=blocks: equal(blocks))
                assert max(wires["a"].sizes) <= (most or 9000)
                assert most is None or max(wires["a"].sizes) > 0.5 * most

    run(main())


@pytest.mark.parametrize("most", [100, 0, -1, "1200", 1200.0, True])
def test_a_transport_that_carries_less_than_gossip_needs_is_refused_at_once(most: Any) -> None:
    async def main() -> None:
        wire = Small({}, "a")
        wire.max_datagram = most
        with pytest.raises(UsageError, match="gossip needs datagrams of at least"):
            Driver(new("a"), wire)

    run(main())


def test_a_transport_that_gets_too_small_meanwhile_is_told_and_gossip_goes_on() -> None:
    async def main() -> None:
        fleet = Fleet()
        async with fleet:
            fleet.wire.max_datagram = 10  # type: ignore[attr-defined]
            await until(lambda: fleet.a.counters["node_errors"])
            await until(fleet.heard)

    run(main())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None, Wire({}, "a")), "node must be of type Node"),
        ((new("a"), None), "a transport has send, receive and close"),
        ((new("a"), Wire), "a transport has send, receive and close"),
        ((new("a"), Wire({}, "a"), "log"), "on_event must be a plain function"),
        ((new("a"), Wire({}, "a"), Wire({}, "a").close), "on_event must be a plain function"),
        ((new("a"), Wire({}, "a"), None, 5.0), "clock must be a function"),
    ],
)
def test_a_driver_says_what_to_pass(arguments: tuple[Any, ...], says: str) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=says):
            Driver(*arguments)

    run(main())


def test_a_node_of_another_thread_is_taken_over_by_its_driver() -> None:
    node = Node("a", DOMAIN, rng=random.Random(1), now=NOW(), settings=QUICK)
    node.add_endpoint("0", incarnation=1, now=NOW())

    async def main() -> None:
        async with Driver(node, Wire({}, "a")):
            await until(lambda: node.counters["rounds"] >= 3)
        assert "node_errors" not in node.counters

    asyncio.run(asyncio.to_thread(asyncio.run, main()))  # type: ignore[arg-type]
