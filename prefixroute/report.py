"""A report: blocks that an engine tells of again because it was asked to, not because it stored them.

Rule: what is known of a report's blocks already is only confirmed; runs of the others are plain stores, each below the
block before it. So a report adds no copies, whatever it repeats (vLLM's full mode, #45261).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .events import BlocksStored, ContentSpan, Handle


def parts_of(report: BlocksStored, held: Callable[[Handle], bool]) -> Iterator[Handle | BlocksStored]:
    """Yield the held handles of a report, and stores of the others, in order. Amortised O(its blocks).

    `held` is asked of each handle once, when all before it have been taken.
    """
    start = 0
    for i, handle in enumerate(report.handles):
        if not held(handle):
            continue
        if start < i:
            yield _part(report, start, i)
        yield handle
        start = i + 1
    if start < len(report.handles):
        yield _part(report, start, len(report.handles))


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
