"""Progress of reading, on standard error: a bar on a terminal, else a line now and then.

Rule: progress shows how much was read, and nothing of its content.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EVERY_S = 10.0
LIVE_S = 1.0
"""Seconds between two lines, and between two states of one line on a terminal."""


@contextmanager
def reading(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes read, of `total` (0: not known)."""
    rich: Any
    console: Any
    try:
        rich = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console")
    except ImportError:
        rich = None
    if rich is None or not sys.stderr.isatty():
        line = ProgressLine(total)
        yield line
        line.end()
        return
    columns = (
        rich.TextColumn("reading"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total or None)
        yield lambda done: bar.update(task, completed=done)


class ProgressLine:
    """One line on standard error: on a terminal rewritten every second, elsewhere a new line every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began_at = self._told_at = time.monotonic()
        self._open = False

    def __call__(self, done: int) -> None:
        """Show that `done` bytes were read."""
        now, live = time.monotonic(), sys.stderr.isatty()
        if now - self._told_at < (LIVE_S if live else EVERY_S):
            return
        self._told_at = now
        print(
            ("\r" if live else "") + said(done, self._total, now - self._began_at),
            end="" if live else "\n",
            file=sys.stderr,
            flush=True,
        )
        self._open = live

    def end(self) -> None:
        """End the line, if there is one."""
        if self._open:
            print(file=sys.stderr)


def said(done: int, total: int, took_s: float) -> str:
    """Return a line of progress: `done` of `total` bytes after `took_s` seconds."""
    rate = done / max(took_s, 1e-9)
    text = f"read {done / 1e6:,.0f}" + (f" of {total / 1e6:,.0f} MB" if total else " MB") + f", {rate / 1e6:.1f} MB/s"
    return text + (f", {max(total - done, 0) / max(rate, 1.0):.0f} s left " if total else " ")
