"""What routing would gain, and the verdict: on made-up logs whose answer is known."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixroute import UsageError
from prefixroute.analyze import Advice, DelayGain, Gain, GainSettings, Wanted, as_json, build
from prefixroute.analyze.collect import Collector as Reader
from prefixroute.analyze.collect import Kept, Limits, Log
from prefixroute.analyze.gain import break_even, simulate
from prefixroute.analyze.prompt_keys import KeyedPrompt, PromptReader, prefix_keys
from prefixroute.analyze.verdict import FEW, Seen, judge
from prefixroute.sim.serving.workloads import prefix_lengths

FLEET: dict[str, Any] = {"prefill_tokens_per_s": 3300.0, "overhead_ms": 100.0, "gossip_s": 2.0, "seeds": (1, 2, 3)}


def topics(skew: float, requests: int, seed: int = 1, tail: int = 6) -> list[Kept]:
    """MMLU-shaped: 57 topics with prefixes of 250 to 3,000 tokens, and a tail of their own."""
    rng = random.Random(seed)
    lengths = [n // 16 for n in prefix_lengths()]
    heights = list(accumulate((k + 1) ** -skew for k in range(57)))
    found = []
    for i in range(requests):
        topic = rng.choices(range(57), cum_weights=heights)[0]
        words = [*(1000 * (topic + 1) + j for j in range(lengths[topic])), *(10**9 + 8 * i + j for j in range(tail))]
        keys = prefix_keys(np.array(words, dtype=np.uint64))
        found.append(Kept(None, "", KeyedPrompt(keys, 16 * len(words) + 4, 16)))
    return found


def seen(hit_rate: float, requests: int = 500) -> Seen:
    return Seen(requests, 100 * requests, hit_rate)


def test_zipf_topics_over_a_short_way_are_routed() -> None:
    gain = simulate(topics(2.0, 500), GainSettings(cache_tokens=2_000, delays_ms=(2.0,), **FLEET))
    assert gain is not None
    verdict = judge(seen(0.5), gain)
    assert verdict.advice is Advice.ROUTE
    assert gain.break_even_ms == 2.0
    assert gain.local_hit_rate < gain.delays[0].hit_rate <= gain.endless_hit_rate


def test_uniform_topics_over_a_long_way_are_not_routed() -> None:
    gain = simulate(topics(0.0, 500), GainSettings(cache_tokens=2_000, delays_ms=(200.0,), **FLEET))
    assert gain is not None
    verdict = judge(seen(0.8), gain)
    assert verdict.advice is not Advice.ROUTE
    assert "do not route" in verdict.says.lower()
    assert gain.break_even_ms is None


def test_one_off_prompts_need_no_routing_and_are_judged_without_a_simulation() -> None:
    assert judge(seen(0.01), None).advice is Advice.LOCAL
    assert judge(seen(0.5), None).advice is Advice.UNKNOWN


def row(delay_ms: float, ratio: float, half: float = 0.001) -> DelayGain:
    return DelayGain(delay_ms, ratio, 1.0, ratio, half, 1.0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([row(1, 0.8), row(11, 1.0)], (8.5, False)),
        ([row(1, 0.8), row(11, 0.9)], (11, True)),
        ([row(1, 1.0), row(11, 1.0)], (None, False)),
        ([row(1, 0.9, half=0.2), row(11, 1.0)], (None, False)),
    ],
)
def test_the_break_even_delay_is_where_the_gain_ends(rows: list[DelayGain], found: tuple[float | None, bool]) -> None:
    assert break_even(rows) == pytest.approx(found)


def gained(local: float, pooled: float, endless: float) -> Gain:
    return Gain(4, 100, 25, True, 1000, 1.0, 1.0, local, pooled, endless, [row(200, 1.0)], None, False)


@pytest.mark.parametrize(
    ("gain", "advice", "word"),
    [
        (gained(0.2, 0.6, 0.7), Advice.BIGGER, "central"),
        (gained(0.2, 0.22, 0.7), Advice.BIGGER, "bigger"),
        (gained(0.68, 0.69, 0.7), Advice.LOCAL, "little left"),
        (gained(0.02, 0.03, 0.1), Advice.UNKNOWN, "--requests"),
    ],
)
def test_without_a_gain_the_hit_rates_tell_what_is_better(gain: Gain, advice: Advice, word: str) -> None:
    verdict = judge(seen(0.7), gain)
    assert verdict.advice is advice
    assert word in verdict.says + verdict.reason


def test_a_simulation_takes_two_requests_with_a_block() -> None:
    assert simulate([], GainSettings()) is None
    assert simulate(topics(0.0, 1), GainSettings()) is None


@pytest.mark.parametrize(
    "wrong",
    [{"nodes": 1}, {"delays_ms": ()}, {"delays_ms": (-1.0,)}, {"load": 1.0}, {"cache_tokens": 0}, {"policy": "x"}],
    ids=str,
)
def test_a_fleet_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        GainSettings(**wrong)


def test_long_prompts_are_simulated_in_larger_blocks_and_times_are_kept() -> None:
    keys = prefix_keys(np.arange(1000, dtype=np.uint64))
    kept = [Kept(10.0 + i, f"t{i % 2}", KeyedPrompt(keys, 16_000, 16)) for i in range(8)]
    settings = GainSettings(seeds=(1,), delays_ms=(1.0,), gossip_s=20.0)
    together = simulate(kept, settings)
    apart = simulate(kept, GainSettings(seeds=(1,), delays_ms=(1.0,), gossip_s=20.0, tenants_apart=True))
    assert together is not None
    assert apart is not None
    assert (together.requests, together.warming, together.own_times) == (8, 2, True)
    assert together.endless_hit_rate == pytest.approx(1.0, abs=0.02), "each tenant's first request is not counted"
    assert apart.endless_hit_rate == pytest.approx(1.0, abs=0.02)


def log_of(path: Path, text: str) -> Log:
    path.write_text(text)
    return Reader(PromptReader(), Limits()).read([path])


def test_a_report_of_one_request_and_of_none_is_sensible(tmp_path: Path) -> None:
    for text, requests in (('{"prompt": "hi"}\n', 1), ("", 0), ("nonsense\n", 0)):
        report = build(log_of(tmp_path / "log", text), ["log"], "", Wanted(gain=GainSettings()))
        assert report.requests == requests
        assert as_json(report)["bad"]["count"] == text.count("nonsense")
        assert [model.verdict.advice for model in report.models] == [Advice.UNKNOWN] * requests


def test_too_few_requests_and_prompts_without_a_block_are_told_apart() -> None:
    assert judge(Seen(FEW - 1, 100, 0.9), None).advice is Advice.UNKNOWN
    assert "1 request " in judge(Seen(1, 100, 0.0), None).reason
    short = judge(Seen(FEW, 0, 0.0), None)
    assert short.advice is Advice.LOCAL
    assert "as long as a block" in short.reason


def test_the_verdict_names_the_zones_and_a_bigger_cache_where_that_does_more() -> None:
    rows = [row(1, 0.8), row(11, 1.0)]
    gain = Gain(4, 100, 25, True, 1000, 1.0, 1.0, 0.3, 0.5, 0.5, rows, 8.5, False)
    verdict = judge(seen(0.5), gain)
    assert verdict.says.startswith("Route, in zones of nodes up to about 8.5 ms apart")
    assert "11 ms apart and farther keep to themselves" in verdict.says
    assert "bigger" not in verdict.reason
    more = Gain(4, 100, 25, True, 1000, 1.0, 1.0, 0.3, 0.5, 0.9, [row(2, 0.8)], 2.0, True)
    verdict = judge(seen(0.9), more)
    assert "one zone of all nodes" in verdict.says
    assert "A bigger cache would do more still." in verdict.reason


def test_caches_are_warm_before_anything_counts() -> None:
    settings = GainSettings(delays_ms=(1.0,), seeds=(1,))
    few = [keys._replace(at=float(i)) for i, keys in enumerate(topics(50.0, 400, tail=1))]
    gain = simulate(few, settings)
    assert gain is not None
    assert gain.local_hit_rate == pytest.approx(gain.endless_hit_rate, abs=0.001), (
        "one topic, which all nodes know soon"
    )


def test_a_log_with_its_newest_request_first_is_simulated_in_order_of_time() -> None:
    settings = GainSettings(delays_ms=(1.0,), seeds=(1,))
    kept = [one._replace(at=float(i)) for i, one in enumerate(topics(1.0, 60))]
    assert simulate(kept, settings) == simulate(kept[::-1], settings)


@pytest.mark.parametrize(("local", "advice"), [(0.3, Advice.ROUTE), (0.495, Advice.LOCAL)])
def test_a_gain_without_more_hits_is_none_of_prefixes(local: float, advice: Advice) -> None:
    gain = Gain(4, 100, 25, True, 1000, 1.0, 1.0, local, 0.5, 0.5, [row(2, 0.8)], 2.0, True)
    assert judge(seen(0.5), gain).advice is advice
