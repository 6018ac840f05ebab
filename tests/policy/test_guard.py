"""The guard: which prompts stay where they entered, and what leaves all the same."""

from __future__ import annotations

import random

import pytest

from prefixroute import Candidate, Domain, Node, RentOrBuy, Request
from prefixroute.policy.entry import Entry
from prefixroute.policy.guard import guarded, is_stray
from prefixroute.testing import candidate

NODE = Node("n0", Domain("m", "t"), rng=random.Random(1), now=0.0)
CHAIN = NODE.chain(range(1600))


def weighed(name: str, matched: int, wait_s: float = 0.0, **more: float) -> Candidate:
    made = candidate(name, local=name == "n0/0", prompt_tokens=1600, depth=matched // 16, wait_s=wait_s)
    return made._replace(matched_tokens=matched, **more)


def entry(home: bool = True, busy_s: float = 0.0, only: bool = False) -> Entry:
    made = Entry()
    for i in range(100):
        made.arrived(CHAIN, 0 if home else 2, True, busy_s / 10, i / 10)
    made.only = only
    return made


def chosen(origin: Candidate, peer: Candidate, of: Entry | None) -> tuple[str, str]:
    choice = RentOrBuy().choose(Request(CHAIN, 10.0, of), [origin, peer], random.Random(1))
    assert {c.endpoint for c in choice.order} == {"n0/0", "n1/0"}, "nobody is lost as a fallback"
    return choice.order[0].endpoint, choice.reason


@pytest.mark.parametrize(
    ("here", "there", "stray"),
    [
        (0, 0, True),
        (800, 0, True),
        (800, 784, True),
        (1500, 1500, False),
        (0, 1500, False),
        (700, 700, True),
        (0, 400, True),
        (0, 900, False),
        (1000, 1400, False),
        (1000, 1100, True),
    ],
)
def test_a_stray_is_computed_there_rather_than_found_there(here: int, there: int, stray: bool) -> None:
    assert is_stray(weighed("n1/0", there), weighed("n0/0", here)) is stray


def test_a_stray_stays_at_a_sticky_node_and_leaves_another() -> None:
    busy, idle = weighed("n0/0", 0, wait_s=5.0), weighed("n1/0", 0)
    assert chosen(busy, idle, entry(home=True)) == ("n0/0", "local: it would be stored where it is not asked for")
    assert chosen(busy, idle, entry(home=False)) == ("n1/0", "shorter wait")
    assert chosen(busy, idle, None) == ("n1/0", "shorter wait")


def test_a_stray_does_not_go_to_a_sticky_peer() -> None:
    busy, idle = weighed("n0/0", 0, wait_s=5.0), weighed("n1/0", 0, home=0.9)
    assert chosen(busy, idle, entry(home=False))[0] == "n0/0"
    assert chosen(busy, idle._replace(home=0.1), entry(home=False))[0] == "n1/0"


def test_a_hit_travels_from_a_sticky_node() -> None:
    cold, holder = weighed("n0/0", 0), weighed("n1/0", 1584, home=1.0)
    assert chosen(cold, holder, entry(home=True)) == ("n1/0", "longer cached prefix")


@pytest.mark.parametrize(
    ("demand", "only", "elsewhere", "wait_s", "leaves"),
    [
        (1.5, False, 0.0, 5.0, True),
        (1.5, False, 1.0, 5.0, False),
        (0.8, False, 0.0, 5.0, False),
        (0.8, True, 0.0, 5.0, True),
        (1.5, False, 0.0, 0.1, False),
    ],
    ids=["overloaded", "the peer is busy itself", "busy", "busy, nobody else is", "not twice as fast"],
)
def test_an_overload_leaves_by_the_exit(
    demand: float, only: bool, elsewhere: float, wait_s: float, leaves: bool
) -> None:
    origin, peer = weighed("n0/0", 0, wait_s=wait_s), weighed("n1/0", 0, home=0.0, demand=elsewhere)
    of = entry(home=True, busy_s=demand, only=only)
    of.alone_s = 5.0
    target, reason = chosen(origin, peer, of)
    assert (target == "n1/0") is leaves
    if leaves:
        assert reason == "shorter wait"


def test_the_order_of_the_others_is_kept() -> None:
    origin, held = weighed("n0/0", 0), weighed("n2/0", 1584)
    order = [weighed("n1/0", 0), held, origin, weighed("n3/0", 0)]
    assert [c.endpoint for c in guarded(order, origin, entry(), 10.0)] == ["n2/0", "n0/0", "n1/0", "n3/0"]
