"""Residency guessed from what was served, for an engine whose events never come.

Rules:
1. The guess is a stream like any other: it goes through `residency` as engine events, with the chain's own keys as
   handles. A restart clears it when real events begin.
2. A prompt's blocks are used deepest first. So the least recently used block is always a leaf, as in an engine.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ..events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvent
from ..keys.chain import TokenChain

DEFAULT_CAPACITY_BLOCKS = 8192
"""A modest cache, 131,072 tokens in blocks of 16, until the engine's capacity is known."""


class RoutingHistory:
    """An LRU cache of the prompts that one endpoint served, as an engine of `capacity_blocks` would keep them."""

    def __init__(self, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> None:
        """Forget all blocks: the engine's cache was emptied."""
        self._blocks.clear()

    def served(self, chain: TokenChain) -> EngineBatch:
        """Take a served prompt; return the events that an engine would have sent. O(blocks).

        A prompt with images is left out: which prompts may reuse it is not known without the engine.
        """
        depth = min(chain.depth, self.capacity_blocks)
        if chain.extras or not depth:
            return EngineBatch(())
        keys = [chain.key(d) for d in range(1, depth + 1)]
        known = next((d for d, key in enumerate(keys) if key not in self._blocks), depth)
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        excess = len(self._blocks) - self.capacity_blocks
        dropped = tuple([self._blocks.popitem(last=False)[0] for _ in range(excess)])
        events: list[EngineEvent] = [BlocksRemoved(dropped)] if dropped else []
        if known < depth:
            size = chain.spec.block_tokens
            tokens = np.frombuffer(chain.packed, "<u4")[known * size : depth * size]
            parent = keys[known - 1] if known else None
            events.append(BlocksStored(tuple(keys[known:]), parent, tokens, size, namespace=chain.namespace))  # type: ignore[arg-type]
        return EngineBatch(tuple(events))
