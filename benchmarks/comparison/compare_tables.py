"""Tables for documents, made of a comparison's rows: `compare.py --markdown` puts them between a document's marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from comparison.compare_report import FLEET, FORMS, LAYERS, Bar, Row, Rows


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    text = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*text, *(f"| {' | '.join(map(str, cells))} |" for cells in lines)])


def _time(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def _ours(row: Row | None) -> str:
    return "-" if row is None else _time(row["ours_us"])


def _theirs(row: Row | None, name: str) -> str:
    """A rival's time, and how many times ours it is."""
    if row is None or name not in row["rivals_us"]:
        return "-"
    ratio = row["ratio"][name]
    return f"{_time(row['rivals_us'][name])} ({ratio:.{0 if ratio >= 10 else 1}f}x)"


def _bars(rows: Rows, held: Sequence[Bar]) -> str:
    def said(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{_time(value)} {unit}"

    lines = [(b.what, said(b.value, b.unit), said(b.best, b.unit), b.wanted, b.verdict) for b in held]
    return _table(("at 64 endpoints", "medians", "best rounds", "bar", ""), lines)


def _contest_table(rows: Rows, what: str, fleet: int, columns: Sequence[tuple[str, str]]) -> str:
    """Lengths and cases downwards; forms and rivals across."""
    head = ["blocks", "case", *(f"{name}, {form}" for form, name in columns)]
    lines = []
    for blocks in rows.blocks():
        for case in ("hit", "half", "miss"):
            cells = []
            for form, name in columns:
                row = rows.get(f"{what}, {case}, {form}", fleet, blocks)
                cells.append(_ours(row) if name == "ours" else _theirs(row, name))
            lines.append((f"{blocks:,}", case, *cells))
    return _table(head, lines)


DECIDE = (
    ("list", "ours"),
    ("list", "dynamo select"),
    ("list", "dynamo select, reserve"),
    ("list", "gorgo"),
    ("buffer", "ours"),
    ("buffer", "dynamo select"),
    ("prepared", "ours"),
    ("prepared", "dynamo select"),
)
MATCH = (
    ("list", "ours"),
    ("list", "dynamo tree"),
    ("list", "gorgo"),
    ("list", "ray"),
    ("buffer", "ours"),
    ("buffer", "dynamo tree"),
    ("prepared", "ours"),
    ("prepared", "dynamo tree"),
)


def _fleet(rows: Rows) -> int:
    return FLEET if FLEET in rows.endpoints() else max(rows.endpoints())


def _fleets(rows: Rows, _: Sequence[Bar]) -> str:
    rivals = (("decide", "dynamo select"), ("match", "dynamo tree"), ("match", "gorgo"), ("match", "ray"))
    lines = []
    for blocks in rows.blocks():
        for n in rows.endpoints():
            found = {what: rows.get(f"{what}, hit, list", n, blocks) for what in ("decide", "match")}
            cold = rows.get("decide, miss, list", n, blocks)
            theirs = [_theirs(found[what], name) for what, name in rivals]
            lines.append((f"{blocks:,}", f"{n:,}", _ours(found["decide"]), _ours(cold), _ours(found["match"]), *theirs))
    head = ("blocks", "endpoints", "ours: decision", "cold", "match", *(name for _, name in rivals))
    return _table(head, lines)


def _floor(rows: Rows, _: Sequence[Bar]) -> str:
    lines = []
    for blocks in rows.blocks():
        for case in ("hit", "half", "miss"):
            cells: list[str] = []
            for form in ("list", "buffer"):
                row = rows.get(f"match, {case}, {form}", _fleet(rows), blocks)
                for name in ("floor", "python hash"):
                    ratio = row and row["ratio"].get(name)
                    cells += [_time(row["rivals_us"][name]), f"{1 / ratio:.2f}"] if row and ratio else ["-", "-"]
                cells.insert(-4, _ours(row))
            lines.append((f"{blocks:,}", case, *cells))
    names = ("ours", "floor", "ours / floor", "hash", "ours / hash")
    return _table(("blocks", "case", *(f"{form}: {name}" for form in ("list", "buffer") for name in names)), lines)


def _layers(rows: Rows, _: Sequence[Bar]) -> str:
    lines = [
        (f"{blocks:,}", *(_ours(rows.get(f"{LAYERS}, hit, {form}", _fleet(rows), blocks)) for form in FORMS))
        for blocks in rows.blocks()
    ]
    return _table(("blocks", *FORMS), lines)


def _others(rows: Rows, *names: str) -> str:
    """Rows of any kind, one a line."""
    found = [row for name in names for row in rows.starting(name)]
    rivals = list(dict.fromkeys(name for row in found for name in row["ratio"]))
    lines = []
    for row in found:
        unit = "bytes" if "ours_bytes" in row else "us"
        theirs = row[f"rivals_{unit}"]
        cells = [_time(theirs[name]) if name in theirs else "-" for name in rivals]
        lines.append((row["what"], row["endpoints"], f"{row['blocks']:,}", _time(row[f"ours_{unit}"]), *cells))
    return _table(("", "endpoints", "blocks", "ours", *rivals), lines)


TABLES: dict[str, Callable[[Rows, Sequence[Bar]], str]] = {
    "bars": _bars,
    "decide": lambda rows, _: _contest_table(rows, "decide", _fleet(rows), DECIDE),
    "match": lambda rows, _: _contest_table(rows, "match", _fleet(rows), MATCH),
    "fleets": _fleets,
    "floor": _floor,
    "layers": _layers,
    "turns": lambda rows, _: _others(rows, "hashing of", "packing of"),
    "ingest": lambda rows, _: _others(rows, "ingest"),
    "memory": lambda rows, _: _others(rows, "memory"),
}


def tables(rows: Iterable[Row], held: Sequence[Bar]) -> dict[str, str]:
    """All tables by name, as Markdown."""
    found = Rows(rows)
    return {name: make(found, held) for name, make in TABLES.items()}
