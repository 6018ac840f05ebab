"""Rows of figures and their bars, as the benchmarks print and write them."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """One figure and the bar that it must not exceed, or with `least` must reach, if there is one."""

    what: str
    value: float
    unit: str
    bar: float | None = None
    least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is within its bar."""
        return self.bar is None or (self.value >= self.bar if self.least else self.value <= self.bar)


def json_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json [FILE]``, for `publish`."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the rows as JSON (no FILE: standard output, no table)",
    )


def chosen(parser: argparse.ArgumentParser, only: str, parts: Collection[str]) -> list[str]:
    """Return the parts that ``--only a,b`` names; refuse one that there is not."""
    names = only.split(",")
    if unknown := set(names) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return names


def publish(parts: Sequence[tuple[str, Iterable[Row]]], file: str | None) -> None:
    """Print the rows of named parts as they come, and write them as JSON to `file` if there is one.

    With "-" the JSON goes to standard output, and no table.
    """
    quiet = file == "-"
    rows: list[Row] = []
    for part, figures in parts:
        start = time.perf_counter()
        for row in figures:
            rows.append(row)
            if not quiet:
                verdict = (
                    ""
                    if row.bar is None
                    else f"{'>=' if row.least else '<='} {row.bar:<8g}{'met' if row.met else 'MISSED'}"
                )
                print(f"{row.what:<88}{row.value:>12,.3f} {row.unit:<14}{verdict}".rstrip(), flush=True)
        if not quiet:
            print(f"({part}: {time.perf_counter() - start:.0f} s)", flush=True)
    machine = {"python": platform.python_version(), "processor": platform.machine(), "numpy": np.__version__}
    listed = [{**row._asdict(), "value": float(f"{row.value:.5g}"), "met": row.met} for row in rows]
    text = json.dumps({"rows": listed, "machine": machine}, indent=1)
    if quiet:
        print(text)
    elif file:
        Path(file).write_text(text + "\n")
    if not quiet:
        missed = [row.what for row in rows if not row.met]
        print(f"{sum(row.bar is not None for row in rows) - len(missed)} bars met, {len(missed)} missed: {missed}")
