#!/usr/bin/env python3
"""The guard: how far decisions are from the machine, against what they were.

    python benchmarks/bench.py [--update] [--baseline FILE] [--blocks 64,512,4096] [--endpoints 64]

Ratios alone, since machines differ and other work disturbs: a match over the C floor, a match and a decision over the
hashing that Python cannot do without, a cold prompt's over a warm one's, each timed in turns. What is more than a
fifth away from the committed baseline (`baseline.json`) is said to have moved; `--update` writes the new figures there.
It judges nothing, and its exit status is 0. `route.py` has the times, `compare.py` the rivals.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from comparison import floors
from comparison.contest import contest
from comparison.ours import Floors, Ours
from comparison.worlds import CASES, world

BASELINE = Path(__file__).parent / "baseline.json"
MOVED = 0.2
"""The share by which a ratio may differ: two runs of the same code on a busy machine do by half of it."""


class Ratio(NamedTuple):
    """How many times as long one thing takes as another."""

    what: str
    value: float


def ratios(endpoints: int, lengths: list[int], rounds: int, variants: int = 4) -> Iterator[Ratio]:
    """All ratios of a fleet. Those over the floor are left out where it cannot be built."""
    try:
        floor = floors.load()
    except floors.NoFloor as reason:
        print(f"no floor: {reason}", file=sys.stderr)
        floor = None
    for blocks in lengths:
        given = world(endpoints, blocks, variants)
        ours = Ours(given)
        beside = Floors(floor, given, ours)
        for form in ("list", "buffer"):
            for case in CASES:
                runs = {what: ours.runs(what, case, form)["ours"] for what in ("match", "decide")}
                runs |= beside.runs("match", case, form)
                runs["hash"] = beside.runs("match", "hit", form)["python hash"]
                times = contest(runs, rounds)
                name = f"{blocks} blocks, {case}, {form}"
                if "floor" in times:
                    yield Ratio(f"{name}: match over the floor", times["match"].over(times["floor"]))
                yield Ratio(f"{name}: match over the hashing of a hit", times["match"].over(times["hash"]))
                yield Ratio(f"{name}: decision over the hashing of a hit", times["decide"].over(times["hash"]))
        runs = {what: ours.runs(what, "hit", "prepared")["ours"] for what in ("match", "decide")}
        times = contest(runs, rounds)
        yield Ratio(f"{blocks} blocks, hit, prepared: decision over match", times["decide"].over(times["match"]))


def compared(ratio: Ratio, before: float | None) -> str:
    """One line: the ratio, what it was, and whether that is a move."""
    line = f"{ratio.what:<68}{ratio.value:>9.3g}"
    if before is None:
        return f"{line}{'new':>9}"
    change = ratio.value / before - 1
    moved = "" if abs(change) <= MOVED else "  moved: " + ("slower" if change > 0 else "faster")
    return f"{line}{before:>9.3g}{change:>+8.0%}{moved}"


def main() -> int:
    """Measure, compare and, when asked, write the baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write what is measured as the new baseline")
    parser.add_argument("--baseline", default=str(BASELINE), metavar="FILE", help="the file to compare with")
    parser.add_argument("--endpoints", type=int, default=64, help="fleet size (64)")
    parser.add_argument("--blocks", default="64,512,4096", help="prompt lengths in blocks of 16 tokens (64,512,4096)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds (11)")
    options = parser.parse_args()
    baseline = Path(options.baseline)
    known: dict[str, float] = json.loads(baseline.read_text())["ratios"] if baseline.exists() else {}
    found: dict[str, float] = {}
    moved = 0
    print(f"{'ours over, medians':<68}{'now':>9}{'before':>9}")
    for ratio in ratios(options.endpoints, [int(n) for n in options.blocks.split(",")], options.rounds):
        line = compared(ratio, known.get(ratio.what))
        moved += "moved" in line
        found[ratio.what] = float(f"{ratio.value:.4g}")
        print(line, flush=True)
    print(f"{moved} of {len(found)} moved by more than {MOVED:.0%}")
    if options.update:
        baseline.write_text(json.dumps({"endpoints": options.endpoints, "ratios": known | found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
