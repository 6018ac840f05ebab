"""Caches that this sidecar saw emptied: an engine's own word for it comes only with its next output.

vLLM queues its AllBlocksCleared and sends it with the next step, which an idle engine makes when a request comes: until
then peers would send it prompts for what it no longer holds. So a call that passes through here and empties the cache
counts at once. Rules:
1. The engine's stream is in order, so what comes before its own clear was made before the reset, and is void: it is
   applied, and cleared again. What was stored after the reset comes behind the engine's clear, and is never touched.
2. If the engine's clear came while the call was under way, there is nothing left to do.
3. Rule 1 holds for `UNDER_WAY_S`, longer than a message is under way: an engine that announces no clear, or whose clear
   was lost (a gap), must not be kept empty for ever. What a late replay brings back after that is wrong no longer than
   until the first request that it misleads, whose step brings the engine's clear.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from prefixroute import BlocksCleared, EngineBatch, Node, StreamGap, StreamRestarted
from prefixroute.events import GPU

UNDER_WAY_S = 1.0


class OwnResets:
    """Which endpoints were emptied by a call of this node's, and await their engine's own word for it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._until: dict[str, float] = {}

    def clears(self, endpoints: Iterable[str]) -> dict[str, int]:
        """How often each endpoint was cleared so far: take it before the call."""
        return {endpoint: self._node.residency(endpoint).counts.clears for endpoint in endpoints}

    def emptied(self, endpoints: Mapping[str, int], before: Mapping[str, int], now: float) -> None:
        """The call emptied the caches of `endpoints`, given with their ranks, cleared so often `before` it."""
        for endpoint, rank in endpoints.items():
            if self._node.residency(endpoint).counts.clears == before.get(endpoint):
                self._node.apply(endpoint, EngineBatch((BlocksCleared(GPU),), rank), now)
                self._until[endpoint] = now + UNDER_WAY_S

    def passed(self, endpoint: str, batch: EngineBatch, now: float) -> EngineBatch:
        """A batch as it is to be applied."""
        if endpoint not in self._until:
            return batch
        marks = (BlocksCleared, StreamGap, StreamRestarted)
        if now >= self._until[endpoint] or any(isinstance(event, marks) for event in batch.events):
            del self._until[endpoint]
            return batch
        return replace(batch, events=(*batch.events, BlocksCleared(GPU)))
