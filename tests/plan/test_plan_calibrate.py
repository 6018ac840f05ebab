"""Calibration: coefficients found again, the error on what was held out, noise, outliers, and our own outcomes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from prefixroute import Decision, Domain, LoadReport, Node, Outcome, UsageError
from prefixroute.plan import LatencyModel, Timing, calibrate, timings_of

MEASURED = Path(__file__).parents[1] / "data" / "plan" / "ttft_vllm_small.json"


def truth(prompt: int, cached: int, concurrent: int) -> float:
    u, k, m = (prompt - cached) / 1000, cached / 1000, concurrent - 1
    return 0.03 + 0.9 * u + 0.15 * u * u + 0.25 * u * k + 0.45 * u * m


def simulated(rng: random.Random, n: int, noise: float = 0.0, spoilt: float = 0.0) -> list[Timing]:
    found = []
    for _ in range(n):
        prompt, concurrent = rng.randint(32, 8000), rng.choice((1, 1, 2, 4))
        cached = rng.choice((0, 0, rng.randrange(prompt)))
        seconds = truth(prompt, cached, concurrent) * rng.lognormvariate(0, noise)
        found.append(Timing(prompt, cached, seconds * (4 if rng.random() < spoilt else 1), concurrent))
    return found


def halves(timings: list[Timing], seed: int) -> tuple[list[Timing], list[Timing]]:
    shuffled = random.Random(seed).sample(timings, len(timings))
    return shuffled[::2], shuffled[1::2]


def test_without_noise_the_truth_is_found() -> None:
    model = calibrate(simulated(random.Random(1), 100), random.Random(2))
    assert set(model.terms) >= {"1", "u", "u^2", "u k", "m u"}
    assert model.held_out.median < 1e-6
    assert model.seconds(3000, 1000, 2) == pytest.approx(truth(3000, 1000, 2), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_half_of_noisy_times_predicts_the_other_half_within_five_percent(seed: int) -> None:
    fitted, other = halves(simulated(random.Random(seed), 300, noise=0.06), seed)
    model = calibrate(fitted, random.Random(seed))
    assert model.errors(other).median <= 0.05
    assert model.held_out.median == pytest.approx(model.errors(other).median, rel=0.5), "the reported error is honest"


def test_measurements_that_are_far_off_pull_little() -> None:
    model = calibrate(simulated(random.Random(3), 200, noise=0.03, spoilt=0.1), random.Random(1))
    assert model.errors(simulated(random.Random(4), 200)).median < 0.03


def test_half_of_the_times_of_a_real_engine_predicts_the_other_half_within_five_percent() -> None:
    rows = json.loads(MEASURED.read_text())["rows"]
    timings = [Timing(r["prompt_tokens"], r["cached_tokens"], r["own_s"], r["concurrent"]) for r in rows]
    medians = []
    for seed in range(5):
        fitted, other = halves(timings, seed)
        medians.append(calibrate(fitted, random.Random(seed)).errors(other).median)
    assert sorted(medians)[2] <= 0.05, medians


def test_noise_alone_does_not_make_the_form_longer() -> None:
    rng = random.Random(7)
    times = [Timing(n, 0, (0.05 + n / 2000) * rng.lognormvariate(0, 0.05)) for n in range(50, 4000, 25)]
    assert calibrate(times, rng).terms == ("1", "u")


def test_no_coefficient_is_below_zero_and_times_rise_with_the_prompt() -> None:
    rng = random.Random(5)
    model = calibrate(simulated(rng, 60, noise=0.4), rng)
    assert min(model.coefficients) >= 0
    times = [model.seconds(n) for n in range(0, 20_000, 500)]
    assert times == sorted(times)


def test_the_curve_for_planners_is_the_model_of_a_prompt_alone() -> None:
    model = calibrate(simulated(random.Random(1), 80, noise=0.02), random.Random(1))
    curve = model.prefill_s()
    for tokens in (1, 100, 5000):
        assert curve(tokens) == pytest.approx(model.seconds(tokens))


def test_the_same_seed_gives_the_same_model() -> None:
    times = simulated(random.Random(6), 50, noise=0.1)
    assert calibrate(times, random.Random(1)) == calibrate(times, random.Random(1))


@pytest.mark.parametrize(
    "timings",
    [
        [Timing(100, 0, 1.0)] * 9,
        [Timing(100, 101, 1.0)] * 20,
        [Timing(100, 0, 0.0)] * 20,
        [Timing(100, 0, 1.0, 0)] * 20,
    ],
)
def test_measurements_that_cannot_be_are_refused(timings: list[Timing]) -> None:
    with pytest.raises(UsageError):
        calibrate(timings, random.Random(1))


def test_a_form_longer_than_the_measurements_is_not_tried() -> None:
    times = simulated(random.Random(1), 10)
    long_ = ("1", "u", "u^2", "u k", "k", "m", "m u", "m a", "m k")
    assert calibrate(times, random.Random(1), forms=[("1", "u"), long_]).terms == ("1", "u")
    with pytest.raises(UsageError, match="no form is short enough"):
        calibrate(times, random.Random(1), forms=[long_])


def test_a_model_without_other_measurements_has_no_error() -> None:
    model = LatencyModel(("1",), (1.0,), calibrate(simulated(random.Random(1), 30), random.Random(1)).held_out)
    with pytest.raises(UsageError, match="one measurement"):
        model.errors([])


def test_decisions_and_outcomes_of_a_node_are_measurements() -> None:
    node = Node("n", Domain("m", "t", block_size=16), rng=random.Random(1), now=0.0)
    endpoint = node.add_endpoint(incarnation=1, now=0.0)
    node.set_load(endpoint, LoadReport(prefill_tokens_per_s=2000.0, overhead_s=0.02), 0.0)
    rng, now, served = random.Random(2), 0.0, list[tuple[Decision, Outcome]]()
    for _ in range(60):
        now += 100.0
        n = rng.randint(64, 4000)
        cached = rng.choice((0, n // 2 // 16 * 16))
        decision = node.route([rng.randrange(30_000) for _ in range(n)], now)
        outcome = Outcome.served(cached, 0.02 + (n - cached) / 2000 * rng.uniform(0.97, 1.03))
        node.report(decision, outcome, now + 10)
        served.append((decision, outcome))
    dropped = [
        (served[0][0], Outcome.failed()),
        (served[0][0], Outcome.served(None, 1.0)),
        (served[0][0], Outcome.served(0)),
    ]
    found = timings_of([*served, *dropped])
    assert set(found) == {endpoint} and len(found[endpoint]) == 60
    model = calibrate(found[endpoint], rng)
    assert model.held_out.median < 0.02
    assert model.seconds(2000, 1000) == pytest.approx(0.52, rel=0.03)


def test_round_trip_and_wait_are_taken_off_and_a_fallback_counts_where_it_was_served() -> None:
    node = Node("n", Domain("m", "t", block_size=16), rng=random.Random(1), now=0.0)
    first = node.add_endpoint("0", incarnation=1, now=0.0)
    second = node.add_endpoint("1", incarnation=1, now=0.0)
    node.route(list(range(4000)), 1.0)
    decision = node.route(list(range(9000, 9100)), 1.0)
    other = second if decision.target == first else first
    waits = {c.endpoint: c.wait_s for c in decision.candidates}
    assert max(waits.values()) > 0
    for endpoint in (first, second):
        (timing,) = timings_of([(decision, Outcome.served(0, 2.0), endpoint)])[endpoint]
        assert timing == Timing(100, 0, 2.0 - waits[endpoint])
    assert timings_of([(decision, Outcome.served(0, 2.0), "gone/0")]) == {}
    assert timings_of([(decision, Outcome.served(0, 1e-9), max(first, other, key=lambda e: waits[e]))]) == {}
