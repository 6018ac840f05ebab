"""``prefixroute analyze LOG...``: what a request log says about prefix caching and routing, before deploying."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path

from prefixroute import UsageError
from prefixroute.sim.parallel import Progress, check_writable, write_json

from . import sources
from .collect import EXACT_BLOCKS, Collector, Limits
from .gain import GainSettings
from .log_report import Report, Wanted, as_json, build
from .page import page
from .progress import reading
from .prompt_keys import PromptReader
from .sample import SAMPLE_BLOCKS
from .text import table

REQUESTS = 1500
"""Requests that are simulated by default: about a minute on two cores."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    fleet = GainSettings()
    add(
        "logs",
        type=Path,
        nargs="+",
        metavar="LOG",
        help="JSON lines of requests, or traces; packed too (gz, bz2, xz, zst); - is standard input",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of the model (4 bytes are taken for a token)")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja chat template, tokenizer_config.json, or its folder")
    add("--block-tokens", type=int, default=16, metavar="N", help="tokens of a block of the engine's cache (16)")
    add(
        "--tenant-field",
        default="",
        metavar="NAME",
        help="field that names the tenant (tenant, user ...)",
    )
    add("--method", choices=("auto", "exact", "sampled"), default="auto", help="of the hit curve (auto)")
    add("--exact-blocks", type=int, default=EXACT_BLOCKS, metavar="N", help="with auto: sampled beyond (1,000,000)")
    add(
        "--sample-blocks", type=int, default=SAMPLE_BLOCKS, metavar="N", help="cold and hot blocks of a sample (65,536)"
    )
    add("--top", type=int, default=10, metavar="N", help="shared prefixes and tenants that are shown (10)")
    add("--text", action="store_true", help="show the text of shared prefixes: parts of prompts enter the report")
    add("--nodes", type=int, default=fleet.nodes, metavar="N", help="nodes of the simulated fleet (4)")
    add("--delays", type=_numbers, default=fleet.delays_ms, metavar="MS,...", help="one-way delays (1,10,50,200)")
    add("--cache-tokens", type=int, default=fleet.cache_tokens, metavar="N", help="cache of each node (500,000)")
    add("--prefill-rate", type=float, default=fleet.prefill_tokens_per_s, metavar="R", help="tokens a second (8000)")
    add("--overhead-ms", type=float, default=fleet.overhead_ms, metavar="MS", help="of an engine for a request (20)")
    add("--load", type=float, default=fleet.load, metavar="X", help="share of time that engines work (0.5)")
    add("--requests", type=int, default=REQUESTS, metavar="N", help="of a model to simulate, 0 for none (1500)")
    add("--seeds", type=int, default=len(fleet.seeds), metavar="N", help="simulations, with other origins each (4)")
    add("--isolate", action="store_true", help="simulate tenants that share nothing")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="W", help="processes that simulate (one a core)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write the report as JSON (no FILE: print that alone)")
    add("--html", metavar="FILE", help="write the report as one HTML file with charts")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers with commas between, not {text!r}") from None


def run_options(options: argparse.Namespace) -> int:
    """Run the command; return 1 for a log without requests. Raises `UsageError` for files or options it cannot use."""
    reader = PromptReader(options.block_tokens, options.tokenizer, options.chat_template)
    limits = Limits(
        options.method,
        options.exact_blocks,
        options.sample_blocks,
        options.requests,
        options.text,
        options.tenant_field,
    )
    if min(options.workers, options.top, options.seeds) < 1 or options.requests < 0:
        raise UsageError("workers, top and seeds are 1 or more, requests 0 or more")
    fleet = GainSettings(
        options.nodes,
        options.delays,
        options.cache_tokens,
        options.prefill_rate,
        options.overhead_ms,
        options.load,
        seeds=tuple(range(1, options.seeds + 1)),
        tenants_apart=options.isolate,
    )
    total = sources.check(options.logs)
    check_writable(options.json)
    check_writable(options.html)
    with reading(total) as told:
        log = Collector(reader, limits).read(options.logs, told)
    wanted = Wanted(options.top, options.top, fleet if options.requests else None, options.workers)
    files = [sources.label(path) for path in options.logs]
    report = build(
        log, files, unit(reader, log.kinds), wanted, lambda name: Progress(options.seeds, f"simulations of {name}")
    )
    _show(report, options)
    return 0 if report.requests else 1


def _show(report: Report, options: argparse.Namespace) -> None:
    if options.json != "-":
        print(table(report))
    write_json(options.json, as_json(report))
    if options.html:
        Path(options.html).write_text(page(report), encoding="utf-8")


def unit(reader: PromptReader, kinds: Collection[str]) -> str:
    """Return a text that says what counts as a token in a report of prompts of these kinds."""
    said = {
        "text": "no tokenizer: 4 bytes are taken for a token" if reader.by_bytes else "tokens of the tokenizer",
        "tokens": "tokens as they were logged",
        "trace": "tokens as the trace tells them",
    }
    return ", ".join(text for kind, text in said.items() if kind in kinds)
