"""The node as a whole: membership, timers, namespaces, events and statistics."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from prefixroute_vllm import Sequencer
from routing import BLOCK, DOMAIN, SETTINGS, known, mesh, new, pair, prompt

from prefixroute import (
    ContentSpan,
    Domain,
    EngineBatch,
    LoadReport,
    LongestMatch,
    Namespace,
    Node,
    NodeSettings,
    PeerChanged,
    PushBackSettings,
    PushBackState,
    ReplicaChanged,
    ResidencyChanged,
    StreamGap,
    UsageError,
)
from prefixroute.events import MAX_EVENTS
from prefixroute.routing.fleet import Fleet
from prefixroute.testing import Mesh, stored

# --- membership ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "x" * 41, None, 7])
def test_a_name_that_cannot_be_used_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="a name has"):
        new(name) if isinstance(name, str) else Node(name, DOMAIN, rng=random.Random(1), now=0.0)
    node = new()
    with pytest.raises(UsageError, match="a name has"):
        node.add_endpoint(name, incarnation=1, now=0.0)
    with pytest.raises(UsageError, match="a name has"):
        node.add_peer(name, "address", 0.0)
    assert node.stats(0.0).endpoints == ()
    assert node.stats(0.0).peers == {}


@pytest.mark.parametrize("incarnation", [0, -1, 2**62 + 1, 1.7e18, "1"])
def test_an_incarnation_is_a_whole_number_that_travels(incarnation: Any) -> None:
    with pytest.raises(UsageError, match="incarnation must be"):
        new().add_endpoint("0", incarnation=incarnation, now=0.0)


def test_an_endpoint_is_added_once_and_within_its_bounds() -> None:
    node = new()
    assert node.add_endpoint("0", url="u" * 256, incarnation=2**62, now=0.0) == "a/0"
    with pytest.raises(UsageError, match="was added already"):
        node.add_endpoint("0", incarnation=1, now=0.0)
    with pytest.raises(UsageError, match="at most 256"):
        node.add_endpoint("1", url="u" * 257, incarnation=1, now=0.0)
    with pytest.raises(UsageError, match="at most 80"):
        new("n" * 40).add_endpoint("e" * 40, incarnation=1, now=0.0)
    assert node.endpoint_url("a/0") == "u" * 256
    assert node.endpoint_url("nobody/0") == ""
    node._check()


@pytest.mark.parametrize(
    "use",
    [
        lambda node: node.apply("b/0", EngineBatch(()), 0.0),
        lambda node: node.set_load("b/0", LoadReport(), 0.0),
        lambda node: node.load("b/0", 0.0),
        lambda node: node.residency("b/0"),
    ],
)
def test_only_ones_own_endpoints_have_engines(use: Callable[[Node], Any]) -> None:
    _, a, _ = pair()
    with pytest.raises(UsageError, match=r"'b/0' is no endpoint of this node: it has \['a/0'\]"):
        use(a)


@pytest.mark.parametrize(
    "wrong", [{"outcome_timeout_s": 0.0}, {"max_in_flight": 0}, {"interval_s": 0.0}, {"fan_out": 0}]
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        NodeSettings(**wrong)


def test_a_node_is_no_peer_of_itself() -> None:
    with pytest.raises(UsageError, match="no peer of itself"):
        new("a").add_peer("a", "address", 0.0)


def test_a_peer_may_move_to_another_address() -> None:
    node = new()
    node.add_peer("b", "here", 0.0)
    node.add_peer("b", "there", 0.0)
    node.handle_timer(0.0)
    assert [datagram.address for datagram in node.datagrams_to_send(0.0)] == ["there"]
    assert node.datagrams_to_send(0.0) == [], "each is returned once"


def test_a_removed_peer_and_its_endpoints_are_forgotten() -> None:
    net, a, b = pair()
    b.apply("b/0", stored(prompt(1, 8)), net.now)
    net.run(1.0)
    assert known(a, "b/0") == 8
    a.remove_peer("b", net.now)
    a.remove_peer("b", net.now)
    assert known(a, "b/0") is None
    assert a.stats(net.now).index_keys == 0
    assert a.stats(net.now).peers == {}
    assert [event for event in a.events() if isinstance(event, PeerChanged)] == [PeerChanged("b", "removed")]
    assert a.route(prompt(1, 8), net.now).local
    net.run(1.0)
    assert known(a, "b/0") is None, "what it says is a stranger's word"
    assert a.counters["rejected_stranger"] > 0
    a._check()


def test_an_endpoint_learnt_by_hearsay_gets_its_peers_round_trip_later() -> None:
    a, b, c = new("a"), new("b"), new("c")
    c.add_endpoint("0", incarnation=1, now=0.0)
    net = Mesh(a, b)
    net.nodes["c"] = c
    b.add_peer("c", "c", 0.0)
    c.add_peer("b", "b", 0.0)
    net.run(1.0)
    assert known(a, "c/0") == 0
    a.add_peer("c", "c", net.now)
    c.add_peer("a", "a", net.now)
    net.delays = {("a", "c"): 0.1, ("c", "a"): 0.1}
    net.run(5.0)
    (row,) = a.stats(net.now).endpoints
    assert row.rtt_s == pytest.approx(0.2, abs=0.02)


def test_a_dead_peer_is_suspected_then_forgotten_and_welcome_again() -> None:
    net, a, b = pair()
    b.apply("b/0", stored(prompt(1, 8)), net.now)
    net.run(1.0)
    net.down.add("b")
    net.run(3.0)
    (own, other) = a.stats(net.now).endpoints
    assert (own.usable, other.usable) == (True, False)
    assert a.stats(net.now).peers == {"b": "suspected"}
    assert a.route(prompt(1, 8), net.now).local
    net.run(60.0)
    assert known(a, "b/0") is None
    assert a.stats(net.now).index_keys == 0
    net.down.clear()
    net.run(1.0)
    assert known(a, "b/0") == 8
    assert a.stats(net.now).peers == {"b": "heard"}
    assert a.route(prompt(1, 8), net.now).target == "b/0"
    a._check()


# --- timers -------------------------------------------------------------------------------------------------


def test_timers_are_due_once_an_interval_and_not_before() -> None:
    node = new()
    node.add_peer("b", "b", 0.0)
    node.handle_timer(0.0)
    first = node.next_timer()
    assert first == pytest.approx(SETTINGS.interval_s)
    node.handle_timer(first - 0.01)
    assert node.next_timer() == first
    assert node.counters["rounds"] == 1
    node.handle_timer(first)
    assert node.counters["rounds"] == 2


def test_a_node_that_slept_does_not_catch_up_with_every_round_it_missed() -> None:
    node = new()
    node.add_peer("b", "b", 0.0)
    node.handle_timer(0.0)
    node.handle_timer(1000.0)
    assert node.counters["rounds"] == 2
    assert node.next_timer() > 1000.0


def test_idle_traffic_is_the_heartbeat_alone() -> None:
    net, a, b = pair()
    b.apply("b/0", stored(prompt(1, 2000)), net.now)
    net.run(5.0)
    before = a.counters["bytes_sent"] + b.counters["bytes_sent"]
    rounds = a.counters["rounds"] + b.counters["rounds"]
    net.run(20.0)
    per_round = (a.counters["bytes_sent"] + b.counters["bytes_sent"] - before) / (
        a.counters["rounds"] + b.counters["rounds"] - rounds
    )
    assert per_round < 400


# --- namespaces and contents --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [Namespace(salt="B"), Namespace(), Namespace(lora="A"), Namespace(lora="x", salt="A"), Namespace(salt="A ")],
)
def test_namespaces_share_nothing(other: Namespace) -> None:
    net, a, b = pair()
    mine = Namespace(salt="A")
    tokens = prompt(1, 20)
    b.apply("b/0", stored(tokens, namespace=mine), net.now)
    net.run(1.0)
    assert a.route(tokens, net.now, namespace=mine).matched_tokens == 320
    decision = a.route(tokens, net.now, namespace=other)
    assert decision.local
    assert all(c.matched_tokens == 0 for c in decision.candidates)


def test_a_prepared_chain_carries_its_namespace() -> None:
    net, a, b = pair()
    tokens, mine = prompt(1, 20), Namespace(lora="adapter", salt="A")
    b.apply("b/0", stored(tokens, namespace=mine), net.now)
    net.run(1.0)
    assert a.route(a.chain(tokens, namespace=mine), net.now).target == "b/0"
    assert a.route(a.chain(tokens), net.now).local


def test_the_text_before_an_image_is_shared_and_nothing_after_it() -> None:
    net, a, b = pair()
    tokens = prompt(1, 20)
    cat = (ContentSpan("cat", 5 * BLOCK + 3),)
    b.apply("b/0", stored(tokens, contents=cat), net.now)
    net.run(1.0)

    def matched(contents: tuple[ContentSpan, ...]) -> int:
        return max(c.matched_tokens for c in a.route(tokens, net.now, contents=contents).candidates)

    assert matched(cat) == 20 * BLOCK
    for other in ((), (ContentSpan("dog", 5 * BLOCK + 3),), (ContentSpan("cat", 5 * BLOCK + 4),), cat + cat):
        assert matched(other) == 5 * BLOCK, other


def test_an_image_outside_the_prompt_is_refused() -> None:
    _, a, _ = pair()
    with pytest.raises(UsageError, match="outside the prompt"):
        a.route(prompt(1, 2), 0.0, contents=[ContentSpan("cat", 99)])


# --- what it tells ------------------------------------------------------------------------------------------


def test_events_are_drained_and_bounded() -> None:
    node = new()
    for second in range(MAX_EVENTS + 500):
        node.receive_datagram(b"junk", "b", float(second))
    events = node.events()
    assert len(events) == MAX_EVENTS
    assert node.events() == []
    assert node.counters["rejected_truncated"] == MAX_EVENTS + 500


def test_the_story_of_a_replica_is_told() -> None:
    net, a, b = pair()
    b.apply("b/0", stored(prompt(1, 4)), net.now)
    net.run(1.0)
    states = [event.state for event in a.events() if isinstance(event, ReplicaChanged)]
    assert "discarded" not in states
    a.remove_peer("b", net.now)
    assert [event.state for event in a.events() if isinstance(event, ReplicaChanged)] == ["forgotten"]


def test_statistics_show_everything_that_is_known() -> None:
    net, a, b = pair()
    a.apply("a/0", stored(prompt(1, 4)), net.now)
    b.apply("b/0", stored(prompt(2, 6)), net.now)
    b.apply("b/0", EngineBatch((StreamGap(1),)), net.now)
    net.run(1.0)
    decision = a.route(prompt(2, 6), net.now)
    stats = a.stats(net.now)
    assert (stats.node, stats.peers, stats.index_keys, stats.in_flight) == ("a", {"b": "heard"}, 10, 1)
    own, other = stats.endpoints
    assert (own.endpoint, own.local, own.url, own.incarnation, own.blocks) == ("a/0", True, "http://a", 1, 4)
    assert (own.age_s, own.rtt_s, own.confidence, own.usable) == (0.0, 0.0, 1.0, True)
    assert (other.endpoint, other.local, other.url, other.blocks) == ("b/0", False, "http://b", 6)
    assert 0 <= other.age_s <= 0.2
    assert other.confidence == pytest.approx(0.5 * 0.95)
    assert other.version == b.stats(net.now).endpoints[0].version
    assert stats.counters == dict(a.counters)
    assert decision.target in {row.endpoint for row in stats.endpoints if row.wait_s > 0}
    stats.counters["rounds"] = -1
    assert a.counters["rounds"] > 0, "statistics are a copy"


def test_restarted_endpoints_begin_anew() -> None:
    net, a, b = pair()
    b.apply("b/0", stored(prompt(1, 8)), net.now)
    net.run(1.0)
    again = Node("b", DOMAIN, rng=random.Random("another run"), now=0.0, settings=SETTINGS)
    again.add_endpoint("0", url="http://b2", incarnation=2, now=net.now)
    net.nodes.pop("b")
    again.add_peer("a", "a", net.now)
    net.nodes["b"] = again
    net.run(2.0)
    assert known(a, "b/0") == 0
    assert a.route(prompt(1, 8), net.now).local
    again.apply("b/0", stored(prompt(2, 3)), net.now)
    net.run(1.0)
    assert known(a, "b/0") == 3
    assert a.endpoint_url("b/0") == "http://b2"
    a._check()


def test_settings_reach_push_back_and_policy() -> None:
    node = new(settings=NodeSettings(push_back=PushBackSettings(enter_s=0.5, leave_s=0.1)), policy=LongestMatch())
    endpoint = node.add_endpoint("0", incarnation=1, now=0.0)
    node.set_load(endpoint, LoadReport(queued_tokens=600, prefill_tokens_per_s=1000), 0.0)
    assert node.stats(0.0).endpoints[0].push_back == "overloaded"
    assert node.route(prompt(1, 4), 0.0).reason == "no match"


def test_a_removed_peer_stays_removed_whatever_relays_say() -> None:
    net = mesh(3)
    net.run(1.0)
    node = net.nodes["n0"]
    node.remove_peer("n1", net.now)
    net.run(2.0)
    assert {row.endpoint for row in node.stats(net.now).endpoints} == {"n0/0", "n2/0"}
    assert {row.endpoint for row in net.nodes["n2"].stats(net.now).endpoints} == {"n0/0", "n1/0", "n2/0"}
    node.add_peer("n1", "n1", net.now)
    net.run(2.0)
    assert "n1/0" in {row.endpoint for row in node.stats(net.now).endpoints}


def test_a_prepared_chain_takes_no_second_namespace_and_no_other_domain() -> None:
    net = mesh(1)
    node = net.nodes["n0"]
    chain = node.chain(prompt(1, 4))
    with pytest.raises(UsageError, match="give them to chain"):
        node.route(chain, net.now, namespace=Namespace(salt="x"))
    stranger = Node("other", Domain("m", "t", 32), rng=random.Random(1), now=0.0)
    with pytest.raises(UsageError, match="another domain"):
        node.route(stranger.chain(prompt(1, 4)), net.now)


def test_the_first_event_tells_the_engines_block() -> None:
    net = mesh(1)
    node = net.nodes["n0"]
    tokens = prompt(1, 8)[: 8 * BLOCK]
    node.apply("n0/0", stored(tokens, 4 * BLOCK), net.now)
    assert known(node, "n0/0") is not None
    decision = node.route([*tokens[: 6 * BLOCK], 7], net.now)
    assert (decision.candidates[0].depth, decision.matched_tokens) == (6, 4 * BLOCK)


def test_events_of_two_ranks_do_not_mix() -> None:
    net = mesh(1)
    node = net.nodes["n0"]
    tokens = prompt(1, 8)[: 8 * BLOCK]
    node.apply("n0/0", EngineBatch(stored(tokens[: 4 * BLOCK]).events, rank=1), net.now)
    node.events()
    for _ in range(3):
        node.apply("n0/0", EngineBatch(stored(tokens).events, rank=0), net.now)
    assert node.residency("n0/0").canonical_blocks == 4
    assert node.counters["batches_of_another_rank"] == 3
    (told,) = node.events()
    assert isinstance(told, ResidencyChanged)
    assert (told.state, "rank 0" in told.reason and "rank 1" in told.reason) == ("mixed", True)


@pytest.mark.parametrize("wrong", [{"salt": None}, {"lora": 7}])
def test_a_namespace_is_of_texts(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="texts"):
        Namespace(**wrong)


def test_what_a_stream_says_before_its_first_batch_does_not_fix_the_rank() -> None:
    """A truncated history is told as a gap before the rank is known (rank 0 until then)."""
    net = mesh(1)
    node = net.nodes["n0"]
    tokens = prompt(1, 4)[: 4 * BLOCK]
    late = EngineBatch(stored(tokens).events, rank=1, ts=1.0)
    for action in Sequencer(replay=False).receive_live(7, late, net.now):
        assert isinstance(action, EngineBatch)
        node.apply("n0/0", action, net.now)
    residency = node.residency("n0/0")
    assert (residency.canonical_blocks, residency.partial, residency.counts.gaps) == (4, True, 1)
    assert node.counters["batches_of_another_rank"] == 0


def test_a_namespace_given_again_beside_its_chain_is_no_contradiction() -> None:
    node = mesh(1).nodes["n0"]
    salted = node.chain(prompt(1, 4), namespace=Namespace(salt="x"))
    assert node.route(salted, 0.0, namespace=Namespace(salt="x")).local
    assert node.route(node.chain(prompt(1, 4)), 0.0, namespace=Namespace()).local
    with pytest.raises(UsageError, match="give them to chain"):
        node.route(salted, 0.0, namespace=Namespace(salt="y"))


# --- rounds ------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
def test_all_endpoints_are_ranked_anew_once_a_round_however_many_exchanges_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = mesh(5)
    node, ranked, looked_at = net.nodes["n0"], [], []
    whole, some = Fleet.refresh_all, Fleet.refresh_passing
    fleet = node._table.fleet
    monkeypatch.setattr(Fleet, "refresh_all", lambda f, now: (f is fleet and ranked.append(now), whole(f, now)))
    monkeypatch.setattr(Fleet, "refresh_passing", lambda f, now: (f is fleet and looked_at.append(now), some(f, now)))
    before = node.counters["rounds"]
    while node.counters["rounds"] < before + 6:
        # News at every step, so that the pace is the full one: three exchanges a round.
        node.set_load("n0/0", LoadReport(waiting=round(net.now * 1000) % 97), net.now)
        net.run(0.01)
    assert len(ranked) == 6
    assert 10 <= len(looked_at) <= 12
    assert all(b - a == pytest.approx(SETTINGS.interval_s, rel=0.1) for a, b in pairwise(ranked))


@pytest.mark.parametrize("what", ["flag", "refusal", "suspension"])
def test_what_ends_with_time_alone_is_noticed_by_the_next_exchange_and_not_the_next_round(what: str) -> None:
    """Rounds of a minute, an exchange every twenty seconds."""
    slow = NodeSettings(interval_s=60.0, idle_interval_s=60.0, suspect_after_s=1e5, forget_after_s=1e6)
    net = mesh(4, settings=slow)
    node, fleet = net.nodes["n0"], net.nodes["n0"]._table.fleet

    def busy_second() -> int:
        node._gossip.tempo.stir(net.now)
        net.run(1.0)
        return node.counters["rounds"]

    for _ in range(130):
        busy_second()
    before = node.counters["rounds"]
    while busy_second() == before:
        pass
    one = fleet.standings["n1/0"]
    if what == "flag":
        one.copy.advert = one.copy.advert._replace(
            state=PushBackState.OVERLOADED, ttl_s=net.now + 5.0 - one.copy.heard_at
        )
    elif what == "refusal":
        one.refused_until = net.now + 5.0
    else:
        one.suspension.failed(net.now, net.now)
    fleet.refresh(one, net.now)
    assert (fleet.overloaded | ~fleet.usable) & one.bit
    since = net.now
    while (fleet.overloaded | ~fleet.usable) & one.bit:
        assert busy_second() == before + 1
    assert 5.0 <= net.now - since <= 21.0 or what == "suspension"
    node._check()
