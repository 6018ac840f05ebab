"""``prefixroute demo``: its options. What it does is in `demo`, which needs the extra of that name.

Rule: nothing is imported here but the command line's own table, so that ``prefixroute --help`` needs no extra.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from prefixroute.cli import Command, needing_extra


class EngineDefaults(NamedTuple):
    """What the demo asks of a kind of engine unless told otherwise: load, and cache in blocks of 16 tokens."""

    requests: int
    rate: float
    capacity_blocks: int


ENGINE_DEFAULTS: Final = {
    "emulated": EngineDefaults(requests=800, rate=14.0, capacity_blocks=800),
    # Two cores, which client, sidecars and engines share, prefill about 1,000 tokens a second between them.
    "vllm": EngineDefaults(requests=100, rate=0.7, capacity_blocks=800),
    # SGLang's CPU path takes about twice as long for the same prompt.
    "sglang": EngineDefaults(requests=60, rate=0.35, capacity_blocks=800),
}
DEFAULT_ENGINE: Final = "emulated"
DEMO_POLICIES: Final = ("default", "rent", "greedy", "longest", "least", "none")


def _demo_options(parser: argparse.ArgumentParser) -> None:
    emulated, vllm, sglang = (ENGINE_DEFAULTS[kind] for kind in ("emulated", "vllm", "sglang"))
    add = parser.add_argument
    add("--nodes", type=int, metavar="N", help="nodes, each an engine and a sidecar (4, or as many as --engines)")
    add(
        "--requests",
        type=int,
        metavar="N",
        help=f"requests of a run ({emulated.requests}; with vllm {vllm.requests}, with sglang {sglang.requests})",
    )
    add(
        "--rate",
        type=float,
        metavar="R",
        help=f"requests a second, all nodes ({emulated.rate:g}; with vllm {vllm.rate:g}, with sglang {sglang.rate:g})",
    )
    add("--seed", type=int, default=1, metavar="S", help="seed of the workload (1)")
    add("--zipf", type=float, default=1.1, metavar="X", help="skew over subjects, 0 for none (1.1)")
    add("--capacity-blocks", type=int, metavar="N", help="cache of an engine in blocks of 16 tokens (800)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--engine", choices=tuple(ENGINE_DEFAULTS), default=DEFAULT_ENGINE, help="all engines (emulated)"
    )
    kinds.add_argument(
        "--engines", type=_engine_list, default=(), metavar="KIND,...", help="each node's, as vllm,vllm,sglang,sglang"
    )
    add("--policy", choices=DEMO_POLICIES, default="default", help="policy of the routed run (default)")
    add("--mmlu", type=Path, metavar="DIR", help="read MMLU's CSV files (DIR/dev, DIR/test), not made-up text")
    add("--kill", metavar="NODE@FRACTION", help="kill a node in the middle of each run, as node-2@0.5")
    add("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="report, plots, logs (demo-out)")
    add("--json", metavar="FILE", help='write the figures as JSON too ("-": standard output)')


def _engine_list(text: str) -> tuple[str, ...]:
    """The kinds of a fleet, one a node."""
    kinds = tuple(text.split(","))
    for kind in kinds:
        if kind not in ENGINE_DEFAULTS:
            known = ", ".join(ENGINE_DEFAULTS)
            raise argparse.ArgumentTypeError(f"invalid choice: {kind!r} (choose from {known}, with commas between)")
    return kinds


def demo_defaults(engine: str, engines: Sequence[str] = ()) -> EngineDefaults:
    """What the demo asks of a fleet unless told otherwise: no more than its slowest kind can carry."""
    return EngineDefaults(*map(min, zip(*(ENGINE_DEFAULTS[kind] for kind in engines or (engine,)), strict=True)))


def with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with what was not given filled in by `demo_defaults`."""
    defaults = demo_defaults(options.engine, options.engines)._asdict()
    missing = {name: value for name, value in defaults.items() if getattr(options, name) is None}
    return argparse.Namespace(**{**vars(options), **missing})


def _run_demo(options: argparse.Namespace) -> int:
    with needing_extra("the demo", "demo"):
        from .demo import run_options
    return run_options(with_defaults(options))


DEMO: Final = Command(
    "demo",
    "run the same requests through four nodes, without routing and with it",
    _demo_options,
    _run_demo,
)
