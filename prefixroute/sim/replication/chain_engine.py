"""A stand-in for an endpoint's engine: it caches chains of blocks and tells a node, as an engine's event stream would.

Rules:
1. Blocks form a tree: prompts fork from each other, and a block goes only after all blocks below it.
2. An engine process never uses a handle twice; the next process starts again from the first one.
3. It holds no clock: the caller passes `now`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from prefixroute import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
    Node,
    StreamGap,
    StreamRestarted,
)


class Engine:
    """The engine behind one endpoint. `chains` are the prompts that it holds: (tokens, handles), oldest first."""

    __slots__ = ("_below", "_block", "_handle", "_rng", "chains", "endpoint", "node")

    def __init__(self, node: Node, endpoint: str, rng: random.Random) -> None:
        self.node = node
        self.endpoint = endpoint
        self.chains: list[tuple[list[int], tuple[int, ...]]] = []
        self._rng = rng
        self._block = node.domain.block_size
        self._handle = 1
        self._below: Counter[int] = Counter()

    def store(self, blocks: int, now: float, tokens: Sequence[int] | None = None) -> list[int]:
        """Cache a prompt of `blocks` blocks from the root; return its tokens. O(tokens)."""
        prompt = self._prompt(blocks) if tokens is None else list(tokens)
        self._extend([], (), prompt, now)
        return prompt

    def fork(self, blocks: int, share: float, now: float) -> list[int]:
        """Cache a prompt that begins as a held one does, for `share` of its blocks, and goes on for `blocks` more."""
        if not self.chains:
            return self.store(blocks, now)
        tokens, handles = self._rng.choice(self.chains)
        kept = int(len(handles) * share)
        shared = tokens[: kept * self._block]
        new = self._prompt(blocks)
        self._extend(shared, handles[:kept], new, now)
        return shared + new

    def evict(self, now: float, share: float = 1.0) -> None:
        """Drop the deeper `share` of the oldest prompt, as far as no other prompt needs its blocks."""
        if not self.chains:
            return
        tokens, handles = self.chains.pop(0)
        keep = int(len(handles) * (1 - share))
        gone = []
        self._below[handles[-1]] -= 1
        for handle in reversed(handles[keep:]):
            if self._below[handle]:
                # Another prompt goes on from here, and keeps all blocks above.
                keep = 0
                break
            del self._below[handle]
            gone.append(handle)
            parent = handles[len(handles) - len(gone) - 1] if len(gone) < len(handles) else 0
            self._below[parent] -= 1
        if keep:
            self._below[handles[keep - 1]] += 1
            self.chains.append((tokens[: keep * self._block], handles[:keep]))
        if gone:
            self._tell(now, BlocksRemoved(tuple(gone)))

    def clear(self, now: float) -> None:
        """Drop everything."""
        self._empty()
        self._tell(now, BlocksCleared())

    def restart(self, now: float) -> None:
        """Restart the engine's process with an empty cache, while its node runs on."""
        self._empty()
        self._handle = 1
        self._tell(now, StreamRestarted())

    def lose(self, blocks: int, now: float) -> None:
        """Cache a prompt; the node hears only that messages were lost."""
        self._extend([], (), self._prompt(blocks), None)
        self._tell(now, StreamGap(1))

    def _prompt(self, blocks: int) -> list[int]:
        rest = [0] * (self._block - 1)
        return [token for _ in range(blocks) for token in (self._rng.getrandbits(31), *rest)]

    def _extend(self, shared: list[int], above: tuple[int, ...], tokens: list[int], now: float | None) -> None:
        n = len(tokens) // self._block
        if not n:
            return
        handles = tuple(range(self._handle, self._handle + n))
        self._handle += n
        parent = above[-1] if above else 0
        self._below[parent] += 1
        for handle in handles:
            self._below[handle] = 1
        self.chains.append((shared + tokens[: n * self._block], above + handles))
        if now is not None:
            self._tell(now, BlocksStored(handles, parent or None, tokens[: n * self._block], self._block))

    def _empty(self) -> None:
        self.chains.clear()
        self._below.clear()

    def _tell(self, now: float, event: EngineEvent) -> None:
        self.node.apply(self.endpoint, EngineBatch((event,)), now)
