"""Rows of a comparison, the bars that they are held against, and how both are printed and written.

Rules:
1. A row has the figures of ours, of each rival, and how many times as much the rival took: ratios above 1 are ours.
2. A bar without its rows, for want of a rival or of a part, is said to be not run: neither met nor missed.
3. What a rival's answer is stands in the JSON beside the rows (`answers`): the work is not equal everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from comparison.contest import TALLY, Times

Row = dict[str, Any]
FLEET = 64
"""Endpoints that the bars are about."""

FORMS = ("list", "buffer", "prepared")
LAYERS = "policy, ledger and metrics over the bare match"


def row(what: str, endpoints: int, blocks: int, times: Mapping[str, Times]) -> Row:
    """A row of times. Everybody but `ours` is a rival."""
    ours = times["ours"]
    rivals = {name: taken for name, taken in times.items() if name != "ours"}
    return {
        "what": what,
        "endpoints": endpoints,
        "blocks": blocks,
        "ours_us": round(ours.median, 3),
        "ours_best_us": round(ours.best, 3),
        "rivals_us": {name: round(taken.median, 3) for name, taken in rivals.items()},
        "rivals_best_us": {name: round(taken.best, 3) for name, taken in rivals.items()},
        "ratio": {name: round(taken.over(ours), 4) for name, taken in rivals.items()},
        "best_ratio": {name: round(taken.best / ours.best, 4) for name, taken in rivals.items()},
    }


def bytes_row(what: str, endpoints: int, blocks: int, ours: float, rivals: Mapping[str, float]) -> Row:
    """A row of bytes."""
    return {
        "what": what,
        "endpoints": endpoints,
        "blocks": blocks,
        "ours_bytes": round(ours, 1),
        "rivals_bytes": {name: round(value, 1) for name, value in rivals.items()},
        "ratio": {name: round(value / ours, 3) for name, value in rivals.items()},
    }


def line(row: Row) -> str:
    """A row for people."""
    unit = "bytes" if "ours_bytes" in row else "us"
    rivals = ", ".join(f"{k} {v:,.2f} (x{row['ratio'][k]:.2f})" for k, v in row[f"rivals_{unit}"].items())
    where = f"{row['endpoints']:>5} x {row['blocks']:<5}"
    return f"{row['what']:<62}{where} {row[f'ours_{unit}']:>10,.2f} {unit}  {rivals}".rstrip()


# --- bars --------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A figure and the bar that it must reach, or not exceed; no figure when nothing was run for it.

    `value` is of medians; `best` is the same of the best rounds, which other work on the machine disturbs least.
    """

    what: str
    value: float | None
    best: float | None
    unit: str
    bar: float
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the figure is within its bar; None when there is none."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    @property
    def verdict(self) -> str:
        """In words."""
        return {None: "not run", True: "met", False: "MISSED"}[self.met]

    @property
    def wanted(self) -> str:
        """The bar in words."""
        return f"{'>=' if self.at_least else '<='} {self.bar:g} {self.unit}".rstrip()


class Pair(NamedTuple):
    """A figure of medians, and of the best rounds."""

    median: float | None
    best: float | None

    def inverse(self) -> Pair:
        """Ours over the rival, of the rival over ours."""
        return Pair(self.median and 1 / self.median, self.best and 1 / self.best)


class Rows:
    """Rows, found by what they are about."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {(row["what"], row["endpoints"], row["blocks"]): row for row in rows}

    def get(self, what: str, endpoints: int, blocks: int) -> Row | None:
        """One row, if it is there."""
        return self._rows.get((what, endpoints, blocks))

    def blocks(self) -> list[int]:
        """The prompt lengths that decisions were made on."""
        return sorted({blocks for what, _, blocks in self._rows if what.startswith(("decide", "match"))}) or [512]

    def endpoints(self) -> list[int]:
        """The fleets that decisions were made in."""
        return sorted({n for what, n, _ in self._rows if what.startswith(("decide", "match"))}) or [FLEET]

    def ratio(self, what: str, endpoints: int, blocks: int, rival: str) -> Pair:
        """How many times as long a rival took."""
        row = self.get(what, endpoints, blocks)
        return Pair(None, None) if row is None else Pair(row["ratio"].get(rival), row["best_ratio"].get(rival))

    def ours(self, what: str, endpoints: int, blocks: int) -> Pair:
        """What ours took."""
        row = self.get(what, endpoints, blocks)
        return Pair(None, None) if row is None else Pair(row["ours_us"], row["ours_best_us"])

    def starting(self, what: str) -> list[Row]:
        """All rows whose name begins so."""
        return [row for (name, _, _), row in self._rows.items() if name.startswith(what)]


def bars(rows: Iterable[Row]) -> list[Bar]:
    """Hold the rows against the bars, at 64 endpoints unless a bar says otherwise."""
    found = Rows(rows)
    lengths = found.blocks()
    made: list[Bar] = []
    for form, bar in (("list", 8), ("prepared", 15)):
        for blocks in lengths:
            pair = found.ratio(f"decide, hit, {form}", FLEET, blocks, "dynamo select")
            made.append(Bar(f"decision, {form}, {blocks} blocks: Dynamo's select over ours", *pair, "x", bar, True))
    longest = max(lengths)
    pair = found.ratio("decide, miss, list", FLEET, longest, "dynamo select")
    made.append(Bar(f"cold prompt, {longest} blocks: Dynamo's select over ours", *pair, "x", 100, True))
    for blocks in lengths:
        pair = found.ours("decide, miss, list", FLEET, blocks)
        made.append(Bar(f"cold prompt, {blocks} blocks: ours", *pair, "us", 15))
    for rival in ("gorgo", "ray"):
        for blocks in lengths:
            pair = found.ratio("match, hit, list", FLEET, blocks, rival)
            made.append(
                Bar(f"match, hit, {blocks} blocks: {rival} over ours", *pair, "x", 8 if blocks >= 512 else 5, True)
            )
    for form, most in (("list", 3), ("buffer", 8)):
        for blocks in lengths:
            pair = found.ratio(f"match, hit, {form}", FLEET, blocks, "floor").inverse()
            made.append(Bar(f"match, hit, {form}, {blocks} blocks: ours over the floor", *pair, "x", most))
    low, high = min(found.endpoints()), max(found.endpoints())
    for blocks in lengths:
        pair = found.ratio("growth of decide, hit, prepared", low, blocks, f"ours, {high} endpoints")
        made.append(Bar(f"decision, prepared, {blocks} blocks: {high} endpoints over {low}", *pair, "x", 1.5))
    for blocks in lengths:
        pair = found.ours(f"{LAYERS}, hit, prepared", FLEET, blocks)
        made.append(Bar(f"policy, ledger and metrics, {blocks} blocks", *pair, "us", 15))
    for what, most in (("memory, radix tree, per block", 150), ("memory, index, per key", 100)):
        used = [row["ours_bytes"] for row in found.starting(what)] or [None]
        made.append(Bar(what, used[0], used[0], "B", most))
    took = [Pair(row["ours_us"], row["ours_best_us"]) for row in found.starting("hashing of")] or [Pair(None, None)]
    made.append(Bar("turn n + 1 of a long conversation: hashing", *took[0], "us", 10))
    return made


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What it ran on, and whom it compared."""
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (model := re.search(r"model name\s*: (.*)", info.read_text())):
        name = model[1]
    return {
        "python": platform.python_version(),
        "processor": name,
        "load": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
        "runs": TALLY.runs,
        "runs_disturbed": TALLY.disturbed,
        "numpy": version("numpy"),
        "xxhash": version("xxhash"),
        "rivals": {**options.present, **options.absent},
    }


# --- output ---------------------------------------------------------------------------------------------------


def publish(
    rows: Sequence[Row],
    held: Sequence[Bar],
    about: Mapping[str, Any],
    tables: Callable[[], Mapping[str, str]],
    options: argparse.Namespace,
) -> None:
    """Print the bars, and write JSON and Markdown where asked for; "-" is standard output, and nothing else there."""
    quiet = "-" in (options.json, options.markdown)
    if not quiet:
        for bar in held:
            value = "" if bar.value is None else f"{bar.value:,.2f} {bar.unit} (best {bar.best:,.2f})"
            print(f"{bar.what:<66}{value:>28}   {bar.wanted:<12}{bar.verdict}")
        verdicts = [bar.met for bar in held]
        ran = about["machine"]
        print(f"{ran['runs_disturbed']} of {ran['runs']} runs were disturbed by other work")
        print(f"{verdicts.count(True)} bars met, {verdicts.count(False)} missed, {verdicts.count(None)} not run")
    listed = [{**bar._asdict(), "met": bar.met} for bar in held]
    text = json.dumps({"rows": rows, "bars": listed, **about}, indent=1)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")
    if options.markdown == "-":
        print("\n\n".join(f"<!-- compare: {name} -->\n{table}\n<!-- end -->" for name, table in tables().items()))
    elif options.markdown:
        document = Path(options.markdown)
        document.write_text(insert(document.read_text(), tables()))


def insert(document: str, tables: Mapping[str, str]) -> str:
    """Put tables between a document's marks, `<!-- compare: NAME -->` and `<!-- end -->`; the rest stays as it is."""
    for name, table in tables.items():
        mark = re.compile(rf"(<!-- compare: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        document = mark.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", document)  # type: ignore[misc]
    return document
