"""Residency guessed from what was served, for an engine whose events never come.

Rules:
1. The guess is a stream like any other: it goes through `residency` as engine events, with the chain's own keys as
   handles. A restart clears it when real events begin.
2. A prompt's blocks are used deepest first. So the least recently used block is always a leaf, as in an engine.
3. Answers that say that nothing of a prompt was cached refute the guess of it. `REFUTED` in a row refute the guess as a
   whole: the engine began anew, or its unit is longer than the prompts. The next hit of what was guessed ends that.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ..events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvent
from ..keys.chain import TokenChain

DEFAULT_CAPACITY_BLOCKS = 8192
"""A modest cache, 131,072 tokens in blocks of 16, until the engine's capacity is known."""


REFUTED = 2
"""Answers in a row of 0 cached tokens, to prompts of which it has something, after which a guess is worth nothing."""


class RoutingHistory:
    """An LRU cache of the prompts that one endpoint served, as an engine of `capacity_blocks` would keep them."""

    def __init__(self, capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS) -> None:
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._misses = 0
        self.longest = 0
        """Tokens of the longest prefix that was guessed and not reused."""

    @property
    def refuted(self) -> bool:
        """Whether answers say that the guess is worth nothing."""
        return self._misses >= REFUTED

    def compare(self, chain: TokenChain, cached_tokens: int, unit: int) -> None:
        """Hold an answer against the guess of its prompt, in units of `unit` tokens. O(blocks).

        Do it before the prompt is taken in.
        """
        blocks = self._blocks
        held = next((d for d in range(chain.depth) if chain.key(d + 1) not in blocks), chain.depth)
        tokens = min(held * chain.spec.block_tokens, chain.n_tokens - 1)
        if chain.extras or not tokens or tokens < unit:
            return
        if cached_tokens:
            self._misses = self.longest = 0
        else:
            self._misses += 1
            self.longest = max(self.longest, tokens)

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
