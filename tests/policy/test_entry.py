"""What a node learns of its own arrivals: whether they come back to it, and how busy they alone would keep it."""

from __future__ import annotations

import random

import pytest

from prefixroute import Domain, Node, TokenChain
from prefixroute.policy.entry import COMES_BACK, DEMAND_S, FORGOTTEN_S, KEPT, STICKY, Entry

NODE = Node("n0", Domain("m", "t"), rng=random.Random(1), now=0.0)
PEER, OTHER = 2, 4


def chain(topic: int, blocks: int = 4) -> TokenChain:
    return NODE.chain([topic * 1000 + i for i in range(16 * blocks)])


def told(entry: Entry, topics: list[int], holders: int = 0, heard: bool = True, work_s: float = 0.1) -> None:
    for i, topic in enumerate(topics):
        entry.arrived(chain(topic), holders, heard, work_s, float(i))


# --- home ---------------------------------------------------------------------------------------------------


def test_a_new_node_keeps_its_prompts_and_tells_nobody_so() -> None:
    entry = Entry()
    assert entry.sticky and entry.home == 1.0
    assert entry.told_home == 0.0, "there is nothing to protect yet"


def test_prompts_that_come_back_here_only_make_it_sticky() -> None:
    entry = Entry()
    told(entry, [1, 2, 3] * 40)
    assert entry.home == 1.0 == entry.told_home
    assert entry.sticky


def test_a_prompt_that_a_peer_holds_is_asked_for_there_and_one_will_do_at_first() -> None:
    entry = Entry()
    entry.arrived(chain(1), PEER, True, 0.1, 0.0)
    assert entry.home == STICKY
    assert not entry.sticky
    told(entry, [1] * 30, PEER)
    assert entry.home < 0.1


@pytest.mark.parametrize(("own", "sticky"), [(0.95, True), (0.8, True), (0.3, False), (0.0, False)])
def test_a_mixture_is_judged_by_its_larger_part(own: float, sticky: bool) -> None:
    rng, entry = random.Random(7), Entry()
    for i in range(600):
        mine = rng.random() < own
        entry.arrived(chain(rng.randrange(5) + (0 if mine else 100)), 0 if mine else PEER, True, 0.1, float(i))
    assert entry.sticky is sticky


def test_what_comes_again_says_nothing_before_peers_were_heard() -> None:
    entry = Entry()
    told(entry, [1] * 20, heard=False)
    assert entry.told_home == 0.0


def test_what_this_node_sent_there_is_not_asked_for_there() -> None:
    entry = Entry()
    entry.arrived(chain(1), 0, True, 0.1, 0.0)
    entry.strayed(chain(1), PEER, 0.0)
    entry.arrived(chain(1), PEER, True, 0.1, 1.0)
    assert entry.home == 1.0
    entry.arrived(chain(1), PEER | OTHER, True, 0.1, 2.0)
    assert entry.home < 1.0, "the other one has it from its own clients"


def test_a_stray_that_was_evicted_is_theirs_when_they_hold_it_again() -> None:
    entry = Entry()
    entry.strayed(chain(1), PEER, 0.0)
    entry.arrived(chain(1), 0, True, 0.1, FORGOTTEN_S / 2)
    entry.arrived(chain(1), PEER, True, 0.1, FORGOTTEN_S / 2 + 1)
    assert entry.home == 1.0, "news of it may still be under way"
    entry.arrived(chain(1), 0, True, 0.1, FORGOTTEN_S + 1)
    entry.arrived(chain(1), PEER, True, 0.1, FORGOTTEN_S + 2)
    assert entry.home < 1.0


def test_a_forward_of_what_is_asked_for_here_shows_that_it_is_asked_for_there() -> None:
    entry = Entry()
    told(entry, [1] * 3)
    before = entry.home
    entry.forwarded(chain(2))
    assert entry.home == before, "nobody asked for it here"
    entry.forwarded(chain(1))
    assert entry.home < before


def test_prompts_that_never_come_back_lose_nothing_elsewhere() -> None:
    entry = Entry()
    told(entry, list(range(200)))
    assert (entry.home, entry.sticky) == (0.0, False)
    assert COMES_BACK > 0.98**200
    told(entry, [1, 2, 3] * 20)
    assert entry.sticky


def test_what_was_asked_for_is_remembered_as_long_as_the_cache_would() -> None:
    entry = Entry()
    entry.capacity_tokens = 3 * 64
    told(entry, [1, 2, 3, 4])
    told(entry, [1])
    assert entry.told_home == 0.0, "it would have been evicted by now"
    told(entry, [4])
    assert entry.told_home == 1.0


def test_memory_is_bounded() -> None:
    entry = Entry()
    for i in range(KEPT + 10):
        entry.arrived(NODE.chain([i, *range(15)]), 0, False, 0.0, 0.0)
        entry.strayed(NODE.chain([i, *range(15)]), PEER, 0.0)
    assert len(entry._asked) == len(entry._strays) == KEPT
    assert entry._asked_tokens == 16 * KEPT


def test_prompts_shorter_than_a_block_tell_nothing() -> None:
    entry = Entry()
    short = NODE.chain([1, 2, 3])
    for _ in range(20):
        entry.arrived(short, 0, True, 0.1, 0.0)
        entry.forwarded(short)
        entry.strayed(short, PEER, 0.0)
    assert (entry.home, entry.told_home) == (1.0, 0.0)


# --- demand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.9, 2.0])
@pytest.mark.parametrize("for_s", [5, 15, 100])
def test_demand_is_the_share_of_the_time_from_the_beginning(share: float, for_s: int) -> None:
    entry = Entry()
    for i in range(10 * for_s):
        entry.arrived(chain(1), 0, True, share / 10, 50 + i / 10)
    assert entry.demand(50 + for_s) == pytest.approx(share, rel=0.1)
    assert entry.demand(50 + for_s + DEMAND_S) < 0.45 * share


def test_demand_is_known_of_earlier_moments() -> None:
    entry = Entry()
    for i in range(400):
        entry.arrived(chain(1), 0, True, 0.05 if i < 200 else 0.1, i / 10)
    assert entry.demand_at(19.9) == pytest.approx(0.5, rel=0.1)
    assert entry.demand_at(-1.0) == 0.0
    assert entry.demand_at(39.9) > 0.8


def test_alone_every_prompt_waits_for_the_ones_before_it() -> None:
    entry = Entry()
    for at in (0.0, 0.5, 1.0):
        entry.arrived(chain(1), 0, True, 1.0, at)
    assert entry.alone_s == pytest.approx(2.0)
    entry.arrived(chain(1), 0, True, 1.0, 10.0)
    assert entry.alone_s == 1.0


def test_a_busy_node_knows_when_nothing_enters_elsewhere() -> None:
    entry = Entry()
    for i in range(100):
        entry.arrived(chain(1), 0, True, 0.09, i / 10)
    entry.compare(0.0, 9.0)
    assert entry.only
    entry.compare(0.5, 9.0)
    assert not entry.only
    entry.compare(0.0, -5.0)
    assert not entry.only, "of that moment it was not busy itself"
