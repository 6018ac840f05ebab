#!/usr/bin/env python3
"""Ours against the rivals that install from PyPI, and against the machine: same prompts, same holders, in turns.

    python benchmarks/compare.py [--only decisions,turns,ingest,memory] [--quick] [--json [FILE]] [--markdown [FILE]]

*decisions*: for each fleet and prompt length, *match* (who holds how much of this prompt?) and *decide* (who serves
it?), from a list of ints, a packed buffer (`array('I')`) and what can be prepared (our chain, a rival's hashes). *hit*:
one endpoint holds the whole prompt and every other one its first eighth; *half*: it forks half way; *miss*: nobody
holds its first block. *decide* of ours is all of `Node.route`: match, policy, booking, counters. What the answers of
others are is said with them (`rivals.py`), and so is who is not installed. *floor* is a C program that hashes and
matches as we do, called from Python; *python hash* packs and hashes a prompt and does nothing else.
*turns*: the next turn of a conversation of 65,536 tokens. *ingest*: an engine's events, or whatever a rival takes.
*memory*: bytes per block and per (endpoint, block).

Times are of one call, in microseconds: medians of the rounds, and the best round. A ratio is the median of the rounds'
own: how many times as long the rival took. With `--markdown FILE` the tables go between that file's marks; with
`--read FILE,...` they are those of earlier runs, put together.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from comparison import floors
from comparison.compare_report import FORMS, LAYERS, Row, bars, line, machine, publish, row
from comparison.compare_tables import tables
from comparison.compare_upkeep import ingest, memory
from comparison.contest import calls, contest
from comparison.ours import NOW, ROOT, SPEC, Floors, Ours
from comparison.rivals import ANSWERS, RIVALS, Index, Side, installed
from comparison.worlds import BLOCK, CASES, World, world
from workbench.bars import json_option

from prefixroute import Outcome, TokenChain
from prefixroute.keys.chain import pack_tokens

TURN = 500
"""Tokens of a conversation's next turn."""

Say = Callable[[str], None]


# --- decisions ---------------------------------------------------------------------------------------------


def decisions(options: argparse.Namespace, say: Say) -> Iterator[Row]:
    """Matches and decisions of every fleet and length; then the largest fleet against the smallest."""
    try:
        floor = floors.load()
    except floors.NoFloor as reason:
        say(f"no floor: {reason}")
        floor = None
    for blocks in options.blocks:
        fleets: dict[int, Ours] = {}
        for endpoints in options.endpoints:
            given = world(endpoints, blocks, options.variants)
            fleets[endpoints] = ours = Ours(given)
            others = list(_indexes(options, given, say))
            sides: list[Side] = [ours, Floors(floor, given, ours), *(index for _, index in others)]
            # What one side keeps must not be what another one's garbage collection walks through.
            gc.collect()
            gc.freeze()
            for what in ("match", "decide"):
                for case in CASES:
                    for form in FORMS:
                        runs = {k: run for side in sides for k, run in side.runs(what, case, form).items()}
                        yield row(f"{what}, {case}, {form}", endpoints, blocks, contest(runs, options.rounds))
            yield from _layers(ours, endpoints, blocks, options.rounds)
            for _, index in others:
                index.close()
            gc.unfreeze()
        if len(fleets) > 1:
            yield from _fleets(fleets, blocks, options.rounds)


def _indexes(options: argparse.Namespace, given: World, say: Say) -> Iterator[tuple[str, Index]]:
    """The rivals' indexes of a world; one that fails is named, and left out."""
    for name in options.present:
        try:
            index = RIVALS[name].make(given)
            depths = {case: index.depth(case, 0) for case in CASES}
        except Exception as error:
            say(
                f"{name}, {given.endpoints} endpoints, {given.blocks} blocks: left out, {type(error).__name__}: {error}"
            )
            continue
        if depths != given.depths:
            say(f"{name}, {given.endpoints} endpoints, {given.blocks} blocks: finds {depths} of {given.depths}")
        yield name, index


def _layers(ours: Ours, endpoints: int, blocks: int, rounds: int) -> Iterator[Row]:
    """What a decision costs above the bare match of the same prompts."""
    for form in FORMS:
        runs = {what: ours.runs(what, "hit", form)["ours"] for what in ("match", "decide")}
        times = contest(runs, rounds)
        over = times["decide"].less(times["match"])
        yield row(f"{LAYERS}, hit, {form}", endpoints, blocks, {"ours": over})


def _fleets(fleets: Mapping[int, Ours], blocks: int, rounds: int) -> Iterator[Row]:
    """The largest fleet against the smallest, whose prompts have as many distinct depths."""
    low, high = min(fleets), max(fleets)
    for what in ("match", "decide"):
        for form in FORMS:
            small, large = (fleets[n].runs(what, "hit", form)["ours"] for n in (low, high))
            times = contest({"small": small, "large": large}, rounds)
            named = {"ours": times["small"], f"ours, {high} endpoints": times["large"]}
            yield row(f"growth of {what}, hit, {form}", low, blocks, named)


# --- turns -------------------------------------------------------------------------------------------------


def turns(options: argparse.Namespace, say: Say) -> Iterator[Row]:
    """Hashing of turn n + 1 where turn n was routed before: `Node.chain` and the last key, less the packing."""
    given = world(2, 64, 1, 0)
    node = Ours(given).node
    rng = np.random.default_rng(1)
    before = array("I", rng.integers(0, 128_000, options.conversation, dtype=np.uint32).tobytes())
    turn = array("I", rng.integers(0, 128_000, TURN, dtype=np.uint32).tobytes())
    longer = [before + turn[: TURN - 1] + array("I", [i]) for i in range(16)]
    decision = node.route(before, NOW)
    node.report(decision, Outcome.served(cached_tokens=0, ttft_s=0.1), NOW)

    def chained(chain: TokenChain) -> None:
        chain.key(chain.depth)

    runs = {
        "ours": calls(lambda tokens: chained(node.chain(tokens)), longer),
        "packing": calls(pack_tokens, longer),
        "scratch": calls(lambda tokens: chained(TokenChain(SPEC, ROOT, tokens)), longer),
    }
    times = contest(runs, options.rounds)
    hashing = {"ours": times["ours"].less(times["packing"]), "all of it anew": times["scratch"].less(times["packing"])}
    blocks = len(longer[0]) // BLOCK
    yield row(f"hashing of a turn of {TURN} tokens after {options.conversation:,}, buffer", 1, blocks, hashing)
    yield row("packing of it", 1, blocks, {"ours": times["packing"]})


# --- the program -------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace, Say], Iterator[Row]]] = {
    "decisions": decisions,
    "turns": turns,
    "ingest": ingest,
    "memory": memory,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run ({','.join(PARTS)})")
    parser.add_argument("--rivals", default=",".join(RIVALS), help=f"whom to compare with ({','.join(RIVALS)})")
    parser.add_argument("--endpoints", default="4,64,1024", help="fleet sizes (4,64,1024)")
    parser.add_argument("--blocks", default="64,512,4096", help="prompt lengths in blocks of 16 tokens (64,512,4096)")
    parser.add_argument("--variants", type=int, default=4, help="prompts of each case, asked for in turn (4)")
    parser.add_argument("--conversation", type=int, default=65_536, help="tokens before the next turn (65,536)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (15)")
    parser.add_argument("--quick", action="store_true", help="64 endpoints and 5 rounds")
    parser.add_argument("--read", metavar="FILES", help="run nothing: take the rows of earlier runs' JSON")
    json_option(parser)
    parser.add_argument(
        "--markdown", nargs="?", const="-", metavar="FILE", help="print the tables as Markdown, or write them into FILE"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.endpoints, options.rounds = "64", 5
    options.endpoints = [int(n) for n in options.endpoints.split(",")]
    options.blocks = [int(n) for n in options.blocks.split(",")]
    for asked, known in ((options.only, PARTS), (options.rivals, RIVALS)):
        if unknown := {name for name in asked.split(",") if name} - known.keys():
            parser.error(f"not known: {', '.join(sorted(unknown))}")
    names = [name for name in RIVALS if name in options.rivals.split(",")]
    options.present, options.absent = installed(names)
    return options


def main() -> int:
    """Run the parts, print the rows and the bars, and write what was asked for."""
    options = parse()
    quiet = "-" in (options.json, options.markdown)

    def say(text: str) -> None:
        print(text, file=sys.stderr if quiet else sys.stdout, flush=True)

    rows: list[Row] = []
    about: dict[str, Any] = {}
    if options.read:
        for file in options.read.split(","):
            earlier = json.loads(Path(file).read_text())
            rows += earlier["rows"]
            if about:
                for name in ("runs", "runs_disturbed"):
                    about["machine"][name] += earlier["machine"][name]
            else:
                about = {"machine": earlier["machine"], "answers": earlier["answers"]}
    else:
        for name, reason in options.absent.items():
            say(f"not compared: {name}: {reason}")
        for part in options.only.split(","):
            for figures in PARTS[part](options, say):
                rows.append(figures)
                if not quiet:
                    print(line(figures), flush=True)
        about = {"machine": machine(options), "answers": ANSWERS}
    held = bars(rows)
    publish(rows, held, about, lambda: tables(rows, held), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
