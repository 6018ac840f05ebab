"""How much memory the engines take: the proportional set size of all their processes, sampled, and its peak.

Proportional: what processes share counts once in the sum. Linux only, where the engines run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

SAMPLE_S = 1.0
"""Seconds between two samples."""


def pss_bytes(groups: Iterable[int]) -> int:
    """Return the summed proportional set size of every process in these process groups. O(processes)."""
    wanted = set(groups)
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) not in wanted:
                continue
            lines = (entry / "smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # ended meanwhile, or not ours
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


class MemoryWatch:
    """Samples the memory of the groups that `groups` tells, in a thread of its own, between `start` and `stop`."""

    def __init__(self, groups: Callable[[], Iterable[int]]) -> None:
        self.peak_bytes = 0
        self._groups = groups
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End it; `peak_bytes` stays."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            if groups := list(self._groups()):
                self.peak_bytes = max(self.peak_bytes, pss_bytes(groups))
