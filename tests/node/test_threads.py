"""A node and threads: one thread calls it, any other is refused at once; or many do, through `ThreadSafeNode`."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from routing import DOMAIN, IDLE, new, prompt
from test_aio import QUICK, Wire, until
from test_node_clock import CALLS

from prefixroute import BlocksRemoved, EngineBatch, Node, NodeSettings, Outcome, UsageError, metrics
from prefixroute.aio import Driver
from prefixroute.testing import stored
from prefixroute.threads import ThreadSafeNode

THREADS = 8
NOW = time.monotonic


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual, so that they meet within calls."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call returns or raises in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def own(name: str = "a") -> Node:
    node = new(name)
    node.add_endpoint("0", incarnation=1, now=0.0)
    node.set_load(f"{name}/0", IDLE, 0.0)
    node.add_peer("b", "b", 0.0)
    return node


@pytest.mark.parametrize("call", CALLS)
def test_the_first_call_of_a_second_thread_is_refused_and_does_no_harm(call: str) -> None:
    node = own()
    with pytest.raises(UsageError, match=r"called from two threads.*prefixroute.threads.ThreadSafeNode\(node\)"):
        elsewhere(lambda: CALLS[call](node, 1.0))
    assert node.route(prompt(1, 3), 1.0).target == "a/0"
    assert node.stats(1.0).counters["decisions_local"] == 1
    node._check()


def test_it_may_be_made_in_one_thread_and_used_in_another() -> None:
    node = new("a")
    assert elsewhere(lambda: node.add_endpoint("0", incarnation=1, now=0.0)) == "a/0"
    with pytest.raises(UsageError, match="two threads"):
        node.route(prompt(1, 3), 0.0)


def test_a_thread_takes_a_node_over() -> None:
    node = own()

    def work() -> str:
        node.take_over()
        return node.route(prompt(1, 3), 1.0).target

    assert elsewhere(work) == "a/0"
    with pytest.raises(UsageError, match="two threads"):
        node.handle_timer(1.0)
    node.take_over()
    node.handle_timer(1.0)


def hammer(node: Node, now: Callable[[], float], calls: int = 150) -> list[str]:
    """Route and report from eight threads, with batches, probes and looks in between; return what was raised."""
    raised: list[str] = []
    start = threading.Barrier(THREADS)

    def work(i: int) -> None:
        rng = random.Random(i)
        start.wait()
        for j in range(calls):
            try:
                tokens = prompt(rng.randrange(20), rng.randrange(1, 40))
                decision = node.route(tokens, now(), tenant=f"t{i}")
                kind = rng.random()
                if kind < 0.2:
                    node.apply("a/0", stored(tokens), now())
                elif kind < 0.3:
                    handles = [h for event in stored(tokens).events for h in event.handles]  # type: ignore[union-attr]
                    node.apply("a/0", EngineBatch((BlocksRemoved(tuple(handles[::-1])),)), now())
                elif kind < 0.4:
                    node.set_load("a/0", IDLE, now())
                elif kind < 0.5:
                    node.handle_timer(now())
                    node.datagrams_to_send(now())
                elif kind < 0.6:
                    assert node.stats(now()).in_flight >= 0 and node.counters["decisions_local"] > 0
                    node.events()
                elif kind < 0.65:
                    metrics.render(node, now())
                node.first_token(decision, now())
                node.report(decision, Outcome.served(0, 0.001) if j % 3 else Outcome.failed(), now())
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_a_plain_node_refuses_all_threads_but_one_and_stays_whole() -> None:
    node = own()
    raised = hammer(node, lambda: 1.0, 30)
    assert len(raised) == THREADS * 30, "the main thread has it"
    assert all(error.startswith("UsageError: node 'a' is called from two threads") for error in raised)
    node.handle_timer(2.0)
    node._check()


def test_eight_threads_share_a_thread_safe_node() -> None:
    node = ThreadSafeNode(own())
    assert hammer(node, lambda: 1.0) == []
    assert node.counters["decisions_local"] == THREADS * 150
    assert node.counters["outcomes_served"] + node.counters["outcomes_failed"] == THREADS * 150
    assert node.stats(1.0).in_flight == 0
    assert sum(row.requests for row in node.stats(1.0).tenants) == THREADS * 150
    node._check()


def test_eight_threads_share_the_node_of_a_driver() -> None:
    """As handlers with `def` of a server: its event loop goes on meanwhile, on a plain transport."""

    async def main(safe: bool) -> list[str]:
        mailboxes: dict[str, Any] = {}
        nodes = {
            name: Node(name, DOMAIN, rng=random.Random(name), now=NOW(), settings=NodeSettings(interval_s=0.02))
            for name in "ab"
        }
        for name, node in nodes.items():
            node.add_endpoint("0", incarnation=1, now=NOW())
            node.add_peer("b" if name == "a" else "a", "b" if name == "a" else "a", NOW())
        drivers = [Driver(node, Wire(mailboxes, name)) for name, node in nodes.items()]
        async with drivers[0] as driver, drivers[1]:
            await until(lambda: len(nodes["a"].digests()) == 2)
            # Wrapped after the driver got it: the driver takes the lock as well.
            node = ThreadSafeNode(nodes["a"]) if safe else nodes["a"]
            rounds = node.counters["rounds"]
            raised = await asyncio.to_thread(hammer, node, driver.now, 60)
            await until(lambda: node.counters["rounds"] > rounds + 3)
            assert "node_errors" not in node.counters
            if safe:
                await asyncio.to_thread(node.apply, "a/0", stored(prompt(999, 30)), driver.now())
                await asyncio.to_thread(driver.wake)
                assert node.residency("a/0").canonical_blocks >= 30
                views = [lambda node=node: list(node.digests()["a/0"].keys) for node in nodes.values()]
                await until(lambda: views[0]() == views[1]() != [])
            node._check()
        return raised

    assert asyncio.run(main(True)) == []
    raised = asyncio.run(main(False))
    assert len(raised) == THREADS * 60
    assert all("called from two threads" in error for error in raised)


def test_a_thread_safe_node_is_the_node_and_has_its_methods() -> None:
    plain = own()
    node = ThreadSafeNode(plain)
    assert node is plain
    assert isinstance(node, Node)
    assert ThreadSafeNode(node) is node
    assert node.route.__doc__ == Node.route.__doc__
    assert elsewhere(lambda: node.route(prompt(1, 3), 1.0)).local
    assert node.route(prompt(1, 3), 1.0).local
    assert type(own()) is Node, "others stay as they are"
    for name in vars(Node):
        if not name.startswith("_") and callable(getattr(Node, name)) and name != "thread_id":
            assert getattr(ThreadSafeNode, name) is not getattr(Node, name), f"{name} takes the lock"


class _Mine(Node):
    """A subclass of a caller's."""


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (None, "wraps a Node"),
        ("a", "wraps a Node"),
        (Node, "wraps a Node"),
        (_Mine("a", DOMAIN, rng=random.Random(1), now=0.0, settings=QUICK), "subclass _Mine"),
    ],
)
def test_what_is_no_node_is_refused(node: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ThreadSafeNode(node)


def test_methods_that_call_methods_do_not_wait_for_themselves() -> None:
    node = ThreadSafeNode(own())
    node.leave(1.0)
    assert node.stats(1.0).endpoints == ()
