"""Engine batches cut into portions, so that a large one (a replay, a report, a warm start) does not block the node.

Rules:
1. A batch of up to `PORTION_BLOCKS` blocks, as an engine's step brings, stays whole.
2. The portions of a batch, applied in order, come to what the batch does. Between two of them some of its blocks are
   applied and others are not yet.
3. An event is cut between two of its blocks, and each part continues the one before. A report and an event with items
   stay whole, since only all of it says what is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvent

PORTION_BLOCKS = 1024
"""Blocks that are applied at once. They take 2 ms, and are 16,384 tokens: as many as engines compute in a step."""


def is_small(batch: EngineBatch, most: int = PORTION_BLOCKS) -> bool:
    """Whether a batch of up to `most` blocks is one portion. O(events)."""
    return len(batch.events) <= most and sum(map(_blocks, batch.events)) <= most


def portions(batch: EngineBatch, most: int = PORTION_BLOCKS) -> Iterator[EngineBatch]:
    """Yield a batch in portions of up to `most` blocks each, or of one event that cannot be cut."""
    events: list[EngineEvent] = []
    room = most
    for event in batch.events:
        for part in _parts(event, most):
            n = _blocks(part)
            if n > room and events:
                yield EngineBatch(tuple(events), batch.rank, batch.ts)
                events, room = [], most
            events.append(part)
            room -= n
    yield EngineBatch(tuple(events), batch.rank, batch.ts)


def _blocks(event: EngineEvent) -> int:
    """The size of an event in blocks; one without blocks counts as one."""
    return max(1, len(event.handles)) if isinstance(event, (BlocksStored, BlocksRemoved)) else 1


def _parts(event: EngineEvent, most: int) -> Iterator[EngineEvent]:
    """An event as parts of up to `most` blocks, or whole if it cannot be cut."""
    n = _blocks(event)
    if n > most and isinstance(event, BlocksRemoved):
        for at in range(0, n, most):
            yield replace(event, handles=event.handles[at : at + most], told=0 if at else event.told)
    elif n > most and isinstance(event, BlocksStored) and _cuttable(event):
        for at in range(0, n, most):
            yield event.part(at, at + most)
    else:
        yield event


def _cuttable(event: BlocksStored) -> bool:
    whole = event.block_size > 0 and len(event.tokens) == len(event.handles) * event.block_size
    return whole and not event.confirmed and not event.contents
