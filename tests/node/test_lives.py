"""Lives of an endpoint in one node: what comes with the handle of an older one changes nothing, and never raises."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from routing import IDLE, known, mesh, new, prompt

from prefixroute import EndpointHandle, LoadReport, Node, Outcome, UsageError
from prefixroute.testing import Mesh, stored

OLD = ("late", "late", "late")
NEW = ("remove", "register", "news")


def orders() -> Iterator[tuple[str, ...]]:
    """Three late batches between, before and after what the new life does: 20 orders."""
    for places in combinations(range(6), 3):
        late, rest = iter(OLD), iter(NEW)
        yield tuple(next(late) if i in places else next(rest) for i in range(6))


@pytest.mark.parametrize("order", list(orders()), ids="-".join)
@pytest.mark.parametrize("incarnation", [1, 2])
def test_late_batches_of_an_older_life_are_dropped(order: tuple[str, ...], incarnation: int) -> None:
    net = mesh(2)
    node = net.nodes["n0"]
    old = new_one = node.add_endpoint("e", incarnation=1, now=net.now)
    late = 0
    for what in order:
        if what == "late":
            node.apply(old, stored(prompt(late, 3)), net.now)
            late += 1
        elif what == "remove":
            node.remove_endpoint(old, net.now)
        elif what == "register":
            new_one = node.add_endpoint("e", incarnation=incarnation, now=net.now)
        else:
            node.apply(new_one, stored(prompt(99, 10)), net.now)
    assert node.residency(new_one).canonical_blocks == 10
    assert node.counters["older_life_batches"] == sum(what == "late" for what in order[order.index("remove") :])
    net.run(3.0)
    assert known(net.nodes["n1"], "n0/e") == 10
    for each in net.nodes.values():
        each._check()


def twice(node: Node, now: float = 0.0) -> tuple[str, str]:
    """An endpoint that was removed and added again: the handles of both lives."""
    old = node.add_endpoint("0", incarnation=1, now=now)
    node.remove_endpoint(old, now)
    return old, node.add_endpoint("0", incarnation=2, now=now)


@pytest.mark.parametrize(
    ("call", "counted"),
    [
        (lambda node, old: node.apply(old, stored(prompt(1, 3)), 0.0), "batches"),
        (lambda node, old: node.set_load(old, LoadReport(refusing=True), 0.0), "reports"),
        (lambda node, old: node.set_load(old, LoadReport(asleep=True), 0.0), "reports"),
        (lambda node, old: node.go_by_history(old, "no events", 0.0), "reasons"),
        (lambda node, old: node.remove_endpoint(old, 0.0), "removals"),
    ],
)
@pytest.mark.parametrize("again", [True, False])
def test_an_old_handle_changes_nothing(call: Callable[[Node, str], None], counted: str, again: bool) -> None:
    node = new("a")
    old, now = twice(node)
    if not again:
        node.remove_endpoint(now, 0.0)
    else:
        node.apply(now, stored(prompt(2, 5)), 0.0)
        node.set_load(now, IDLE, 0.0)
    node.events()
    call(node, old)
    assert node.counters[f"older_life_{counted}"] == 1
    assert node.events() == []
    if again:
        assert node.residency(now).canonical_blocks == 5
        assert node.load(now, 0.0).prefill_tokens_per_s == 1000
        assert node.route(prompt(2, 5), 0.0).matched_tokens == 80
    node._check()


def test_looking_at_an_older_life_is_a_mistake_that_is_named() -> None:
    node = new("a")
    old, _ = twice(node)
    for look in (node.residency, lambda handle: node.load(handle, 0.0)):
        with pytest.raises(UsageError, match="this life of 'a/0' has ended"):
            look(old)


def test_the_text_means_whichever_life_there_is() -> None:
    node = new("a")
    old, now = twice(node)
    assert old == now == "a/0" and hash(old) == hash("a/0") and isinstance(old, str)
    node.apply("a/0", stored(prompt(1, 4)), 0.0)
    assert node.residency("a/0").canonical_blocks == node.residency(now).canonical_blocks == 4
    node.remove_endpoint("a/0", 0.0)
    with pytest.raises(UsageError, match="no endpoint of this node"):
        node.apply("a/0", stored(prompt(1, 4)), 0.0)


def test_a_handle_keeps_its_life_wherever_it_goes() -> None:
    node = new("a")
    old, now = twice(node)
    assert isinstance(old, EndpointHandle)
    for way in (copy.copy, copy.deepcopy, lambda handle: pickle.loads(pickle.dumps(handle))):
        node.apply(way(old), stored(prompt(1, 4)), 0.0)
        node.apply(way(now), stored(prompt(3, 1)), 0.0)
    assert node.counters["older_life_batches"] == 3
    assert node.residency(now).canonical_blocks == 1
    assert json.loads(json.dumps({now: now})) == {"a/0": "a/0"}
    assert type(str(now)) is str and f"{now}" == "a/0"


def test_a_handle_of_a_former_node_of_this_name_is_of_an_older_life() -> None:
    """As after a reload within one process: its follower still runs."""
    before = Node("a", new("a").domain, rng=random.Random(7), now=0.0)
    old = before.add_endpoint("0", incarnation=1, now=0.0)
    node = new("a")
    node.add_endpoint("0", incarnation=2, now=0.0)
    node.apply(old, stored(prompt(1, 4)), 0.0)
    assert node.residency("a/0").canonical_blocks == 0
    with pytest.raises(UsageError, match="no endpoint of this node"):
        new("b").apply(old, stored(prompt(1, 4)), 0.0)


# --- outcomes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handle", [False, True])
@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.served(cached_tokens=0, ttft_s=0.1),
        Outcome.refused("full"),
        Outcome.failed("gone"),
        Outcome.cancelled(),
        Outcome.declined(),
    ],
    ids=lambda outcome: outcome.kind.name,
)
def test_an_outcome_of_an_older_life_teaches_nothing_of_the_new_one(outcome: Outcome, handle: bool) -> None:
    net = Mesh(new("a"))
    node = net.nodes["a"]
    old = node.add_endpoint("0", incarnation=1, now=0.0)
    node.apply(old, stored(prompt(1, 6)), 0.0)
    decision = node.route(prompt(1, 6), 0.0)
    assert decision.matched_tokens == 96
    node.remove_endpoint(old, 0.0)
    now = node.add_endpoint("0", incarnation=2, now=0.0)
    node.apply(now, stored(prompt(1, 6)), 0.0)
    before = node.stats(0.0).endpoints
    assert node.report(decision, outcome, 0.0, endpoint=old if handle else None) in (None, "a/0")
    assert node.counters["older_life_outcomes"] == 1
    after = node.stats(0.0).endpoints
    assert (after[0].accuracy, after[0].confidence, after[0].usable) == (before[0].accuracy, before[0].confidence, True)
    assert node.route(prompt(1, 6), 0.0).matched_tokens == 96
    node._check()


def test_a_report_by_the_handle_of_another_life_is_late() -> None:
    node = new("a")
    old, now = twice(node)
    decision = node.route(prompt(1, 6), 0.0)
    assert node.report(decision, Outcome.failed("of the old one"), 0.0, endpoint=old) is None
    assert node.counters["older_life_outcomes"] == 1
    assert node.stats(0.0).in_flight == 1, "the attempt at the new one goes on"
    assert node.report(decision, Outcome.served(0, 0.1), 0.0, endpoint=now) is None
    assert node.counters["outcomes_served"] == 1
    assert node.stats(0.0).in_flight == 0
