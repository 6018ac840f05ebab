"""The report of a log: plain frozen data, from which text, JSON and HTML are made.

Rules:
1. A hit rate counts blocks, unless the name says tokens: the share of leading blocks that an earlier request had.
2. Rates are for one cache; sizes are in tokens. `error` is half of a 95 % interval, 0.0 where exact.
3. The report has texts of prompts only when the user asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .collect import Log, ModelLog
from .gain import Gain, GainSettings, simulate
from .prefixes import Zipf, fit_zipf
from .stack import SIZES, HitCurve
from .verdict import FEW, Seen, Verdict, judge

SMALLEST = 16
"""Blocks of the smallest cache in the report."""


@dataclass(frozen=True, slots=True)
class Point:
    """A cache size in tokens, and its hit rate."""

    tokens: int
    hit_rate: float
    error: float


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several requests begin with; `share` is of all prompt tokens, `first` where it came first."""

    tokens: int
    requests: int
    saved_tokens: int
    share: float
    first: str
    text: str


@dataclass(frozen=True, slots=True)
class TenantReport:
    """A tenant: hit rates of an unbounded cache, shared with others and alone; `curve` is of its own requests."""

    tenant: str
    requests: int
    prompt_tokens: int
    hit_rate_shared: float
    hit_rate_alone: float
    curve: list[Point]


@dataclass(frozen=True, slots=True)
class ZipfReport:
    """The skew of sharing: the Zipf exponent over prefixes by rank, with its 95 % interval."""

    exponent: float
    low: float
    high: float
    prefixes: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model's requests; `curve_apart` is for a cache in which tenants share nothing, empty for a single tenant."""

    model: str
    requests: int
    prompt_tokens: int
    block_tokens: int
    blocks: int
    distinct_blocks: int
    span_s: float | None
    exact: bool
    hit_rate: float
    hit_error: float
    token_hit_rate: float
    curve: list[Point]
    curve_apart: list[Point]
    isolation_cost: float
    isolation_cost_most: float
    zipf: ZipfReport | None
    prefixes: list[SharedPrefix]
    tenant_count: int
    tenants: list[TenantReport]
    gain: Gain | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class BadLines:
    """Lines that are no requests: how many for each reason, and the first ones as (file, line, reason)."""

    count: int
    reasons: dict[str, int]
    first: list[tuple[str, int, str]]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report of a log; `unit` says what counts as a token."""

    files: list[str]
    lines: int
    requests: int
    bad: BadLines
    unit: str
    models: list[ModelReport]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted contents of a report: numbers of prefixes and tenants, and the simulation's settings (None: none)."""

    prefixes: int = 10
    tenants: int = 10
    gain: GainSettings | None = None
    workers: int = 1


def build(
    log: Log,
    files: Sequence[str],
    unit: str,
    wanted: Wanted,
    progress: Callable[[str], Callable[[int], None] | None] | None = None,
) -> Report:
    """Make the report of a log; simulations are run here.

    The log cannot be used afterwards: its stacks are freed before other processes need memory. `progress(model)`
    returns a function that is called with the number of the model's seeds done.
    """
    models = sorted(log.models.items(), key=lambda item: -item[1].totals.tokens)
    reports = []
    for name, model in models:
        reports.append(_model(name, model, wanted))
        model.release()
    if wanted.gain is not None:
        for i, (name, model) in enumerate(models):
            if reports[i].requests >= FEW:
                told = progress(name) if progress is not None else None
                reports[i] = _gained(reports[i], simulate(model.kept, wanted.gain, wanted.workers, told))
    bad = BadLines(sum(log.bad.values()), dict(log.bad.most_common()), list(log.shown))
    return Report(list(files), log.lines, log.requests, bad, unit, reports)


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as plain JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


def _gained(report: ModelReport, gain: Gain | None) -> ModelReport:
    return replace(report, gain=gain, verdict=judge(Seen(report.requests, report.blocks, report.hit_rate), gain))


def _model(name: str, model: ModelLog, wanted: Wanted) -> ModelReport:
    totals, size = model.totals, model.block_tokens
    curve, alone = model.shared.curve(), model.apart.curve()
    several = len(model.tenants) > 1
    costs = [shared - apart for shared, apart in zip(curve.rates, alone.rates, strict=True)] if several else [0.0]
    points = _points(curve, size)
    span = None if model.first_at is None or model.last_at is None else model.last_at - model.first_at
    zipf = fit_zipf(model.prefixes.ends())
    return ModelReport(
        name,
        totals.requests,
        totals.tokens,
        size,
        totals.blocks,
        round(curve.distinct_blocks),
        span,
        curve.exact,
        curve.rates[-1],
        curve.error[-1],
        curve.rates[-1] * totals.blocks * size / totals.tokens if totals.tokens else 0.0,
        points,
        _points(alone, size, curve.distinct_blocks) if several else [],
        costs[-1],
        max(costs),
        None if zipf is None else _zipf(zipf),
        [
            SharedPrefix(
                one.tokens, one.requests, one.saved_tokens, one.saved_tokens / totals.tokens, one.first, one.text
            )
            for one in model.prefixes.top(wanted.prefixes)
        ],
        len(model.tenants),
        _tenants(model, wanted.tenants) if several else [],
        None,
        judge(Seen(totals.requests, totals.blocks, curve.rates[-1]), None),
    )


def _zipf(zipf: Zipf) -> ZipfReport:
    return ZipfReport(zipf.exponent, zipf.low, zipf.high, zipf.prefixes)


def _points(curve: HitCurve, block_tokens: int, distinct: float | None = None) -> list[Point]:
    """Return the points of a curve, from the smallest size to the first that holds everything."""
    found = []
    most = curve.distinct_blocks if distinct is None else distinct
    for size, rate, error in zip(SIZES, curve.rates, curve.error, strict=True):
        if size >= SMALLEST:
            found.append(Point(size * block_tokens, rate, error))
            if size >= most:
                break
    return found


def _tenants(model: ModelLog, most: int) -> list[TenantReport]:
    largest = sorted(model.tenants.items(), key=lambda item: (-item[1].tokens, item[0]))[:most]
    found = []
    for name, tenant in largest:
        shared, alone = model.shared.curve(name), model.apart.curve(name)
        points = _points(shared, model.block_tokens)
        found.append(TenantReport(name, tenant.requests, tenant.tokens, shared.rates[-1], alone.rates[-1], points))
    return found
