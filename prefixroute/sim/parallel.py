"""Experiments over many processes, with a progress line and JSON at the end.

Rules:
1. A task is a function of this package and plain arguments, so that processes can be spawned anywhere.
2. Results come in the order of the tasks, whatever the number of processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefixroute import UsageError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every experiment: the number of processes, and the file for its JSON."""
    add = parser.add_argument
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="W", help="processes (one a core)")
    add("--json", metavar="FILE", help='write the result as JSON ("-": standard output, and nothing else)')


def add_seed_options(parser: argparse.ArgumentParser, first: int, seeds: int) -> None:
    """Declare ``--seed`` and ``--seeds`` with their defaults, for `seeds_of`."""
    parser.add_argument("--seed", type=int, default=first, metavar="S", help=f"first seed ({first})")
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help=f"seeds ({seeds})")


def seeds_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the seeds that the options name, one after the other."""
    return tuple(range(options.seed, options.seed + options.seeds))


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare ``--json [FILE]``, for `write_json`, of a command that prints a table without it."""
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help=f"write the {what} as JSON (no FILE: print that alone)"
    )


class Progress:
    """One line on standard error: on a terminal rewritten every second, elsewhere a new line every ten seconds."""

    def __init__(self, total: int, what: str, silent: bool = False) -> None:
        self._total = total
        self._what = what
        self._silent = silent
        self._began_at = self._told_at = time.monotonic()

    def __call__(self, done: int) -> None:
        """Show that `done` of all tasks are done."""
        now, live = time.monotonic(), sys.stderr.isatty()
        last = done == self._total
        if self._silent or (now - self._told_at < (1 if live else 10) and not (live and last)):
            return
        self._told_at = now
        left = (now - self._began_at) * (self._total - done) / max(done, 1)
        end, head = ("\n" if last or not live else ""), ("\r" if live else "")
        print(f"{head}{done} of {self._total} {self._what}, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)


def run_all(
    function: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    workers: int,
    progress: Callable[[int], None] | None = None,
) -> list[_Result]:
    """Run a function on every task, in this process when one worker is enough. Raises `UsageError` for 0 workers."""
    if workers < 1:
        raise UsageError("an experiment needs workers >= 1")
    results = []
    if workers == 1 or len(tasks) < 2:
        for done, task in enumerate(tasks, 1):
            results.append(function(task))
            if progress is not None:
                progress(done)
        return results
    with multiprocessing.get_context("spawn").Pool(min(workers, len(tasks)), _leave_interrupts) as pool:
        for done, result in enumerate(pool.imap(function, tasks), 1):
            results.append(result)
            if progress is not None:
                progress(done)
    return results


def _leave_interrupts() -> None:
    """Ignore Ctrl-C in a worker: the parent answers it by ending the pool, and no worker prints a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def write_json(path: str | None, result: Any) -> None:
    """Write a result as JSON: to a file, to standard output for "-", nowhere for None. Raises `UsageError`."""
    if path is None:
        return
    text = json.dumps(result, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def check_writable(path: str | None) -> None:
    """Find out before hours of work whether the result can be written. Raises `UsageError`."""
    if path is None or path == "-":
        return
    try:
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
