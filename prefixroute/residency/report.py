"""A report: blocks that an engine tells of again because it was asked to, not because it stored them.

Rule: what is known of a report's blocks already is only confirmed; runs of the others are plain stores, each below the
block before it. So a report adds no copies, whatever it repeats (vLLM's full mode, #45261).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from ..events import BlocksStored, ContentSpan, Handle


def parts_of(report: BlocksStored, held: Callable[[Handle], bool]) -> Iterator[tuple[Handle, ...] | BlocksStored]:
    """Yield a report in runs, in order: handles that are held, and plain stores of those that are not. O(its blocks).

    `held` is asked of each handle once, before the first run is yielded.
    """
    start = 0
    for known, run in groupby([held(handle) for handle in report.handles]):
        end = start + len(list(run))
        yield report.handles[start:end] if known else _part(report, start, end)
        start = end


def _part(report: BlocksStored, start: int, end: int) -> BlocksStored:
    first, last = start * report.block_size, end * report.block_size
    return replace(
        report,
        handles=report.handles[start:end],
        parent=report.handles[start - 1] if start else report.parent,
        tokens=report.tokens[first:last],
        contents=tuple(
            ContentSpan(item.content_id, item.start - first) for item in report.contents if first <= item.start < last
        ),
        confirmed=False,
    )
