"""What must not leave the node where it entered: the guard of the default policy.

A *hit* may travel: it is served where its prefix is, and stores next to nothing there. A *stray* would be computed and
stored at a peer that does not lack less of it. Where prompts come back to the node they entered at (`Entry.sticky`),
strays fill the caches with what is asked for elsewhere, and push out what is asked for there: more misses, longer
queues, more strays. Caches about full then collapse, to 4 to 65 times the mean of no routing at 70 to 85 % load, and do
not recover; without strays every run of such a fleet was that of no routing.

| the fleet | strays |
|---|---|
| this node is sticky, or the peer is | none, but for the exit |
| neither is | as the price says |
| this node is overloaded by its own prompts alone, the peer has next to none | the exit: to a peer twice as fast |
| this node is busy with its own prompts, all others together have next to none | the same |

The exit is for fleets where everything enters at one node, or much of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .entry import OVERLOADED_AT, STICKY, Entry
from .interface import Candidate

EXIT_RATIO = 8.0
"""So many times the demand at the peer. 4 was 0.5 % worse in the model, 16 the same."""

EXIT_GAIN = 2.0
"""So many times as fast."""


def is_stray(candidate: Candidate, origin: Candidate) -> bool:
    """Whether a peer would compute and store more of a prompt than is saved by what it holds beyond the origin."""
    held, here = candidate.matched_tokens, origin.matched_tokens
    if held < here:
        return True
    return candidate.prompt_tokens - held > (held - here if held > here else held)


def guarded(order: list[Candidate], origin: Candidate, entry: Entry, now: float) -> list[Candidate]:
    """Return the candidates with the strays that must not be behind all others, but for an exit. O(candidates)."""
    busy = entry.only or entry.overloaded
    if order[0].local and not busy:
        return order
    sticky = entry.sticky
    barred = [c for c in order if not c.local and (sticky or c.home > STICKY) and is_stray(c, origin)]
    if not barred:
        return order
    kept = [c for c in order if c not in barred]
    way_out = _exit(barred, origin, entry, now) if busy and kept[0].local else None
    if way_out is None:
        return kept + barred
    return [way_out, *kept, *[c for c in barred if c is not way_out]]


def _exit(barred: Sequence[Candidate], origin: Candidate, entry: Entry, now: float) -> Candidate | None:
    """Return the fastest stray by which an overload may leave this node; None if none may."""
    limit_s = min(origin.cost_s, entry.alone_s) / EXIT_GAIN
    best: Candidate | None = None
    for c in barred:
        if c.cost_s < limit_s and (best is None or c.cost_s < best.cost_s):
            # Compared at the moment of its owner's word: both may have become busy since.
            demand = entry.demand_at(now - c.age_s)
            if entry.only or (demand >= OVERLOADED_AT and EXIT_RATIO * c.demand <= demand):
                best = c
    return best
