"""Placement: which span of blocks each server holds.

Rules:
1. Before a server takes blocks, it reserves memory for the sessions that it may run: most of the gain over placements
   that fill memory with weights comes from that reservation.
2. `conservative` (CG-BP) reserves for the whole load on every server. `adaptive` tries CG-BP with smaller reservations
   too and keeps the placement that serves the whole load best, so it is never worse than `conservative`.
3. Sums that differ by less than rounding are equal, and the first of equals wins: plans do not depend on the platform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from prefixroute.errors import UsageError

from .chains import Assignment, Links, assign
from .problem import Floats, Problem, Span

TIE = 1e-9
"""Relative difference below which two sums of costs are equal."""

SMALL_LOADS = (1, 2, 3, 5, 8)
LOAD_SHARES = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
"""The reservations that `adaptive` tries: numbers of sessions, and shares of the load."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A span for each server, None for one that holds nothing."""

    spans: tuple[Span | None, ...]
    design: int
    """Sessions that every server was given memory for; 0 when the rule does not say."""
    order: tuple[int, ...] = ()
    """Servers in the order in which they were placed."""
    complete_after: int = 0
    """How many servers of `order` cover every block for the design load; 0 when the rule does not say."""


def coverage(problem: Problem, spans: Sequence[Span | None]) -> NDArray[np.int64]:
    """Return how many servers hold each block."""
    held = np.zeros(problem.blocks, np.int64)
    for span in spans:
        if span is not None:
            held[span.first - 1 : span.end - 1] += 1
    return held


def price_per_block(problem: Problem, held: NDArray[np.int64]) -> Floats:
    """Return each server's milliseconds for a token in one block, all its blocks used, for the farthest client."""
    worst = problem.rtt_ms.max(axis=0)
    return np.where(held > 0, worst / np.maximum(held, 1) + problem.decode_ms, np.inf)


def least_window(values: NDArray[np.int64] | Floats, width: int) -> int:
    """Return the start of the least window: each window's values are sorted, then compared; the first one on a tie."""
    windows = np.sort(sliding_window_view(values, width), axis=1)
    # Numbers of zero or more have the same order as their big-endian bytes.
    rows = windows.astype(">f8")
    return min(range(len(rows)), key=lambda start: rows[start].tobytes())


def conservative(problem: Problem, design: int, fixed: Mapping[int, Span] | None = None) -> Placement | None:
    """Place by CG-BP for `design` concurrent requests; None when the servers cannot hold the model beside their caches.

    Servers are placed by their price of a block, cheapest first. While some block cannot serve the design load, a
    server takes the window that owes most: a block owes the cost of its missing sessions at the highest price. The
    placement succeeds exactly when the servers can hold all blocks beside the reservation. O(n L^2 log L) at worst.

    Servers in `fixed` keep their spans, and the others are placed around them; Theorem 2 does not apply then.
    """
    if design < 1:
        raise UsageError("a placement is for one concurrent request at least")
    held = problem.held_blocks(design)
    fixed = fixed or {}
    for j, span in fixed.items():
        held[j] = span.blocks
    if held.sum() < problem.blocks:
        return None
    price = price_per_block(problem, held)
    usable = np.flatnonzero(held)
    ceiling = float(price[usable].max()) + 1
    order = usable[np.argsort(price[usable], kind="stable")].tolist()
    sessions = np.zeros(problem.blocks, np.int64)
    owed = np.full(problem.blocks, design * ceiling)
    spans: list[Span | None] = [None] * problem.servers
    slots = np.floor(
        (problem.memory_bytes - problem.block_bytes * held) / (problem.session_bytes * np.maximum(held, 1)) + TIE
    )
    complete = 0
    order.sort(key=lambda j: j not in fixed)
    for placed, j in enumerate(order, 1):
        width = int(held[j])
        if j in fixed:
            start = fixed[j].first - 1
        else:
            start = least_window(sessions, width) if complete else _most_owed(owed, sessions, design, width)
        window, able = slice(start, start + width), max(int(slots[j]), 0)
        missing = np.clip(design - sessions[window], 0, able)
        owed[window] -= (ceiling - float(price[j])) * missing
        sessions[window] += able
        spans[j] = Span(start + 1, width)
        if not complete and sessions.min() >= design:
            complete = placed
    if not complete:
        return None
    return Placement(tuple(spans), design, tuple(order), 0 if fixed else complete)


def _most_owed(owed: Floats, sessions: NDArray[np.int64], design: int, width: int) -> int:
    sums = sliding_window_view(owed, width).sum(axis=1)
    open_blocks = np.concatenate(([0], np.cumsum(sessions < design)))
    useful = open_blocks[width:] > open_blocks[:-width]
    sums[~useful] = -np.inf
    best = float(sums.max())
    return int(np.argmax(sums >= best - TIE * abs(best)))


class Adaptive(NamedTuple):
    """The best of the placements tried, and how it serves the whole load."""

    placement: Placement
    assignment: Assignment


def designs_of(concurrent: int) -> list[int]:
    """Return the reservations that `adaptive` tries for a load, in rising order."""
    shares = (round(concurrent * share) for share in LOAD_SHARES)
    return sorted({design for design in (*SMALL_LOADS, *shares) if 1 <= design <= concurrent})


def adaptive(
    problem: Problem, designs: Sequence[int] | None = None, fixed: Mapping[int, Span] | None = None
) -> Adaptive:
    """Place by CG-BP at several reservations, and keep the placement on which all concurrent requests cost least.

    Each placement is judged by routing the whole load within its slots; the cost of a single request would favour
    servers that hold many blocks and serve few sessions. Raises `UsageError`, with the missing bytes, when no placement
    holds the model, or none carries the load.
    """
    best: Adaptive | None = None
    for design in designs_of(problem.concurrent) if designs is None else designs:
        placement = conservative(problem, design, fixed)
        if placement is None:
            continue
        assignment = assign(problem, Links(problem, placement.spans), problem.slots(placement.spans))
        if assignment is None:
            continue
        if best is None or assignment.ms_per_token < best.assignment.ms_per_token * (1 - TIE):
            best = Adaptive(placement, assignment)
    if best is None:
        raise UsageError(_too_large(problem))
    return best


def _too_large(problem: Problem) -> str:
    sessions = problem.concurrent
    one, all_of_them = problem.missing_bytes(1), problem.missing_bytes(sessions)
    if one:
        held = int(problem.held_blocks(1).sum())
        return (
            f"the model does not fit by {one:,.0f} bytes: the servers hold {held} of {problem.blocks} blocks with the "
            "cache of one request; add memory or servers"
        )
    return (
        f"{sessions} concurrent requests do not fit by {all_of_them:,.0f} bytes: add memory, or plan for fewer "
        f"({problem.most_requests()} fit for certain)"
    )
