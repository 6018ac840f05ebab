"""Rules for zones: which one counts, and that every policy obeys it, whatever fails."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from routing import BLOCK, DOMAIN, DRAINING, IDLE, LONG, hold, load, prompt, queue

from prefixroute import (
    POLICIES,
    Decision,
    LoadReport,
    Node,
    NodeSettings,
    Outcome,
    Policy,
    UsageError,
    Withheld,
    ZoneRule,
    Zones,
)
from prefixroute.events import Journal
from prefixroute.routing.zones import MAX_COUNTED, MAX_KEPT, Gate
from prefixroute.testing import Mesh

NEVER, ALWAYS = ZoneRule("never"), ZoneRule()


def above(seconds: float) -> ZoneRule:
    return ZoneRule("above", seconds)


# --- which rule counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "to", "needs_s"),
    [
        ("eu", "us", 3.0),
        ("eu", "asia", 2.0),
        ("asia", "us", 1.0),
        ("asia", "sea", 0.5),
        ("us", "eu", 0.5),
        ("asia", "asia", 0.0),
        ("us", "us", 9.0),
    ],
)
def test_the_most_particular_rule_counts_and_within_a_zone_only_its_own(source: str, to: str, needs_s: float) -> None:
    zones = Zones(
        {
            ("eu", "us"): above(3),
            ("eu", "*"): above(2),
            ("*", "us"): above(1),
            ("*", "*"): above(0.5),
            ("us", "us"): above(9),
        }
    )
    assert zones.rule(source, to).needs_s == needs_s


def test_without_a_rule_it_is_always() -> None:
    assert Zones().rule("eu", "us") == Zones().rule("eu", "") == ALWAYS
    assert Zones({("us", "eu"): NEVER}).rule("eu", "us") == ALWAYS


@pytest.mark.parametrize(
    ("rules", "needs_s"),
    [
        ({("eu", "us"): NEVER}, math.inf),
        ({("eu", "us"): above(1), ("*", "asia"): above(2)}, 2.0),
        ({("us", "eu"): NEVER}, 0.0),
        ({("eu", "*"): NEVER, ("eu", "us"): ALWAYS}, math.inf),
        ({("eu", "eu"): NEVER}, math.inf),
        ({("*", "us"): NEVER, ("eu", "us"): ALWAYS}, 0.0),
    ],
)
def test_an_unknown_zone_goes_by_the_strictest_rule(rules: dict[tuple[str, str], ZoneRule], needs_s: float) -> None:
    assert Zones(rules).rule("eu", "").needs_s == needs_s
    assert Zones(rules).rule("eu", "*").needs_s == needs_s, "a label that would be a wildcard is no label"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ZoneRule("sometimes"), "always, above, never"),
        (lambda: ZoneRule("above"), "saving_s > 0"),
        (lambda: ZoneRule("above", math.inf), "saving_s > 0"),
        (lambda: ZoneRule("never", 1.0), "takes no saving"),
        (lambda: Zones({("eu", ""): NEVER}), "names two zones"),
        (lambda: Zones({("eu", "x" * 41): NEVER}), "at most 40 bytes"),
        (lambda: Zones({("eu", "us", "x"): NEVER}), "pair of zones"),  # type: ignore[dict-item]
        (lambda: NodeSettings(zone="é" * 21), "at most 40 bytes"),
        (lambda: NodeSettings(zone="*"), "a zone is a label"),
        (lambda: NodeSettings(zone="\ud800"), "a zone is a label"),
        (lambda: NodeSettings(zone=7), "a zone is a label"),  # type: ignore[arg-type]
        (lambda: NodeSettings(zones=Zones({("eu", "us"): NEVER})), "need a zone"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_rules_are_values() -> None:
    given = {("eu", "us"): NEVER}
    zones = Zones(given)
    given.clear()
    assert zones == Zones({("eu", "us"): ZoneRule("never")})
    assert NodeSettings(zone="eu", zones=zones) == NodeSettings(zone="eu", zones=Zones({("eu", "us"): NEVER}))
    assert len({zones, Zones({("eu", "us"): NEVER})}) == 1


def test_labels_that_peers_make_up_cost_a_bounded_memory() -> None:
    journal = Journal()
    gate = Gate("eu", Zones({("eu", "*"): above(1)}), journal)
    for i in range(10 * MAX_KEPT):
        assert gate.needs_s(f"z{i}") == 1.0
        gate.forwarded(f"z{i}")
    assert len(gate._needs) <= MAX_KEPT
    counters = journal.counters()
    assert len(counters) == MAX_COUNTED + 1
    assert counters["zone_forwards_*"] == 10 * MAX_KEPT - MAX_COUNTED
    assert sum(counters.values()) == 10 * MAX_KEPT


# --- routing -----------------------------------------------------------------------------------------------


def fleet(zones: Sequence[str], rules: Zones, policy: Policy | None = None, gateway: bool = False) -> Mesh:
    """Nodes n0, n1, ... of these zones, an idle endpoint each (n0 none as a gateway); policy and rules are n0's."""
    net = Mesh()
    for i, zone in enumerate(zones):
        settings = NodeSettings(datagram_bytes=60_000, zone=zone, zones=rules if i == 0 else Zones())
        node = Node(
            f"n{i}", DOMAIN, rng=random.Random(i), now=0.0, settings=settings, policy=policy if i == 0 else None
        )
        if i or not gateway:
            endpoint = node.add_endpoint("0", url=f"http://n{i}", incarnation=1, now=0.0)
            node.set_load(endpoint, IDLE, 0.0)
        net.add(node)
    net.run(1.0)
    return net


def way(decision: Decision) -> list[str]:
    """Where the decision's request may go, in order."""
    return [decision.target, *decision.fallbacks]


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicy:
    """n0 and n1 are near each other, n2 is far. A prompt of 64 blocks takes a second where it is not cached."""

    def make(self, name: str, rule: ZoneRule, gateway: bool = False, far_blocks: int = 64) -> tuple[Mesh, Node, Any]:
        net = fleet(("eu", "eu", "us"), Zones({("eu", "us"): rule}), POLICIES[name](), gateway)
        tokens = prompt(1, 64)
        hold(net, "n2/0", tokens[: far_blocks * BLOCK])
        net.run(1.0)
        return net, net.nodes["n0"], tokens

    @pytest.mark.parametrize("gateway", [False, True])
    def test_never_is_neither_target_nor_fallback(self, name: str, gateway: bool) -> None:
        net, node, tokens = self.make(name, NEVER, gateway)
        for _ in range(6):
            decision = node.route(tokens, net.now)
            assert set(way(decision)) <= {"n0/0", "n1/0"}
            assert [c.endpoint for c in decision.excluded] == ["n2/0"]
            while (following := node.report(decision, Outcome.failed(), net.now)) is not None:
                assert following != "n2/0"
            net.run(0.2)
        assert not node.counters["zone_forwards_us"]

    @pytest.mark.parametrize("gateway", [False, True])
    def test_too_small_a_saving_is_the_last_fallback(self, name: str, gateway: bool) -> None:
        net, node, tokens = self.make(name, above(2), gateway)
        decision = node.route(tokens, net.now)
        assert way(decision)[-1] == "n2/0"
        assert len(way(decision)) == (2 if gateway else 3)
        far = next(c for c in decision.candidates if c.endpoint == "n2/0")
        assert far.withheld is not None
        assert far.withheld.needs_s == 2
        assert far.withheld.saves_s == pytest.approx(0.97, abs=0.04), "0.95 of the 1,024 tokens, a millisecond each"
        assert node.counters["zone_withheld_above_us"] == 1

    def test_a_saving_that_is_large_enough_makes_a_candidate(self, name: str) -> None:
        net, node, tokens = self.make(name, above(0.5))
        decision = node.route(tokens, net.now)
        far = next(c for c in decision.candidates if c.endpoint == "n2/0")
        assert far.withheld is None
        if name not in ("least", "none"):
            assert decision.target == "n2/0"
            assert node.counters["zone_forwards_us"] == 1
        assert not node.counters["zone_withheld_above_us"]

    def test_always_is_as_without_rules(self, name: str) -> None:
        told = []
        for rules in (Zones({("eu", "us"): ALWAYS}), Zones()):
            net = fleet(("eu", "eu", "us"), rules, POLICIES[name]())
            hold(net, "n2/0", prompt(1, 64))
            net.run(1.0)
            told.append([net.nodes["n0"].route(prompt(1, n), net.now) for n in (64, 64, 1, 0, 40)])
        assert told[0] == told[1]

    def test_a_busy_near_zone_is_still_compared(self, name: str) -> None:
        """A far one that is free is no reason to leave near ones alone that push back."""
        net, node, tokens = self.make(name, above(30), gateway=True)
        load(net, "n1/0", queue(5.0))
        net.run(1.0)
        assert way(node.route(tokens, net.now)) == ["n1/0", "n2/0"]
        net, node, tokens = self.make(name, above(3), gateway=True)
        load(net, "n1/0", queue(5.0))
        net.run(1.0)
        assert {c.endpoint for c in node.route(tokens, net.now).candidates if c.withheld is None} == {"n1/0", "n2/0"}

    def test_a_gateway_with_far_endpoints_only_uses_them(self, name: str) -> None:
        net = fleet(("eu", "us"), Zones({("eu", "us"): above(5)}), POLICIES[name](), gateway=True)
        decision = net.nodes["n0"].route(prompt(1, 4), net.now)
        assert decision.target == "n1/0"
        assert decision.candidates[0].withheld is None

    def test_a_gateway_that_may_forward_nowhere_says_so(self, name: str) -> None:
        net = fleet(("eu", "us"), Zones({("eu", "us"): NEVER}), POLICIES[name](), gateway=True)
        for down in (False, True):
            if down:
                net.down.add("n1")
                net.run(10.0)
            with pytest.raises(UsageError, match="the rules of zone 'eu' forbid"):
                net.nodes["n0"].route(prompt(1, 4), net.now)


def test_near_holders_are_looked_at_although_far_ones_hold_more() -> None:
    """Five far endpoints hold five longer prefixes: a near one that holds a shorter one must not be crowded out."""
    rules = Zones({("eu", "us"): above(0.5)})
    net = fleet(("eu", "eu", "eu", *["us"] * 5), rules, POLICIES["greedy"](), gateway=True)
    tokens = prompt(1, 64)
    for i in range(3, 8):
        hold(net, f"n{i}/0", tokens[: (53 + i) * BLOCK])
    hold(net, "n1/0", tokens[: 50 * BLOCK])
    load(net, "n1/0", queue(0.2))
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert decision.target == "n1/0"
    assert decision.matched_tokens == 50 * BLOCK
    assert {c.endpoint for c in decision.candidates if c.withheld is None} == {"n1/0", "n2/0"}


def test_a_local_one_that_refuses_is_still_the_last() -> None:
    """The far one comes before it then, and leaves it where it was."""
    net = fleet(("eu", "eu", "us"), Zones({("eu", "us"): above(2)}), POLICIES["longest"]())
    tokens, node = prompt(1, 64), net.nodes["n0"]
    hold(net, "n1/0", tokens)
    hold(net, "n2/0", tokens)
    net.run(1.0)
    decision = node.route(tokens, net.now)
    assert way(decision) == ["n1/0", "n0/0", "n2/0"]
    load(net, "n0/0", DRAINING)
    seen = [node.report(decision, Outcome.failed(), net.now) for _ in range(3)]
    assert seen == ["n2/0", "n0/0", None]


def test_a_prompt_that_is_handed_back_goes_by_the_rules() -> None:
    net = fleet(("eu", "eu", "us"), Zones({("eu", "us"): NEVER}), POLICIES["rent"](), gateway=True)
    tokens, node = prompt(1, 64), net.nodes["n0"]
    hold(net, "n2/0", tokens)
    net.run(1.0)
    decision = node.route(tokens, net.now)
    assert decision.target == "n1/0"
    declined = Outcome.declined(LoadReport(queued_tokens=9000, prefill_tokens_per_s=1000), 0)
    following = node.report(decision, declined, net.now)
    assert following in ("n1/0", None)


def test_a_target_that_moved_to_a_forbidden_zone_gets_nothing_more() -> None:
    """It began anew there while the request was under way: the fallback that was named is none any longer."""
    net = fleet(("eu", "eu", "eu"), Zones({("eu", "us"): NEVER}), POLICIES["longest"](), gateway=True)
    tokens, node = prompt(1, 64), net.nodes["n0"]
    hold(net, "n1/0", tokens)
    hold(net, "n2/0", tokens)
    net.run(1.0)
    first, second = (node.route(tokens, net.now) for _ in range(2))
    moved = Node("n2", DOMAIN, rng=random.Random(9), now=net.now, settings=NodeSettings(zone="us"))
    for name in ("n0", "n1"):
        moved.add_peer(name, name, net.now)
    moved.add_endpoint("0", url="http://n2", incarnation=2, now=net.now)
    net.nodes["n2"] = moved
    net.run(1.0)
    for decision in (first, second):
        other = {"n1/0": "n2/0", "n2/0": "n1/0"}[decision.target]
        assert decision.fallbacks == (other,)
        following = node.report(decision, Outcome.failed(), net.now)
        assert following == (None if other == "n2/0" else "n1/0")
    net.nodes["n1"].leave(net.now)
    net.run(1.0)
    last = node.report(second, Outcome.declined(), net.now)
    assert last is None, "nobody is left to decide between, and that is no error of the caller's"


# --- never means never -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_never_means_never(seed: int) -> None:
    """Random fleets, loads, outcomes, silences and fallbacks: nothing is named that may not be used."""
    rng = random.Random(seed)
    zones = [rng.choice(["eu", "us", "asia", ""]) for _ in range(rng.randrange(2, 6))]
    rules = {("eu", "us"): NEVER, ("eu", "asia"): rng.choice([ALWAYS, above(0.2), NEVER])}
    forbidden = {to for (_, to), rule in rules.items() if rule == NEVER} | {""}
    policy = rng.choice(list(POLICIES))
    net = fleet(("eu", *zones), Zones(rules), POLICIES[policy](), gateway=rng.random() < 0.5)
    node, known = net.nodes["n0"], ["eu", *zones]
    open_: list[tuple[Decision, str]] = []
    named = 0

    def allowed(endpoint: str | None) -> bool:
        return endpoint is None or known[int(endpoint[1])] not in forbidden

    for _ in range(50):
        action = rng.randrange(6)
        if action <= 1:
            try:
                decision = node.route(prompt(rng.randrange(3), rng.choice([1, 16, 64])), net.now)
            except UsageError:
                assert not any(map(allowed, (row.endpoint for row in node.stats(net.now).endpoints)))
                continue
            assert all(map(allowed, way(decision)))
            assert all(allowed(c.endpoint) for c in decision.candidates)
            assert not any(allowed(c.endpoint) for c in decision.excluded)
            open_.append((decision, decision.target))
            named += 1
        elif action <= 3 and open_:
            decision, target = open_.pop(rng.randrange(len(open_)))
            busy = LoadReport(queued_tokens=rng.randrange(9000), prefill_tokens_per_s=1000)
            outcome = rng.choice(
                [
                    Outcome.failed(),
                    Outcome.timed_out(),
                    Outcome.refused("busy"),
                    Outcome.declined(busy, 0),
                    Outcome.served(cached_tokens=0, ttft_s=0.1, load=busy),
                ]
            )
            following = node.report(decision, outcome, net.now, endpoint=target)
            assert allowed(following)
            if following is not None:
                open_.append((decision, following))
        elif action == 4:
            i = rng.randrange(1, len(known))
            if rng.random() < 0.5:
                hold(net, f"n{i}/0", prompt(rng.randrange(3), 64))
            else:
                load(net, f"n{i}/0", rng.choice([IDLE, queue(9.0), DRAINING]))
        else:
            net.down = {f"n{i}" for i in range(1, len(known)) if rng.random() < 0.3}
            net.run(rng.choice([0.1, 1.0, 5.0]))
        node._check()
    reached = {name.removeprefix("zone_forwards_") for name in node.counters if name.startswith("zone_forwards_")}
    assert not reached & forbidden
    assert named or not any(zone not in forbidden for zone in zones)


# --- what is shown -----------------------------------------------------------------------------------------


def test_an_explanation_names_the_rule_and_the_missing_saving() -> None:
    rules = Zones({("eu", "us"): above(5), ("eu", "asia"): NEVER})
    net = fleet(("eu", "eu", "us", "asia"), rules, POLICIES["greedy"]())
    tokens, node = prompt(1, LONG // 16), net.nodes["n0"]
    hold(net, "n2/0", tokens[: 32 * BLOCK])
    hold(net, "n3/0", tokens)
    net.run(1.0)
    decision = node.route(tokens, net.now)
    assert decision.zone == "eu"
    assert decision.reason == "local: nobody is cheaper, by the rules for zones"
    told = node.explain(decision).to_dict()
    assert told["zone"] == "eu"
    rows = {row["endpoint"]: row for row in told["candidates"]}
    assert {name: row["zone"] for name, row in rows.items()} == {"n0/0": "eu", "n1/0": "eu", "n2/0": "us"}
    assert "withheld" not in rows["n0/0"]
    far = rows["n2/0"]["withheld"]
    assert far["needs_ms"] == 5000
    assert far["saves_ms"] == pytest.approx(485, abs=5)
    assert far["why"] == f"zone eu-us: saves {far['saves_ms']:.0f} ms, needs 5000 ms"
    assert [row["endpoint"] for row in told["excluded"]] == ["n3/0"]
    assert told["excluded"][0]["withheld"]["why"] == "zone eu-asia: never"
    assert told["excluded"][0]["withheld"]["needs_ms"] is None
    text = node.explain(decision).text()
    lines = {line.split()[0]: line for line in text.splitlines()[2:] if line.startswith(" ")}
    assert lines["n1/0"].endswith("zone eu")
    assert lines["n2/0"].endswith(far["why"])
    assert lines["n3/0"].endswith("zone eu-asia: never")
    assert node.counters["zone_withheld_never_asia"] == 1


def test_what_is_excluded_is_told_only_where_it_holds_more() -> None:
    net = fleet(("eu", "us"), Zones({("eu", "us"): NEVER}), POLICIES["greedy"]())
    tokens, node = prompt(1, 64), net.nodes["n0"]
    assert node.route(tokens, net.now).excluded == ()
    hold(net, "n1/0", tokens)
    hold(net, "n0/0", tokens)
    net.run(1.0)
    decision = node.route(tokens, net.now)
    assert (decision.excluded, decision.reason) == ((), "local is cheapest")
    assert not node.counters["zone_withheld_never_us"]


def test_a_zone_that_is_not_known_is_named_so() -> None:
    assert Withheld(math.inf, 1.0).text("eu", "") == "zone eu-(unknown): never"
    assert Withheld(0.05, -0.012).text("eu", "us") == "zone eu-us: saves -12 ms, needs 50 ms"


def test_statistics_show_zones_round_trips_and_who_is_usable() -> None:
    net = fleet(("eu", "eu", "us"), Zones({("eu", "us"): NEVER}))
    net.nodes["n0"].add_peer("n9", "nowhere", net.now)
    net.delays = {(a, b): 0.04 if "n2" in (a, b) else 0.001 for a in net.nodes for b in net.nodes}
    net.run(5.0)
    stats = net.nodes["n0"].stats(net.now)
    assert stats.zone == "eu"
    assert {row.endpoint: (row.zone, row.usable) for row in stats.endpoints} == {
        "n0/0": ("eu", True),
        "n1/0": ("eu", True),
        "n2/0": ("us", False),
    }
    ways = {way.peer: way for way in stats.round_trips}
    assert {peer: way.zone for peer, way in ways.items()} == {"n1": "eu", "n2": "us", "n9": ""}
    # Measured as 0 before there were delays, and smoothed since.
    assert ways["n1"].rtt_s == pytest.approx(0.002, rel=0.6)
    assert ways["n2"].rtt_s == pytest.approx(0.08, rel=0.6)
    assert ways["n9"].rtt_s is None


def test_a_node_without_a_zone_decides_and_counts_as_before() -> None:
    net = fleet(("", "us"), Zones(), POLICIES["longest"]())
    hold(net, "n1/0", prompt(1, 64))
    net.run(1.0)
    decision = net.nodes["n0"].route(prompt(1, 64), net.now)
    assert decision.target == "n1/0"
    assert (decision.zone, decision.excluded, decision.candidates[0].zone) == ("", (), "us")
    assert not [name for name in net.nodes["n0"].counters if name.startswith("zone_")]
