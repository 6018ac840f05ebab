"""Standings and the fleet: what an endpoint costs to reach, the ranking and the masks, against brute force."""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest

from prefixroute import LoadReport, PushBackState
from prefixroute.keys.names import owner_of
from prefixroute.load import DEFAULT_PREFILL_TOKENS_PER_S, Advert
from prefixroute.policy.interface import Candidate
from prefixroute.replication.copies import Copy, Peer
from prefixroute.replication.gossip_settings import GossipSettings
from prefixroute.replication.limits import Limits
from prefixroute.routing.fleet import SAMPLED, Fleet
from prefixroute.routing.ledger import ARRIVALS_S, Queue, Send
from prefixroute.routing.standing import BELIEF, DEFAULT_RTT_S, LocalStanding, PeerStanding, Standing

SEEDS = range(12)
STATES = (PushBackState.OPEN, PushBackState.OPEN, PushBackState.OVERLOADED, PushBackState.REFUSING)


def standing(
    name: str = "b/0",
    *,
    local: bool = False,
    bit: int = 1,
    report: LoadReport | None = None,
    now: float = 0.0,
    probed: int = 0,
    **advert: object,
) -> Any:
    """An endpoint that advertises this; one of this node's own has `probed` tokens in its engine's queue."""
    copy = Copy(name, local, 1, now)
    copy.advert = Advert(report or LoadReport(prefill_tokens_per_s=1000, overhead_s=0.01))._replace(**advert)
    if local:
        return LocalStanding(copy, bit, now, lambda: probed)
    return PeerStanding(copy, Peer(owner_of(name), "address", now, Limits(GossipSettings())), bit, now)


# --- one standing ------------------------------------------------------------------------------------------


def test_a_remote_queue_drains_between_reports_and_on_the_way_there() -> None:
    remote = standing(report=LoadReport(queued_tokens=3000, prefill_tokens_per_s=1000), now=10.0)
    half = DEFAULT_RTT_S / 2
    waits = [remote.wait_s(t) for t in (10.0, 11.0, 12.5, 13.0, 99.0)]
    assert waits == pytest.approx([3.0 - half, 2.0 - half, 0.5 - half, 0.0, 0.0])


def test_what_is_evicted_on_the_way_there_is_no_hit() -> None:
    def confidence(**advert: object) -> float:
        remote = standing(**advert)
        assert remote.peer is not None
        remote.peer.rtt_s = 2.0
        remote.refresh(0.0)
        return remote.confidence

    assert confidence() == BELIEF, "nothing was evicted yet"
    assert confidence(eviction_age_s=10.0) == pytest.approx(BELIEF * exp(-0.1))
    assert confidence(eviction_age_s=0.0) == 0.0
    assert standing(local=True, eviction_age_s=0.0).confidence == 1.0


def test_arrivals_are_counted_here_and_told_of_a_peer() -> None:
    local, remote = standing(local=True), standing(arrivals_per_s=0.25)
    local.arrivals.arrived(10.0)
    assert local.arrivals_per_s(10.0) == local.weigh(0, 100, 16, 10.0).arrivals_per_s == pytest.approx(1 / ARRIVALS_S)
    assert remote.arrivals_per_s(10.0) == remote.weigh(0, 100, 16, 10.0).arrivals_per_s == 0.25


def test_of_idle_peers_the_one_where_a_cold_prompt_delays_fewest_comes_first() -> None:
    fleet = Fleet(random.Random(1))
    rates = {"b/0": 0.5, "c/0": 0.1, "d/0": 0.3}
    for i, (name, rate) in enumerate(rates.items()):
        fleet.add(standing(name, bit=1 << i, arrivals_per_s=rate), 0.0)
    own = standing("a/0", local=True, bit=8)
    fleet.add(own, 0.0)
    fleet.book(own, 1, 1.0, False, 0.0, 99.0)
    fleet.refresh_all(0.0)
    assert [found.name for found in fleet.cheapest(7, 3)] == ["c/0", "d/0", "b/0"]
    assert own.arrivals_per_s(0.0) > 0, "a booking here is an arrival"
    assert fleet.standings["b/0"].arrivals_per_s(0.0) == 0.5


def test_a_local_queue_is_the_worse_of_what_a_probe_saw_and_what_was_booked() -> None:
    local = standing(local=True, probed=2000)
    assert local.wait_s(0.0) == 2.0
    local.ledger.book(1, 1.0, 0.0, 99.0)
    assert local.wait_s(0.0) == 2.0
    local.ledger.book(2, 4.0, 0.0, 99.0)
    assert local.wait_s(0.0) == 5.0


def sent(remote: PeerStanding, ticket: int, work_s: float, arrives_at: float) -> None:
    """A forward that has no first token yet."""
    remote.queue.sent(ticket, Send(arrives_at, work_s))


def test_what_arrives_after_the_report_is_added_to_it_and_what_came_before_is_in_it() -> None:
    remote = standing(report=LoadReport(queued_tokens=1000, prefill_tokens_per_s=1000), now=0.0)
    half = DEFAULT_RTT_S / 2
    sent(remote, 1, 2.0, 1.0 + half)
    assert remote.wait_s(1.0) == pytest.approx(2.0), "what was queued is through when it comes"
    remote.copy.load_at = 1.5
    remote.copy.advert = Advert(LoadReport(queued_tokens=2500, prefill_tokens_per_s=1000))
    remote.refresh(1.5)
    assert remote.wait_s(1.5) == pytest.approx(2.5 - half), "the forward of 1.0 is in the report of 1.5"
    sent(remote, 2, 1.0, 2.0 + half)
    assert remote.wait_s(2.0) == pytest.approx(3.0 - half)
    remote.queue.unsent(2)
    assert remote.wait_s(2.0) == pytest.approx(2.0 - half)


def test_what_was_sent_drains_as_a_queue() -> None:
    remote = standing(report=LoadReport(prefill_tokens_per_s=1000), now=0.0)
    half = DEFAULT_RTT_S / 2
    for ticket, at, wait in ((1, 1.0, 1.0), (2, 1.5, 1.5), (3, 1.5, 2.5), (4, 9.0, 1.0)):
        sent(remote, ticket, 1.0, at)
        assert remote.wait_s(at - half) == pytest.approx(wait)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_queue_is_what_was_told_and_what_was_sent_since_drained_at_rate_1(seed: int) -> None:
    rng, queue, now, serial = random.Random(seed), Queue(), 0.0, 0
    for _ in range(200):
        now += rng.choice((0.0, 0.1, 1.0))
        action = rng.random()
        if action < 0.2:
            queue.told(rng.choice((0.0, rng.random() * 5)), now)
        elif action < 0.6:
            serial += 1
            queue.sent(serial, Send(now + 0.5, rng.random()))
        elif action < 0.8 and serial:
            queue.unsent(rng.randrange(serial + 2))
        plain, at = queue.reported_s, queue.reported_at
        for send in queue.sends.values():
            if send.arrives_at > queue.reported_at:
                plain, at = max(0.0, plain - max(0.0, send.arrives_at - at)) + send.work_s, max(at, send.arrives_at)
        later = now + rng.random()
        assert queue.left_s(later) == pytest.approx(max(0.0, plain - max(0.0, later - at)))


def test_a_reply_counts_until_gossip_brings_a_later_word() -> None:
    remote = standing(report=LoadReport(queued_tokens=9000, prefill_tokens_per_s=1000), now=0.0)
    half = DEFAULT_RTT_S / 2
    remote.reply = (LoadReport(queued_tokens=2000, prefill_tokens_per_s=1000), 1.0)
    remote.refresh(1.0)
    assert [remote.wait_s(t) for t in (1.0, 2.0)] == pytest.approx([2.0 - half, 1.0 - half])
    remote.copy.load_at = 1.5
    remote.copy.advert = Advert(LoadReport(queued_tokens=4000, prefill_tokens_per_s=1000))
    remote.refresh(2.0)
    assert remote.wait_s(2.0) == pytest.approx(3.5 - half)


def test_round_trips_are_measured_or_the_stated_default() -> None:
    assert standing(local=True).rtt_s == 0.0
    remote = standing()
    assert remote.rtt_s == DEFAULT_RTT_S
    assert remote.peer is not None
    remote.peer.rtt_s = 0.25
    remote.refresh(0.0)
    assert remote.rtt_s == 0.25


def test_confidence_is_the_owners_times_what_outcomes_showed() -> None:
    remote = standing(confidence=0.8)
    assert remote.confidence == pytest.approx(0.8 * BELIEF)
    remote.trust = 0.5
    remote.refresh(0.0)
    assert remote.confidence == pytest.approx(0.4 * BELIEF)
    assert standing(local=True, confidence=0.8).confidence == 0.8


def test_age_alone_lowers_nothing() -> None:
    remote = standing(now=0.0)
    fresh, old = remote.weigh(8, 1024, 16, 0.0), remote.weigh(8, 1024, 16, 50.0)
    assert old == fresh._replace(age_s=50.0)


def test_a_flag_that_is_not_renewed_runs_out_for_peers_but_not_for_its_owner() -> None:
    remote, local = (
        standing(local=local, state=PushBackState.OVERLOADED, ttl_s=2.0, now=0.0) for local in (False, True)
    )
    for now, state in ((0.0, PushBackState.OVERLOADED), (2.0, PushBackState.OVERLOADED), (2.1, PushBackState.OPEN)):
        remote.refresh(now)
        local.refresh(now)
        assert remote.state is state
        assert local.state is PushBackState.OVERLOADED


def test_a_refused_forward_counts_for_a_while() -> None:
    remote = standing()
    remote.refused_until = 5.0
    remote.refresh(4.9)
    assert remote.state is PushBackState.REFUSING
    remote.refresh(5.0)
    assert remote.state is PushBackState.OPEN


@pytest.mark.parametrize(
    ("depth", "prompt", "unit", "matched"),
    [
        (0, 100, 0, 0),
        (0, 0, 0, 0),
        (1, 17, 0, 16),
        (1, 16, 0, 0),
        (4, 65, 0, 64),
        (4, 64, 0, 48),
        (4, 64, 1, 63),
        (4, 65, 1, 64),
        (6, 1000, 64, 64),
        (9, 1000, 64, 128),
        (9, 1000, 100, 100),
        (3, 1000, 64, 0),
        (20, 320, 32, 288),
    ],
)
def test_a_match_is_rounded_to_the_hit_unit_and_never_counts_the_last_token(
    depth: int, prompt: int, unit: int, matched: int
) -> None:
    weighed = standing(hit_unit=unit).weigh(depth, prompt, 16, 0.0)
    assert weighed.matched_tokens == matched
    assert weighed.depth == depth


def test_the_terms_add_up_to_the_cost() -> None:
    remote = standing(report=LoadReport(queued_tokens=500, prefill_tokens_per_s=1000, overhead_s=0.03))
    c = remote.weigh(16, 1024, 16, 0.0)
    assert c.prefill_s == pytest.approx((1024 - BELIEF * 256) / 1000)
    assert (c.rtt_s, c.wait_s, c.overhead_s) == (DEFAULT_RTT_S, pytest.approx(0.5 - DEFAULT_RTT_S / 2), 0.03)
    assert c.cost_s == pytest.approx(c.rtt_s + c.wait_s + c.overhead_s + c.prefill_s)


@pytest.mark.parametrize("local", [False, True])
def test_each_field_of_a_candidate_is_what_its_name_says(local: bool) -> None:
    """By keyword, so that a swapped line of the constructor is seen: no two values are alike."""
    report = LoadReport(waiting=5, queued_tokens=300, prefill_tokens_per_s=1000, overhead_s=0.03, capacity_tokens=9000)
    one = standing(
        local=local,
        report=report,
        probed=700,
        confidence=0.8,
        hit_unit=40,
        held_tokens=2000,
        eviction_age_s=50.0,
        arrivals_per_s=0.25,
        state=PushBackState.OVERLOADED,
        ttl_s=60.0,
    )
    one.copy.zone = "eu"
    one.refresh(0.0)
    confidence = 0.8 if local else 0.8 * BELIEF * exp(-DEFAULT_RTT_S / 2 / 50.0)
    rtt_s, wait_s = (0.0, 0.7) if local else (DEFAULT_RTT_S, 0.0)
    prefill_s = (1024 - confidence * 240) / 1000
    expected = Candidate(
        endpoint="b/0",
        local=local,
        prompt_tokens=1024,
        depth=16,
        matched_tokens=240,
        confidence=confidence,
        rtt_s=rtt_s,
        wait_s=wait_s,
        overhead_s=0.03,
        prefill_s=prefill_s,
        cost_s=rtt_s + wait_s + 0.03 + prefill_s,
        state=PushBackState.OVERLOADED,
        age_s=0.0 if local else 2.0,
        s_per_token=0.001,
        queued=5,
        room_tokens=7000,
        eviction_age_s=50.0,
        predicted=True,
        arrivals_per_s=0.0 if local else 0.25,
        zone="eu",
        withheld=None,
    )
    for name, found, value in zip(Candidate._fields, one.weigh(16, 1024, 16, 2.0, True), expected, strict=True):
        assert found == (pytest.approx(value) if isinstance(value, float) else value), name


# --- the fleet ---------------------------------------------------------------------------------------------


def is_usable(one: Standing, now: float) -> bool:
    return not (one.state is PushBackState.REFUSING or one.suspension.blocks(now) or one.copy.suspected)


def check(fleet: Fleet, now: float, rng: random.Random) -> None:
    fleet._check()
    everybody = sum(fleet.by_bit)
    masks = [
        0,
        everybody,
        fleet.usable,
        fleet.local,
        everybody & ~fleet.local,
        *(rng.getrandbits(24) & everybody for _ in range(4)),
    ]
    for mask in masks:
        ranked = sorted((one for one in fleet.standings.values() if one.bit & mask), key=lambda one: one.rank or ())
        for n in (1, 2, 3, 7, 64):
            assert fleet.cheapest(mask, n) == ranked[:n], (mask, n)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranking_and_masks_keep_up_with_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    fleet, now, serial = Fleet(rng), 0.0, 0
    free = [1 << i for i in range(24)]
    for _ in range(250):
        now += rng.choice((0.0, 0.01, 0.5))
        names = sorted(fleet.standings)
        one = fleet.standings[rng.choice(names)] if names else None
        action = rng.choice(
            ("add", "add", "drop", "report", "book", "release", "fail", "serve", "refuse", "suspect", "all")
        )
        if action == "add" and free:
            serial += 1
            new = standing(f"n{serial}/0", local=rng.random() < 0.2, bit=free.pop(rng.randrange(len(free))), now=now)
            fleet.add(new, now)
        elif one is None:
            continue
        elif action == "drop":
            fleet.drop(one.name)
            free.append(one.bit)
        elif action == "book":
            serial += 1
            one.ledger.book(serial, rng.random(), now, now + 5.0)
            fleet.rank(one, now)
        elif action == "all":
            fleet.refresh_all(now)
            for each in fleet.standings.values():
                assert bool(each.bit & fleet.usable) is is_usable(each, now)
                assert bool(each.bit & fleet.overloaded) is (each.state is PushBackState.OVERLOADED)
                assert each.rank is not None
                assert each.rank[0] == pytest.approx(each.rtt_s + each.wait_s(now) + each.overhead_s)
        else:
            if action == "report":
                one.copy.heard_at = now
                one.copy.advert = Advert(LoadReport(queued_tokens=rng.randrange(9999)), rng.choice(STATES), 1.0)
            elif action == "release":
                one.ledger.release(serial, now)
            elif action == "fail":
                one.suspension.failed(now, now)
            elif action == "serve":
                one.suspension.served()
            elif action == "refuse":
                one.refused_until = now + 1.0
            else:
                one.copy.suspected = not one.copy.suspected
            fleet.refresh(one, now)
            assert bool(one.bit & fleet.usable) is is_usable(one, now)
        check(fleet, now, rng)


def twins(rng: random.Random, n: int = 8) -> Fleet:
    fleet = Fleet(rng)
    for i in range(n):
        fleet.add(standing(f"n{i}/0", bit=1 << i), 0.0)
    return fleet


@pytest.mark.parametrize("n", [2, 3, 8])
def test_equals_are_ordered_at_random(n: int) -> None:
    fleet, firsts, last = twins(random.Random(1), n), [], []
    for _ in range(400):
        fleet.refresh_all(0.0)
        order = fleet.cheapest(2**n - 1, n)
        firsts.append(order[0].name)
        last.append(order[-1].name)
    for places in (firsts, last):
        assert {places.count(f"n{i}/0") > 200 / n for i in range(n)} == {True}


def test_the_same_seed_gives_the_same_order() -> None:
    runs = []
    for _ in range(2):
        fleet = twins(random.Random(7))
        runs.append([[one.name for one in fleet.cheapest(255, 8)] for _ in range(20) if not fleet.refresh_all(0.0)])
    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0]))) > 1


class Counted(dict[int, Standing]):
    """A fleet's endpoints by bit, which counts how many are looked at."""

    looked_at = 0

    def __getitem__(self, bit: int) -> Standing:
        self.looked_at += 1
        return super().__getitem__(bit)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_of_many_that_are_the_busiest_a_few_by_chance_are_looked_at(n: int) -> None:
    fleet = twins(random.Random(1), 600)
    holders = sum(1 << i for i in range(0, 600, 2))
    for i, one in enumerate(list(fleet.standings.values())):
        if one.bit & holders:
            fleet.book(one, i, 1.0 + i / 1000, False, 0.0, 99.0)
    fleet.by_bit = counted = Counted(fleet.by_bit)
    firsts = set()
    for _ in range(300):
        counted.looked_at = 0
        order = fleet.cheapest(holders, n)
        assert counted.looked_at <= SAMPLED
        assert len(order) == len({one.bit for one in order}) == n
        assert order == sorted(order, key=lambda one: one.rank or ())
        assert all(one.bit & holders for one in order)
        firsts.add(order[0].name)
    assert len(firsts) > 50


def test_a_booking_sends_the_next_one_elsewhere() -> None:
    fleet = twins(random.Random(1), 4)
    taken = []
    for ticket in range(4):
        (first,) = fleet.cheapest(15, 1)
        fleet.book(first, ticket, 1.0, False, 0.0, 99.0)
        taken.append(first.name)
    assert sorted(taken) == [f"n{i}/0" for i in range(4)]


# --- pace of those who do not tell -------------------------------------------------------------------------


def paced(*tellers: tuple[str, bool, float]) -> Fleet:
    """A fleet of endpoints that tell these rates (0: none), after a round."""
    fleet = Fleet(random.Random(1))
    for i, (name, local, rate) in enumerate(tellers):
        fleet.add(standing(name, local=local, bit=1 << i, report=LoadReport(prefill_tokens_per_s=rate)), 0.0)
    fleet.refresh_all(0.0)
    return fleet


@pytest.mark.parametrize(
    ("tellers", "taken"),
    [
        ([("b/0", False, 0.0)], DEFAULT_PREFILL_TOKENS_PER_S),
        ([("b/0", False, 0.0), ("c/0", False, 900.0), ("d/0", False, 500.0)], 500.0),
        ([("b/0", False, 0.0), ("c/0", False, 500.0), ("a/0", True, 700.0)], 700.0),
    ],
)
def test_a_stranger_is_taken_to_be_no_faster_than_those_who_are_known(
    tellers: list[tuple[str, bool, float]], taken: float
) -> None:
    fleet = paced(*tellers)
    assert fleet.standings["b/0"].rate == taken
    assert all(fleet.standings[name].rate == rate for name, _, rate in tellers if rate)


def test_a_stranger_is_as_far_as_most_that_were_measured() -> None:
    fleet = Fleet(random.Random(1))
    for i in range(9):
        one = standing(f"n{i}/0", bit=1 << i)
        if i < 8:
            assert one.peer is not None
            one.peer.rtt_s = 0.1 * (i + 1)
        fleet.add(one, 0.0)
    fleet.refresh_all(0.0)
    assert fleet.standings["n8/0"].rtt_s == pytest.approx(0.6)
    late = standing("late/0", bit=1 << 10)
    fleet.add(late, 0.0)
    assert late.rtt_s == pytest.approx(0.6)
    assert fleet.standings["n0/0"].rtt_s == pytest.approx(0.1)


def test_first_tokens_that_come_late_count_against_what_a_peer_says_and_that_fades() -> None:
    liar = standing()
    for i in range(20):
        liar.lateness.surprised(2.1, 0.1, float(i))
    liar.refresh(19.0)
    assert liar.wait_s(19.0) == pytest.approx(2.0, rel=0.3)
    assert liar.wait_s(19.0 + liar.lateness.fades_s) < liar.wait_s(19.0) / 2.5
    for i in range(20):
        liar.lateness.surprised(0.1, 0.1, 20.0 + i)
    assert liar.wait_s(40.0) < 0.1


def test_first_tokens_that_come_early_and_late_in_turn_say_nothing() -> None:
    fair = standing()
    for i in range(40):
        fair.lateness.surprised(0.5 if i % 2 else 0.1, 0.3, i / 10)
    assert fair.wait_s(4.0) < 0.1
