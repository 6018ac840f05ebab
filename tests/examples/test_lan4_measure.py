"""The arithmetic behind the demo's table."""

from __future__ import annotations

import random

import pytest
from prefixroute_lan4.measure import (
    NodeFigures,
    RequestSample,
    hit_rate,
    hit_rate_over_time,
    mean,
    mismatches,
    quantile,
    run_figures,
)


def sample(index: int, **changes: object) -> RequestSample:
    plain = RequestSample(index, float(index), 0.1, 0.2, "node-1", "node-1", 100, 40, f"answer {index}")
    return plain._replace(**changes)  # type: ignore[arg-type]


def node(name: str, gossip_bytes: int, decision_us: list[float]) -> NodeFigures:
    return NodeFigures(name, gossip_bytes, gossip_bytes // 100, decision_us)


def test_quantiles_are_measured_values_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    random.Random(3).shuffle(values)
    assert [quantile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert quantile([5.0, 1.0], 0.99) == 5.0
    assert quantile([7.0], 0.5) == 7.0
    assert quantile([], 0.5) == 0.0
    assert mean([]) == 0.0


def test_a_run_is_folded_into_its_figures() -> None:
    samples = [
        sample(0, ttft_s=0.010),
        sample(1, ttft_s=0.030, served_by="node-2", cached_tokens=100),
        sample(2, ttft_s=0.050, origin="node-2", served_by="node-2", resends=1),
        sample(3, error="refused", ttft_s=0.0, prompt_tokens=0, cached_tokens=0, served_by="", resends=3),
    ]
    nodes = [node("node-1", 1000, [5.0, 7.0]), node("node-2", 3000, [6.0])]
    figures = run_figures(samples, nodes, duration_s=2.0, nodes_in_all=2)
    assert (figures.requests, figures.errors, figures.resends, figures.forwards) == (4, 1, 4, 1)
    assert figures.hit_rate == pytest.approx(180 / 300)
    assert figures.ttft_mean_ms == pytest.approx(30.0)
    assert (figures.ttft_p50_ms, figures.ttft_p99_ms) == pytest.approx((30.0, 50.0))
    assert figures.hottest_share == pytest.approx(2 / 3)
    assert figures.served == {"node-1": 1, "node-2": 2}
    assert figures.gossip_bytes_per_s == pytest.approx(2000.0)
    assert (figures.decision_us_p50, figures.decision_us_p99) == (6.0, 7.0)


def test_a_run_without_answers_has_figures_too() -> None:
    figures = run_figures([sample(0, error="x")], [], duration_s=0.0, nodes_in_all=4)
    assert (figures.errors, figures.hit_rate, figures.ttft_p99_ms) == (1, 0.0, 0.0)
    assert (figures.hottest_share, figures.gossip_bytes_per_s) == (0.25, 0.0)


def test_hit_rate_weighs_requests_by_their_tokens() -> None:
    samples = [sample(0, prompt_tokens=900, cached_tokens=900), sample(1, prompt_tokens=100, cached_tokens=0)]
    assert hit_rate(samples) == pytest.approx(0.9)
    assert hit_rate([]) == 0.0


def test_hit_rate_over_time_looks_back_over_a_window_in_order_of_arrival() -> None:
    samples = [sample(n, cached_tokens=cached) for n, cached in enumerate([0, 100, 100, 50])]
    samples.append(sample(4, error="x"))
    points = hit_rate_over_time(samples[::-1], window=2)
    assert points == [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0), (3.0, 0.75)]


def test_answers_are_compared_by_request_and_errors_left_out() -> None:
    first = [sample(0), sample(1), sample(2, error="x"), sample(3)]
    second = [sample(1), sample(0, text="other"), sample(2, text="other"), sample(3, error="x", text="")]
    assert mismatches(first, second) == 1
    assert mismatches(first, first) == 0
