"""The log analyser against its bars: a long log's speed and memory, sampled curves against exact ones, verdicts.

    python benchmarks/analyze.py [--size MB] [--only PARTS] [--traces FOLDER] [--json [FILE]]

| part | is |
|---|---|
| log | a generated chat log through `prefixroute analyze`: speed and memory of reading, then of a whole report |
| curves | the largest difference between a sampled curve and the exact one, over generated logs |
| traces | with --traces: the hit rates of Mooncake's published traces, and their sampled curves |
| verdicts | what the command says of logs whose answer is known |

Logs are made anew in a temporary folder, and removed. Memory is of all of a command's processes together, each page
counted once (PSS), looked at five times a second. A speed's bar is for the time that a processor works on it, start
included, so that neighbours on a shared machine do not count; the time on the wall is beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workbench.bars import Row, chosen, json_option, publish
from workbench.request_logs import mixed_paths, talk_paths, topic_paths, write_chats, write_one_off, write_topics

from prefixroute.analyze import Collector, Limits, PromptReader
from prefixroute.analyze.prompt_keys import Keys
from prefixroute.analyze.sample import Sampled
from prefixroute.analyze.stack import ExactCurve, HitCurve

LOOK_S = 0.2
MEMORY_MB, SPEED_MB_S, POINT, TRACE_POINTS = 400.0, 20.0, 1.0, 0.2
SILENT_S = 20.0
"""A command that runs for longer has told how far it is."""

PUBLISHED = {"conversation": 36.6, "synthetic": 64.0}
"""Hit rates of an endless cache, in percent, of Mooncake's traces in blocks of 512 tokens."""


class Ran(NamedTuple):
    """A command that ended well: seconds, on the wall and of processors; megabytes, lines of progress, its report."""

    took_s: float
    worked_s: float
    memory_mb: float
    progress: int
    report: dict[str, Any]


# --- the command -------------------------------------------------------------------------------------------


def analyze(log: Path, *options: str) -> Ran:
    """Run `prefixroute analyze` as a user would, and look at its memory."""
    report, errors = log.with_suffix(".report.json"), log.with_suffix(".stderr")
    command = [sys.executable, "-m", "prefixroute.cli", "analyze", str(log), "--json", str(report), *options]
    began, most, before = time.perf_counter(), 0.0, resource.getrusage(resource.RUSAGE_CHILDREN)
    with errors.open("w") as file:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
        while running.poll() is None:
            most = max(most, sum(map(proportional_mb, family(running.pid))))
            time.sleep(LOOK_S)
    took_s, said = time.perf_counter() - began, errors.read_text()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    if running.returncode:
        raise SystemExit(said)
    progress = sum(" of " in line for line in said.splitlines())
    return Ran(took_s, worked_s, most, progress, json.loads(report.read_text()))


def family(pid: int) -> list[int]:
    """Return a process and all that it started."""
    found = [pid]
    for one in found:
        try:
            found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:
            continue
    return found


def proportional_mb(pid: int) -> float:
    """Return a process's memory, 0 for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


def long_log(folder: Path, size_mb: int) -> Iterator[Row]:
    """A long log, read alone and then with everything."""
    log = folder / "chats.jsonl"
    lines, broken = write_chats(log, size_mb * 1_000_000)
    name = f"{size_mb:,} MB of chats"
    read = analyze(log, "--requests", "0")
    megabytes = log.stat().st_size / 1e6
    yield Row(f"{name}, reading: speed of one processor", megabytes / read.worked_s, "MB/s", SPEED_MB_S, least=True)
    yield Row(f"{name}, reading: the same by the clock on the wall", megabytes / read.took_s, "MB/s")
    yield Row(f"{name}, reading: most memory", read.memory_mb, "MB", MEMORY_MB)
    if read.took_s > SILENT_S:
        yield Row(f"{name}, reading: lines of progress", read.progress, "lines", 1, least=True)
    yield Row(f"{name}: lines that were not counted right", wrong(read.report, lines, broken), "lines", 0)
    whole = analyze(log)
    yield Row(f"{name}, simulations included: whole command, of processors", whole.worked_s, "s")
    yield Row(f"{name}, simulations included: whole command", whole.took_s, "s")
    yield Row(f"{name}, simulations included: most memory of all processes", whole.memory_mb, "MB", MEMORY_MB)
    log.unlink()


def wrong(report: dict[str, Any], lines: int, broken: int) -> int:
    """Return by how much a report's counts are off."""
    return abs(int(report["requests"]) - (lines - broken)) + abs(int(report["bad"]["count"]) - broken)


# --- curves ------------------------------------------------------------------------------------------------

LOGS: dict[str, Callable[[], Iterable[Keys]]] = {
    "uniform topics": lambda: topic_paths(0.0, 25_000, 400),
    "Zipf 1 topics": lambda: topic_paths(1.0, 25_000, 4000),
    "Zipf 2 topics": lambda: topic_paths(2.0, 25_000, 4000),
    "conversations": lambda: talk_paths(25_000),
    "topics and one-off prompts": lambda: mixed_paths(25_000),
}


def curves(_: Path, size_mb: int) -> Iterator[Row]:
    """Sampled curves from the first request on, and from where an exact one was given up."""
    for name, paths in LOGS.items():
        exact, begun, sampled = ExactCurve(), ExactCurve(), Sampled()
        later: Sampled | None = None
        for i, keys in enumerate(paths()):
            listed = keys.tolist()
            exact.access(listed, "")
            sampled.access(keys, listed, "")
            if later is None and i >= 5000:
                later = Sampled.following(begun, sampled.limit)
            if later is None:
                begun.access(listed, "")
            else:
                later.access(keys, listed, "")
        assert later is not None
        told = f"{name}, {len(exact.stack):,} blocks"
        yield Row(f"{told}: sampled against exact, largest difference", apart(exact, sampled), "points", POINT)
        yield Row(f"{told}: the same, exact at first", apart(exact, later), "points", POINT)


def apart(exact: ExactCurve, sampled: Sampled) -> float:
    """Return the largest difference between two curves, in points."""
    return difference(exact.curve(), sampled.curve())


def difference(one: HitCurve, other: HitCurve) -> float:
    """Return the largest difference of hit rates, in points."""
    assert not other.exact, "a sample that holds everything shows nothing"
    return 100 * max(abs(a - b) for a, b in zip(one.rates, other.rates, strict=True))


def traces(folder: Path) -> Iterator[Row]:
    """Mooncake's traces, exact and sampled."""
    for name, published in PUBLISHED.items():
        path = folder / f"mooncake_{name}_trace.jsonl"
        if not path.exists():
            raise SystemExit(f"--traces: there is no {path}")
        exact, sampled = (
            next(iter(Collector(PromptReader(), limits).read([path]).models.values())).shared.curve()
            for limits in (Limits("exact"), Limits("sampled", sample_blocks=8192))
        )
        rate = 100 * exact.rates[-1]
        yield Row(f"Mooncake, {name}: hit rate of an endless cache", rate, "%")
        yield Row(f"Mooncake, {name}: off the published {published}", abs(rate - published), "points", TRACE_POINTS)
        yield Row(f"Mooncake, {name}: 8,192 sampled blocks against exact", difference(exact, sampled), "points", POINT)


# --- verdicts ----------------------------------------------------------------------------------------------

FLEET = ("--cache-tokens", "2000", "--prefill-rate", "3300", "--overhead-ms", "100", "--requests", "500")
"""Four nodes of MMLU's published setting: caches that hold a topic or two, and engines that are slow beside the way."""


def verdicts(folder: Path, size_mb: int) -> Iterator[Row]:
    """Logs whose answer is known."""
    cases: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
        "uniform topics, 200 ms: do not route": (
            lambda path: write_topics(path, 0.0, 500),
            ("--delays", "200", *FLEET),
            "not route",
        ),
        "Zipf 2, 2 ms: route": (lambda path: write_topics(path, 2.0, 500), ("--delays", "2", *FLEET), "route"),
        "one-off prompts: local caches suffice": (lambda path: write_one_off(path, 300), (), "local caches suffice"),
    }
    for name, (write, options, wanted) in cases.items():
        write(folder / "verdict.jsonl")
        (model,) = analyze(folder / "verdict.jsonl", *options).report["models"]
        advice = model["verdict"]["advice"]
        right = (
            advice != "route" and "not route" in model["verdict"]["says"] if wanted == "not route" else advice == wanted
        )
        yield Row(f"verdict of {name}: {advice!r}", float(right), "of 1 right", 1, least=True)


PARTS: dict[str, Callable[[Path, int], Iterable[Row]]] = {"log": long_log, "curves": curves, "verdicts": verdicts}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000, metavar="MB", help="of the generated chat log (1000)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="where mooncake_*_trace.jsonl are")
    json_option(parser)
    options = parser.parse_args()
    names = chosen(parser, options.only, PARTS)
    with tempfile.TemporaryDirectory(prefix="prefixroute-analyze-") as folder:
        parts = [(name, PARTS[name](Path(folder), options.size)) for name in names]
        if options.traces is not None:
            parts.append(("traces", traces(options.traces)))
        publish(parts, options.json)


if __name__ == "__main__":
    main()
