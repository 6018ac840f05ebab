"""The command line: ``prefixroute COMMAND ...``.

Rules:
1. A command imports what it needs when it runs: ``prefixroute --help`` works with no extra installed.
2. A user's mistake is one clear line on standard error and exit code 2; nothing has been started by then.
3. COMMANDS is the list of commands; each is a line there and two functions, one for options, one to run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from . import __version__, replay, router
from .analyze import command as analysis
from .errors import UsageError
from .plan.commands import SUBJECTS as PLANS
from .sim.commands import SUBJECTS as SIMULATIONS

USAGE_ERROR = 2


class Command(NamedTuple):
    """A subcommand: its name, one line of help, its options, and what it does (returns the exit code)."""

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of printing its usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


# --- demo --------------------------------------------------------------------------------------------------


class EngineDefaults(NamedTuple):
    """What the demo asks of a kind of engine unless told otherwise: load, and cache in blocks of 16 tokens."""

    requests: int
    rate: float
    capacity_blocks: int


ENGINE_DEFAULTS = {
    "emulated": EngineDefaults(requests=800, rate=14.0, capacity_blocks=800),
    # Two cores, which client, sidecars and engines share, prefill about 1,000 tokens a second between them.
    "vllm": EngineDefaults(requests=100, rate=0.7, capacity_blocks=800),
    # SGLang's CPU path takes about twice as long for the same prompt.
    "sglang": EngineDefaults(requests=60, rate=0.35, capacity_blocks=800),
}
DEFAULT_ENGINE = "emulated"
DEMO_POLICIES = ("default", "rent", "greedy", "longest", "least", "none")


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


def _run_demo(options: argparse.Namespace) -> int:
    try:
        demo = importlib.import_module("prefixroute_lan4.demo")
    except ImportError as error:
        raise UsageError(f"the demo needs its extra, run: pip install 'prefixroute[demo]' ({error})") from error
    return int(demo.run_options(options, demo_defaults(options.engine, options.engines)))


# --- doctor ------------------------------------------------------------------------------------------------


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("configs", nargs="+", type=Path, metavar="CONFIG", help="a sidecar's configuration; best those of all nodes")
    add("--patience", type=_seconds, default=3.0, metavar="S", help="how long an event or an echo may take (3)")
    add("--json", action="store_true", help="print the findings as JSON")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 10:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 10 seconds, not {text}")
    return value


def _run_doctor(options: argparse.Namespace) -> int:
    try:
        doctor = importlib.import_module("prefixroute_lan4.doctor")
    except ImportError as error:
        raise UsageError(f"the doctor needs its extra, run: pip install 'prefixroute[demo]' ({error})") from error
    return int(doctor.run_options(options))


COMMANDS = (
    Command(
        "demo",
        "run the same requests through four nodes, without routing and with it",
        _demo_options,
        _run_demo,
    ),
    Command(
        "doctor",
        "examine running sidecars and their engines, and say what to change; exit code 1 when something is wrong",
        _doctor_options,
        _run_doctor,
    ),
    Command(
        "replay",
        "apply a recorded engine event stream and print what the engine holds at its end",
        replay.add_options,
        replay.run,
    ),
    Command(
        "simulate",
        "run real nodes in virtual time: replication under faults, policies over workloads, your own scenario",
        SIMULATIONS.add_options,
        SIMULATIONS.run_options,
    ),
    Command(
        "plan",
        "compute a plan before deploying: where blocks of a model go, which prompts another cluster should prefill",
        PLANS.add_options,
        PLANS.run_options,
    ),
    Command(
        "analyze",
        "measure a request log before deploying: hit rates by cache size, shared prefixes, what routing would gain",
        analysis.add_options,
        analysis.run_options,
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all COMMANDS."""
    parser = _Parser(prog="prefixroute", description="Independent LLM engines act as one prefix cache.")
    parser.add_argument("--version", action="version", version=f"prefixroute {__version__} ({_build()})")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _build() -> str:
    """Which build runs: the compiled one has C extensions in the place of some modules."""
    return "pure Python" if str(router.__file__).endswith(".py") else "compiled"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 when it failed, 2 for a user's mistake, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = "prefixroute"
    try:
        options = build_parser().parse_args(arguments)
        name = f"prefixroute {options.command}"
        return int(options.run(options))
    except UsageError as error:
        print(f"{name}: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # The reader, `head` say, has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _one_line(error: UsageError) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
