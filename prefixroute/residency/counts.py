"""What a stream has brought, and what is live: plain figures, for operators and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class StreamCounts:
    """What a stream has brought so far, in blocks unless the name says otherwise.

    `orphans` came before their parent; `hash_only` came without usable tokens; `inflated` counts the times that more
    copies were live than the engine has blocks, which proves lost removals. `confirmed` were doubtful or not known when
    the engine reported them.
    """

    batches: int = 0
    events: int = 0
    stored: int = 0
    removed: int = 0
    clears: int = 0
    unknown_events: int = 0
    unknown_removals: int = 0
    hash_only: int = 0
    orphans: int = 0
    gaps: int = 0
    restarts: int = 0
    inflated: int = 0
    confirmed: int = 0


class Live(NamedTuple):
    """Live blocks of one (tier, group): distinct handles, and physical copies."""

    tier: str
    group: int
    handles: int
    copies: int
