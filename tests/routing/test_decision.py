"""Decisions, outcomes and explanations as plain data."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from prefixroute import Decision, Explanation, LoadReport, Outcome, OutcomeKind, PushBackState, UsageError
from prefixroute.routing.decision import decided
from prefixroute.testing import candidate

OWN = candidate("a/0", local=True, depth=2, wait_s=1.25, prompt_tokens=1000)
BEST = candidate("b/0", depth=32, rtt_s=0.004, wait_s=0.1, confidence=0.95, prompt_tokens=1000)
BUSY = candidate("c/0", depth=16, state=PushBackState.OVERLOADED, prompt_tokens=1000)._replace(age_s=0.3)
DECISION = Decision(
    7,
    "b/0",
    False,
    "http://b",
    ("c/0", "a/0"),
    1000,
    BEST.matched_tokens,
    BEST.cost_s,
    OWN.cost_s - BEST.cost_s,
    "longer cached prefix",
    (BEST, BUSY, OWN),
)


def test_each_field_of_a_decision_is_what_its_name_says() -> None:
    """By keyword, so that a swapped line of the constructor is seen."""
    made = decided(
        7, BEST, "http://b", ("c/0", "a/0"), OWN.cost_s, "why", (BEST, BUSY, OWN), 2.5, "eu", (BUSY,), (5, 7)
    )
    expected = Decision(
        id=7,
        target="b/0",
        local=False,
        url="http://b",
        fallbacks=("c/0", "a/0"),
        prompt_tokens=1000,
        matched_tokens=512,
        expected_ttft_s=BEST.cost_s,
        expected_saving_s=OWN.cost_s - BEST.cost_s,
        reason="why",
        candidates=(BEST, BUSY, OWN),
        budget_s=2.5,
        declined=False,
        zone="eu",
        excluded=(BUSY,),
        masks=(5, 7),
    )
    for name, found, value in zip(Decision._fields, made, expected, strict=True):
        assert found == value, name


def test_what_is_served_here_has_no_budget_and_saves_nothing_and_neither_does_a_gateway() -> None:
    here = decided(1, OWN, "", (), OWN.cost_s, "", (OWN,), 2.5, "", (), (1, 1))
    assert (here.local, here.budget_s, here.expected_saving_s) == (True, math.inf, 0.0)
    assert decided(1, BEST, "", (), math.inf, "", (BEST,), 2.5, "", (), (1, 1)).expected_saving_s == 0.0


def test_a_decision_finds_what_an_endpoint_was_weighed_at() -> None:
    assert [DECISION.candidate(name) for name in ("a/0", "b/0", "c/0")] == [OWN, BEST, BUSY]
    assert DECISION.candidate("d/0") is None


def test_an_explanation_is_plain_json_with_every_term_of_every_candidate() -> None:
    told = json.loads(json.dumps(Explanation(DECISION).to_dict(), allow_nan=False))
    assert told["decision"] == 7
    assert (told["target"], told["local"], told["url"]) == ("b/0", False, "http://b")
    assert (told["reason"], told["fallbacks"]) == ("longer cached prefix", ["c/0", "a/0"])
    assert (told["prompt_tokens"], told["matched_tokens"]) == (1000, 512)
    assert told["expected_saving_ms"] == pytest.approx(1000 * (OWN.cost_s - BEST.cost_s), abs=0.01)
    assert [row["endpoint"] for row in told["candidates"]] == ["b/0", "c/0", "a/0"]
    for row, weighed in zip(told["candidates"], DECISION.candidates, strict=True):
        assert row == {
            "endpoint": weighed.endpoint,
            "local": weighed.local,
            "matched_tokens": weighed.matched_tokens,
            "confidence": pytest.approx(weighed.confidence, abs=0.001),
            "rtt_ms": pytest.approx(1000 * weighed.rtt_s, abs=0.01),
            "wait_ms": pytest.approx(1000 * weighed.wait_s, abs=0.01),
            "overhead_ms": pytest.approx(1000 * weighed.overhead_s, abs=0.01),
            "prefill_ms": pytest.approx(1000 * weighed.prefill_s, abs=0.01),
            "cost_ms": pytest.approx(1000 * weighed.cost_s, abs=0.01),
            "push_back": weighed.state.name.lower(),
            "age_ms": pytest.approx(1000 * weighed.age_s, abs=0.01),
            "queued": weighed.queued,
            "expected": weighed.predicted,
            "evicted_tokens": round(weighed.evicted_tokens),
            "delays_ms": pytest.approx(1000 * weighed.delays_s, abs=0.01),
            "zone": "",
            "home": weighed.home,
            "demand": weighed.demand,
        }


def test_an_explanations_terms_add_up_to_its_cost() -> None:
    for row in Explanation(DECISION).to_dict()["candidates"]:
        terms = row["rtt_ms"] + row["wait_ms"] + row["overhead_ms"] + row["prefill_ms"]
        assert terms == pytest.approx(row["cost_ms"], abs=0.03)


def test_an_explanation_for_people_marks_the_chosen_one_and_shows_its_terms() -> None:
    head, titles, *rows = Explanation(DECISION).text().split("\n")
    assert head.startswith("1000 tokens -> b/0 (longer cached prefix); 512 cached there")
    assert [row[0] for row in rows] == ["*", " ", " "]
    assert [row.split()[1 if row[0] == "*" else 0] for row in rows] == ["b/0", "c/0", "a/0"]
    assert "a/0 (local)" in rows[2]
    assert "overloaded" in rows[1]
    for title in ("match", "conf", "rtt", "wait", "fixed", "prefill", "cost", "delays", "push-back", "age"):
        assert title in titles
    for row, weighed in zip(rows, DECISION.candidates, strict=True):
        assert f"{round(1000 * weighed.cost_s, 2)}" in row
        assert f"{round(1000 * weighed.delays_s, 2)}" in row
        assert f"{weighed.matched_tokens}" in row


def test_outcomes_say_what_they_are() -> None:
    load = LoadReport(waiting=3)
    assert Outcome.served(16, 0.5, load) == Outcome(OutcomeKind.SERVED, "", 16, 0.5, load)
    assert Outcome.served() == Outcome(OutcomeKind.SERVED)
    assert Outcome.declined(load, 16) == Outcome(OutcomeKind.DECLINED, "", 16, None, load)
    assert Outcome.refused("503", load) == Outcome(OutcomeKind.REFUSED, "503", load=load)
    assert Outcome.failed("reset") == Outcome(OutcomeKind.FAILED, "reset")
    assert Outcome.timed_out("10 s") == Outcome(OutcomeKind.TIMED_OUT, "10 s")
    assert Outcome.cancelled() == Outcome(OutcomeKind.CANCELLED)


@pytest.mark.parametrize("cached", [-1, math.nan, math.inf, 2**63])
def test_an_outcome_takes_no_impossible_count(cached: Any) -> None:
    with pytest.raises(UsageError, match="cached_tokens"):
        Outcome.served(cached_tokens=cached)


@pytest.mark.parametrize("ttft_s", [-0.001, math.nan, math.inf])
def test_an_outcome_takes_no_impossible_time(ttft_s: float) -> None:
    with pytest.raises(UsageError, match="ttft_s"):
        Outcome.served(ttft_s=ttft_s)
