"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .gain import Gain
from .log_report import ModelReport, Point, Report

NOTHING = (
    "There is no request to judge: a log has one JSON object a line (jq -c . FILE writes objects so, "
    "jq -c '.[]' FILE a list of them)."
)
ROWS = 9
"""Cache sizes of a table."""


def table(report: Report) -> str:
    """Return the whole report as text."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield summary(report)
    if report.bad.count:
        yield f"lines that are no request: {report.bad.count:,}"
        for reason, count in report.bad.reasons.items():
            yield f"  {count:,} x {reason}"
        if report.bad.count > len(report.bad.first):
            yield f"  the first {len(report.bad.first)}:"
        for file, number, reason in report.bad.first:
            yield f"  {file}:{number}: {reason}"
    if not report.models:
        yield NOTHING
    for model in report.models:
        yield ""
        yield from _model(model)


def summary(report: Report) -> str:
    """Return a line that says what was read."""
    unit = f"; {report.unit}" if report.unit else ""
    read = f"{counted(report.requests, 'request')} of {counted(report.lines, 'line')}"
    return f"{read} in {', '.join(report.files)}{unit}"


def counted(n: int, what: str) -> str:
    """Return a text such as "3 requests"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _model(model: ModelReport) -> Iterator[str]:
    span = "without times" if model.span_s is None else f"in {model.span_s:,.0f} s"
    yield f"model {model.model}: {counted(model.requests, 'request')} {span}, {model.prompt_tokens:,} prompt tokens"
    yield f"  {model.verdict.says}"
    yield f"  {model.verdict.reason}"
    how = "exact" if model.exact else f"sampled, +- {100 * model.hit_error:.1f} points"
    yield (
        f"  endless cache: {model.hit_rate:.1%} of blocks ({how}), {model.token_hit_rate:.1%} of tokens; "
        f"{model.distinct_blocks:,} distinct of {model.blocks:,} blocks of {model.block_tokens} tokens"
    )
    if model.zipf is not None:
        zipf = model.zipf
        yield (
            f"  skew of sharing: Zipf exponent {zipf.exponent:.2f} ({zipf.low:.2f} to {zipf.high:.2f}) "
            f"over {zipf.prefixes:,} prefixes"
        )
    if model.curve_apart:
        yield (
            f"  isolation of {model.tenant_count} tenants costs "
            f"{100 * model.isolation_cost:.1f} points of an endless cache, "
            f"{100 * model.isolation_cost_most:.1f} at the worst size"
        )
    yield from _curve(model)
    if model.prefixes:
        yield f"  {'prefix tokens':>15}{'requests':>10}{'saved tokens':>15}{'of all':>8}  first at"
        for prefix in model.prefixes:
            counts = f"{prefix.tokens:>15,}{prefix.requests:>10,}{prefix.saved_tokens:>15,}"
            yield f"  {counts}{prefix.share:>8.1%}  {prefix.first}"
            if prefix.text:
                yield f"      {prefix.text!r}"
    if model.tenants:
        yield f"  {'tenant':<24}{'requests':>10}{'tokens':>15}{'hit shared':>12}{'alone':>8}"
        for tenant in model.tenants:
            yield (
                f"  {tenant.tenant[:23]:<24}{tenant.requests:>10,}{tenant.prompt_tokens:>15,}"
                f"{tenant.hit_rate_shared:>12.1%}{tenant.hit_rate_alone:>8.1%}"
            )
    if model.gain is not None:
        yield from _gain(model.gain)


def some(points: Sequence[Point], most: int) -> list[int]:
    """Return the indices of up to `most` points, evenly spaced, the last one included."""
    n = len(points)
    return list(range(n)) if n <= most else sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})


def _curve(model: ModelReport) -> Iterator[str]:
    more = ("" if model.exact else f"{'+-':>7}") + ("  isolated" if model.curve_apart else "")
    yield f"  {'cache tokens':>15}{'hit rate':>10}{more}"
    for i in some(model.curve, ROWS):
        point = model.curve[i]
        error = "" if model.exact else f"{point.error:>7.1%}"
        apart = f"{model.curve_apart[i].hit_rate:>10.1%}" if model.curve_apart else ""
        yield f"  {point.tokens:>15,}{point.hit_rate:>10.1%}{error}{apart}"


def _gain(gain: Gain) -> Iterator[str]:
    spaced = "spaced as in the log" if gain.own_times else "at drawn times"
    yield (
        f"  simulated: {gain.requests:,} requests over {gain.nodes} nodes with {gain.cache_tokens:,} tokens of cache "
        f"each, {gain.requests_per_s:.3g} requests a second {spaced}; "
        f"the first {gain.warming:,} fill the caches and are not counted"
    )
    yield f"  without routing: {gain.local_mean_s:.3f} s to the first token, {gain.local_hit_rate:.1%} of tokens hit"
    head = f"{'delay ms':>10}{'mean s':>9}{'to none':>9}{'balancing':>11}{'by prefixes':>13}"
    yield f"  {head}{'+-':>7}{'hit':>8}{'forwarded':>11}"
    for row in gain.delays:
        yield (
            f"  {row.delay_ms:>10g}{row.mean_s:>9.3f}{row.ratio:>9.3f}{row.balancing:>11.3f}{row.by_prefixes:>13.3f}"
            f"{row.half:>7.3f}{row.hit_rate:>8.1%}{row.forwarded:>11.1%}"
        )
    if gain.break_even_ms is None:
        yield "  break-even delay: none of those tried pays"
    else:
        yield f"  break-even delay: {'over ' if gain.open_ended else ''}{gain.break_even_ms:.3g} ms one way"
