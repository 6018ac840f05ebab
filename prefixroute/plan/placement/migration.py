"""From one placement to another while requests are served: which server moves next, so that every block keeps a server.

Rules:
1. A server that moves serves nothing from the moment it is told to drain until it has loaded its new span.
2. Moves run in parallel as long as every block stays on a serving server, and no more blocks are loaded at once than
   the bound; a server whose own span is larger than the bound moves alone.
3. Servers that are alike may exchange their target spans, so that most spans stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .problem import Problem, Span
from .spans import coverage


class Move(NamedTuple):
    """A move: a server that holds the span `old` (or None) is to hold `new` (or None)."""

    server: int
    old: Span | None
    new: Span | None

    @property
    def loaded_blocks(self) -> int:
        """The number of blocks to load: those of `new` that are not in `old`."""
        if self.new is None:
            return 0
        if self.old is None:
            return self.new.blocks
        shared = min(self.old.end, self.new.end) - max(self.old.first, self.new.first)
        return self.new.blocks - max(shared, 0)


def deal_alike(
    problem: Problem, current: Sequence[Span | None], target: Sequence[Span | None], any_place: bool = False
) -> list[Span | None]:
    """Return the target with spans exchanged among servers that are alike, so that few blocks have to be loaded.

    Servers are alike when they cost the same; with `any_place`, when they are of one kind, at whatever place.
    O(n^2 log n).
    """
    kinds: dict[bytes, list[int]] = {}
    for j in range(problem.servers):
        rows = [problem.memory_bytes[j : j + 1], problem.decode_ms[j : j + 1].round(1)]
        if not any_place:
            rows = [problem.memory_bytes[j : j + 1], problem.decode_ms[j : j + 1], problem.prefill_ms[j : j + 1]]
            rows += [problem.rtt_ms[:, j], problem.prompt_rtt_ms[:, j]]
            if problem.hop_ms is not None:
                # Servers of one place cost the same to every other server; only their own entry differs.
                rows += [np.delete(problem.hop_ms[j], j).round(9), np.delete(problem.hop_ms[:, j], j).round(9)]
        kinds.setdefault(b"".join(row.tobytes() for row in rows), []).append(j)
    dealt = list(target)
    for alike in kinds.values():
        # Cheapest pairs of a server and a target span first; a server keeps what it has before it takes another's.
        pairs = sorted((Move(j, current[j], target[i]).loaded_blocks, j != i, j, i) for j in alike for i in alike)
        servers, spans = set(alike), set(alike)
        for _, _, j, i in pairs:
            if j in servers and i in spans:
                dealt[j] = target[i]
                servers.discard(j)
                spans.discard(i)
    return dealt


def next_movers(
    problem: Problem,
    serving: Sequence[Span | None],
    pending: Mapping[int, Move],
    loading: int,
    most_blocks: int,
) -> list[int]:
    """Return which pending servers may leave service now, while other servers are loading `loading` blocks.

    `serving` has None for servers that do not serve. A server that will bring a block that no server has may always go.
    """
    held = coverage(problem, serving)
    movers = []
    for j, move in pending.items():
        if loading and loading + move.loaded_blocks > most_blocks:
            continue
        span = serving[j]
        without = held - _mask(problem, (span,))
        missing = held == 0
        brings = missing.any() and (_mask(problem, (move.new,))[missing] > 0).any()
        if (without[held > 0] > 0).all() or brings:
            movers.append(j)
            held = without
            loading += move.loaded_blocks
    return movers


def _mask(problem: Problem, spans: Iterable[Span | None]) -> NDArray[np.int64]:
    held = np.zeros(problem.blocks, np.int64)
    for span in spans:
        if span is not None:
            held[span.first - 1 : span.end - 1] += 1
    return held


class Migration(NamedTuple):
    """Steps of moves, the spans after all steps, and the moves left out because they would open a gap."""

    steps: tuple[tuple[Move, ...], ...]
    spans: tuple[Span | None, ...]
    left_out: tuple[Move, ...]


def plan_migration(
    problem: Problem,
    current: Sequence[Span | None],
    target: Sequence[Span | None],
    most_blocks: int,
    order: Sequence[int] = (),
) -> Migration:
    """Plan the steps from one placement to another; servers early in `order` go first.

    Every block that is on a server at the start, or after a step, stays on a serving server through all later steps.
    The servers of a step move in parallel and together load at most `most_blocks`, unless the step is a single server.
    """
    dealt = deal_alike(problem, current, target)
    rank = {j: at for at, j in enumerate(order)}
    moves = [Move(j, old, new) for j, (old, new) in enumerate(zip(current, dealt, strict=True)) if old != new]
    moves.sort(key=lambda move: (move.old is not None, rank.get(move.server, len(rank)), move.server))
    pending = {move.server: move for move in moves}
    spans, steps = list(current), []
    while pending:
        movers = next_movers(problem, spans, pending, 0, most_blocks)
        if not movers:
            break
        steps.append(tuple(pending.pop(j) for j in movers))
        for move in steps[-1]:
            spans[move.server] = move.new
    return Migration(tuple(steps), tuple(spans), tuple(pending.values()))
