"""A report as one HTML page: charts inside, no script, no external resource.

Rule: every text that comes from a log is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import zip_longest

from .charts import Axis, Series, line_chart, percent, short
from .gain import Gain
from .log_report import ModelReport, Point, Report
from .text import NOTHING, some, summary

_STYLE = """
:root{--ink:#1c2128;--soft:#59636e;--line:#d5dae0;--back:#fff;--card:#f5f7f9;--c0:#1f6feb;--c1:#b54708;--c2:#1a7f52}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaef;--soft:#9aa4af;--line:#3a424c;--back:#14181d;--card:#1d232a;
--c0:#6cabff;--c1:#f0a35e;--c2:#5fc997}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1rem;font:16px/1.5 system-ui,sans-serif}
body{color:var(--ink);background:var(--back)}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}
p{margin:.4rem 0}.soft{color:var(--soft);overflow-wrap:anywhere}
.verdict{border-left:4px solid var(--c0);background:var(--card);padding:.7rem 1rem;margin:.8rem 0}
.verdict b{display:block;font-size:1.1rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:1rem 0;padding:0}
.facts div{background:var(--card);padding:.6rem .8rem}.facts b{display:block;font-size:1.25rem}
.facts span{color:var(--soft);font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font:13px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--line)}
.level{stroke:var(--soft);stroke-dasharray:2 4}polyline{fill:none;stroke-width:2.5}
polyline.s0{stroke:var(--c0)}polyline.s1{stroke:var(--c1);stroke-dasharray:7 4}
polyline.s2{stroke:var(--c2);stroke-dasharray:2 3}
circle.s0{fill:var(--c0)}circle.s1{fill:var(--c1)}circle.s2{fill:var(--c2)}
polygon.b0{fill:var(--c0);opacity:.18}polygon.b1{fill:var(--c1);opacity:.18}polygon.b2{fill:var(--c2);opacity:.18}
.keys span{display:inline-block;margin-right:1.2rem;font-size:.9rem}
.keys span::before{content:"";display:inline-block;width:1.6rem;margin-right:.4rem}
.keys span::before{vertical-align:middle;border-top:3px solid}
.k0::before{border-color:var(--c0)!important}.k1::before{border-color:var(--c1)!important;border-top-style:dashed!important}
.k2::before{border-color:var(--c2)!important;border-top-style:dotted!important}
.wide{overflow-x:auto;margin:0 0 1rem}table{border-collapse:collapse;font-size:.92rem;width:100%}
h3{font-size:1rem;margin:1.4rem 0 .3rem;overflow-wrap:anywhere}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}td.text{white-space:normal;text-align:left;overflow-wrap:anywhere}
td.text{color:var(--soft)}td.text div{max-width:calc(100vw - 3.5rem)}.over td{border-bottom:0}
@media(max-width:40rem){svg text{font-size:19px}th,td{padding:.3rem .35rem;font-size:.85rem}.facts{gap:.4rem}}
"""


def page(report: Report) -> str:
    """Return the whole page."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
    yield f"<title>Prefix analysis</title><style>{_STYLE}</style></head><body><h1>Prefix analysis of a request log</h1>"
    yield f"<p class=soft>{escape(summary(report))}.</p>"
    for model in report.models:
        yield from _model(model)
    if not report.models:
        yield f"<p>{escape(NOTHING)}</p>"
    if report.bad.count:
        yield f"<h2>Lines that are no request: {report.bad.count:,}</h2>"
        yield _table("By reason", ("reason", "lines"), [(r, f"{n:,}") for r, n in report.bad.reasons.items()])
        rows = [(f"{file}:{number}", reason) for file, number, reason in report.bad.first]
        yield _table("The first of them", ("line", "reason"), rows)
    yield "</body></html>"


def _model(model: ModelReport) -> Iterator[str]:
    yield f"<h2>Model {escape(model.model)}</h2>"
    yield f"<div class=verdict><b>{escape(model.verdict.says)}</b>{escape(model.verdict.reason)}</div>"
    yield "<div class=facts>"
    for value, name in _facts(model):
        yield f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
    yield "</div><div class=charts>"
    errors = [point.error for point in model.curve]
    series = [Series("shared by all tenants" if model.curve_apart else "one cache", _curve(model.curve), errors)]
    if model.curve_apart:
        series.append(Series("tenants isolated", _curve(model.curve_apart)))
    yield line_chart("Hit rate by cache size", Axis("tokens of one cache", short), Axis("", percent), series, 0.0)
    if model.gain is not None:
        yield line_chart(
            "Time to first token with routing, of that without",
            Axis("one-way delay between nodes, ms", short),
            Axis("", lambda value: f"{value:.3g}"),
            [
                Series("routing by prefix", [(row.delay_ms, row.ratio) for row in model.gain.delays]),
                Series("balancing alone", [(row.delay_ms, row.balancing) for row in model.gain.delays]),
            ],
            1.0,
        )
    yield "</div>"
    yield from _tables(model)


def _facts(model: ModelReport) -> Iterator[tuple[str, str]]:
    yield f"{model.requests:,}", "requests"
    yield short(model.prompt_tokens), "prompt tokens"
    how = "exact" if model.exact else f"sampled, ± {100 * model.hit_error:.1f} points"
    yield f"{model.hit_rate:.1%}", f"hit rate of an endless cache, blocks of {model.block_tokens} ({how})"
    if model.zipf is not None:
        yield f"{model.zipf.exponent:.2f}", f"Zipf exponent of sharing ({model.zipf.low:.2f} to {model.zipf.high:.2f})"
    if model.curve_apart:
        yield f"{100 * model.isolation_cost_most:.1f} points", "most that tenant isolation costs, of hit rate"
    if model.gain is not None:
        delay = model.gain.break_even_ms
        over = "over " if model.gain.open_ended else ""
        yield "none" if delay is None else f"{over}{delay:.3g} ms", "break-even delay, one way"


def _tables(model: ModelReport) -> Iterator[str]:
    if model.gain is not None:
        yield _gain(model.gain)
    heads = ["cache tokens", "hit rate", *([] if model.exact else ["±"]), *(["isolated"] if model.curve_apart else [])]
    rows = []
    for i in some(model.curve, 9):
        point = model.curve[i]
        row = [f"{point.tokens:,}", f"{point.hit_rate:.1%}", *([] if model.exact else [f"{point.error:.1%}"])]
        rows.append([*row, *([f"{model.curve_apart[i].hit_rate:.1%}"] if model.curve_apart else [])])
    yield _table("Hit rate by cache size", heads, rows)
    if model.prefixes:
        rows = [
            [
                f"{prefix.tokens:,}",
                f"{prefix.requests:,}",
                f"{prefix.saved_tokens:,}",
                f"{prefix.share:.1%}",
                prefix.first,
            ]
            for prefix in model.prefixes
        ]
        heads = ["prefix tokens", "requests", "saved tokens", "of all", "first at"]
        yield _table("Shared prefixes that save most", heads, rows, [prefix.text for prefix in model.prefixes])
    if model.tenants:
        rows = [
            [
                tenant.tenant,
                f"{tenant.requests:,}",
                f"{tenant.prompt_tokens:,}",
                f"{tenant.hit_rate_shared:.1%}",
                f"{tenant.hit_rate_alone:.1%}",
            ]
            for tenant in model.tenants
        ]
        yield _table("Tenants, in an endless cache", ["tenant", "requests", "tokens", "hit shared", "alone"], rows)


def _gain(gain: Gain) -> str:
    title = (
        f"Simulated: {gain.requests:,} requests over {gain.nodes} nodes, {gain.cache_tokens:,} tokens of cache each, "
        f"the first {gain.warming:,} only to fill them; "
        f"without routing {gain.local_mean_s:.3f} s to the first token and {gain.local_hit_rate:.1%} of tokens hit"
    )
    rows = [
        [
            f"{row.delay_ms:g}",
            f"{row.mean_s:.3f}",
            f"{row.ratio:.3f}",
            f"{row.balancing:.3f}",
            f"{row.by_prefixes:.3f} ± {row.half:.3f}",
            f"{row.hit_rate:.1%}",
            f"{row.forwarded:.1%}",
        ]
        for row in gain.delays
    ]
    heads = ["delay ms", "mean s", "to none", "balancing", "by prefixes", "hit", "forwarded"]
    return _table(title, heads, rows)


def _curve(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.tokens, point.hit_rate) for point in points]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str] = ()) -> str:
    """Return a table in a box that scrolls sideways, so that the page does not; a text goes below its row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = []
    for row, text in zip_longest(rows, texts, fillvalue=""):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr{' class=over' if text else ''}>{cells}</tr>")
        if text:
            lines.append(f"<tr><td class=text colspan={len(heads)}><div>{escape(text)}</div></td></tr>")
    return f"<h3>{escape(title)}</h3><div class=wide><table><tr>{head}</tr>{''.join(lines)}</table></div>"
