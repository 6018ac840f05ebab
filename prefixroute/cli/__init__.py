"""The command line: ``prefixroute COMMAND ...``.

Rules:
1. A command imports what it needs when it runs: ``prefixroute --help`` works with no extra installed.
2. A user's mistake is one clear line on standard error and exit code 2; nothing has been started by then.
3. Here are the core's own commands. Packages built on the core bring theirs as a `Command` under the entry-point group
   ``prefixroute.commands``, so that nothing here imports an adapter or an example.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Final, NamedTuple, NoReturn

from .. import __version__
from ..analyze import command as analysis
from ..errors import UsageError
from ..routing import router
from . import replay
from .subjects import PLANS, SIMULATIONS

USAGE_ERROR: Final = 2
GROUP: Final = "prefixroute.commands"


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


@contextmanager
def needing_extra(what: str, extra: str) -> Iterator[None]:
    """Turn an `ImportError` within into a `UsageError` that names the extra to install for `what`."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{what} needs its extra, run: pip install 'prefixroute[{extra}]' ({error})") from error


COMMANDS: Final = (
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
"""The core's own commands."""


def commands() -> tuple[Command, ...]:
    """Return all commands: those that installed packages bring, by name, then the core's own."""
    names = {command.name for command in COMMANDS}
    found = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return (*(_brought(point) for point in found if point.name not in names), *COMMANDS)


def _brought(point: EntryPoint) -> Command:
    """A package's command, or one that says why it cannot be had: a broken package must not break the others."""
    try:
        command = point.load()
        if isinstance(command, Command) and command.name == point.name:
            # What fails here would otherwise fail in the parser of all commands.
            command.add_options(_Parser())
            return command
        why = f"{point.value} is no prefixroute.cli.Command named {point.name!r}"
    except Exception as error:
        why = f"the command {point.name!r} cannot be loaded from {point.value}: {type(error).__name__}: {error}"

    def refuse(options: argparse.Namespace) -> int:
        raise UsageError(why)

    def any_options(parser: argparse.ArgumentParser) -> None:
        # With no prefix nothing is an option, "--nodes" and "-h" included: all of it is the rest.
        parser.prefix_chars = ""
        parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    return Command(point.name, f"not available: {why}".replace("%", "%%"), any_options, refuse)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(prog="prefixroute", description="Independent LLM engines act as one prefix cache.")
    parser.add_argument("--version", action="version", version=f"prefixroute {__version__} ({_build()})")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands():
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
