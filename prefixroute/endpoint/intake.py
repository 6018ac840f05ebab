"""What an adapter hands over, looked at before anything is changed by it: rubbish becomes an unknown event and a gap.

Rules:
1. Whatever is in a batch, nothing is raised for it, and its good events count.
2. An event that cannot be used may have been any: a removal, a clear. So a gap stands beside it, and the residency is
   partial until what is in doubt has been told anew.
3. What an event costs here is a look at types: 0.3 us, and 20 ns a handle. That tokens are token ids is found where
   they are packed (`residency/stores`).
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

from ..events import (
    FULL_ATTENTION_KINDS,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    EngineBatch,
    EngineEvent,
    Namespace,
    StreamGap,
    StreamRestarted,
    UnknownEvent,
)

_HANDLES = frozenset({int, bytes})
_SOUND = (StreamRestarted, UnknownEvent)
"""Events in which nothing is used that could be wrong."""


class Intake(NamedTuple):
    """A batch that can be applied, and what was wrong with the one that came: a reason for each unusable event."""

    batch: EngineBatch
    faults: tuple[str, ...] = ()


def taken_in(batch: EngineBatch) -> Intake:
    """Return a batch with unusable events made `UnknownEvent`, and a gap behind each. O(events + handles)."""
    found = [(at, fault) for at, event in enumerate(batch.events) if (fault := fault_in(event))]
    ts = batch.ts if isinstance(batch.ts, (int, float)) and batch.ts == batch.ts else 0.0
    if not found and ts is batch.ts:
        return Intake(batch)
    faults = dict(found)
    events: list[EngineEvent] = []
    for at, event in enumerate(batch.events):
        unknown = (UnknownEvent(type(event).__name__, faults[at]), StreamGap()) if at in faults else (event,)
        events += unknown
    return Intake(EngineBatch(tuple(events), batch.rank, ts), tuple(faults.values()))


def fault_in(event: Any) -> str:
    """Return what is wrong with an event, "" for nothing."""
    try:
        if isinstance(event, BlocksStored):
            return _fault_in_store(event)
        if isinstance(event, BlocksRemoved):
            bad = _not_handles(event.handles) or _not_placed(event.tier, event.group)
            return bad or ("" if isinstance(event.told, Integral) else "`told` is no number")
        if isinstance(event, BlocksCleared):
            return "" if event.tier is None or isinstance(event.tier, str) else "the tier is no text"
        if isinstance(event, StreamGap):
            return "" if isinstance(event.missing, Integral) else "`missing` is no number"
    except Exception as error:  # An adapter's own sequences may do anything.
        return f"it cannot be read: {error!r:.80}"
    return "" if isinstance(event, _SOUND) else f"{type(event).__name__} is no engine event"


def _fault_in_store(event: BlocksStored) -> str:
    n, size, tokens = len(event.handles), event.block_size, event.tokens
    bad = _not_handles(event.handles) or _not_placed(event.tier, event.group)
    if bad:
        return bad
    if event.parent is not None and _not_handles((event.parent,)):
        return f"the parent is {type(event.parent).__name__}, not None or the handle of a block"
    if type(size) is not int and (isinstance(size, bool) or not isinstance(size, Integral)):
        return f"block_size is {size!r}, not a number of tokens"
    if isinstance(tokens, (str, bytes)) or not hasattr(tokens, "__getitem__"):
        return f"tokens are {type(tokens).__name__}, not a sequence of token ids"
    # Groups that keep no whole prefix come with other counts from real engines (vLLM #44451).
    if len(tokens) not in (0, n * size) and event.mappable and event.group_kind in FULL_ATTENTION_KINDS:
        return f"{len(tokens)} tokens for {n} blocks of {size}"
    if not isinstance(event.namespace, Namespace):
        return f"the namespace is {event.namespace!r:.40}"
    if event.contents and not all(map(_is_span, event.contents)):
        return "contents are not all ContentSpan, of a text and where it starts"
    return "" if isinstance(event.window, Integral) else "the window is no number of tokens"


def _is_span(item: Any) -> bool:
    return isinstance(item, ContentSpan) and isinstance(item.content_id, str) and isinstance(item.start, Integral)


def _not_handles(handles: Any) -> str:
    """What is wrong with the handles of an event."""
    if not isinstance(handles, (tuple, list)):
        return f"handles are {type(handles).__name__}, not a tuple"
    if _HANDLES.issuperset(map(type, handles)):
        return ""
    bad = [h for h in handles if isinstance(h, bool) or not isinstance(h, (bytes, Integral))]
    return f"a handle is {type(bad[0]).__name__}, not int or bytes" if bad else ""


def _not_placed(tier: Any, group: Any) -> str:
    """What is wrong with where an event's blocks are."""
    if not isinstance(tier, str):
        return f"the tier is {tier!r:.40}, not a word"
    return "" if isinstance(group, Integral) else f"the group is {group!r:.40}, not a number"
