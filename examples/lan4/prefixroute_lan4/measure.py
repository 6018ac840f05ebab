"""Figures of a run, from what the client saw and what the sidecars counted.

Rules:
1. A quantile is the nearest rank: always a value that was measured, the worst one for p99 of few samples.
2. Only answered requests have a time to first token and a hit rate; errors are counted beside, never averaged in.
3. A share names who *served* a request, whoever forwarded it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixroute_serving.sidecar_stats import quantile


class RequestSample(NamedTuple):
    """What the client saw of one request; times in seconds since the run began.

    `ttft_s` counts from the scheduled arrival to the first chunk with a token. `origin` is the node that took
    the request, `served_by` the node whose engine answered. `resends` counts the other nodes that the client
    had to ask. `error` is empty when the answer came whole.
    """

    number: int
    at_s: float
    ttft_s: float
    total_s: float
    origin: str
    served_by: str
    prompt_tokens: int
    cached_tokens: int
    text: str = ""
    resends: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What one sidecar said of itself at the end of its life (or just before it was killed)."""

    node: str
    gossip_bytes_sent: int
    gossip_datagrams_sent: int
    decision_us: Sequence[float]
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run.

    `hit_rate` is cached over prompt tokens as the engines reported them. `forwards` counts requests served by
    another node than the one that took them. `gossip_bytes_per_s` is sent by all nodes together.
    `mismatches` counts answers whose text differs from the first run's.
    """

    requests: int
    errors: int
    resends: int
    hit_rate: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    hottest_share: float
    forwards: int
    gossip_bytes_per_s: float
    decision_us_p50: float
    decision_us_p99: float
    duration_s: float
    served: Mapping[str, int]
    mismatches: int = 0


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean, 0 when there are no values."""
    return math.fsum(values) / len(values) if values else 0.0


def run_figures(
    samples: Sequence[RequestSample], nodes: Sequence[NodeFigures], duration_s: float, nodes_in_all: int
) -> RunFigures:
    """Fold samples and node figures into one row; `duration_s` is from the first arrival to the last answer."""
    answered = [sample for sample in samples if not sample.error]
    ttft_ms = [1e3 * sample.ttft_s for sample in answered]
    served = Counter(sample.served_by for sample in answered)
    decisions = [us for node in nodes for us in node.decision_us]
    gossip_bytes = sum(node.gossip_bytes_sent for node in nodes)
    return RunFigures(
        requests=len(samples),
        errors=len(samples) - len(answered),
        resends=sum(sample.resends for sample in samples),
        hit_rate=hit_rate(answered),
        ttft_mean_ms=mean(ttft_ms),
        ttft_p50_ms=quantile(ttft_ms, 0.50),
        ttft_p99_ms=quantile(ttft_ms, 0.99),
        hottest_share=max(served.values()) / len(answered) if answered else 1 / nodes_in_all,
        forwards=sum(sample.served_by != sample.origin for sample in answered),
        gossip_bytes_per_s=gossip_bytes / duration_s if duration_s > 0 else 0.0,
        decision_us_p50=quantile(decisions, 0.50),
        decision_us_p99=quantile(decisions, 0.99),
        duration_s=duration_s,
        served=dict(sorted(served.items())),
    )


def hit_rate(samples: Iterable[RequestSample]) -> float:
    """Cached tokens over prompt tokens, 0 when there are none."""
    cached = prompts = 0
    for sample in samples:
        cached += sample.cached_tokens
        prompts += sample.prompt_tokens
    return cached / prompts if prompts else 0.0


def hit_rate_over_time(samples: Sequence[RequestSample], window: int) -> list[tuple[float, float]]:
    """(arrival time, hit rate of the `window` requests that arrived last), for a plot."""
    ordered = sorted((sample for sample in samples if not sample.error), key=lambda sample: sample.at_s)
    return [(sample.at_s, hit_rate(ordered[max(0, end - window) : end])) for end, sample in enumerate(ordered, start=1)]


def mismatches(first: Sequence[RequestSample], second: Sequence[RequestSample]) -> int:
    """How many requests got different texts in two runs (errors aside); 0 is what routing promises."""
    texts = {sample.number: sample.text for sample in first if not sample.error}
    return sum(not sample.error and sample.number in texts and texts[sample.number] != sample.text for sample in second)
