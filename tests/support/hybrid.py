"""An engine with several cache groups, as plain as can be: copies by group and path, hits found by trying each length.

It shares nothing with the library's way: no runs, no keys, no places; a path is its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from math import lcm
from typing import NamedTuple

from prefixroute.events import BlocksCleared, BlocksRemoved, BlocksStored, EngineEvent, Namespace, StreamRestarted

Path = tuple[int, ...]
FULL = "full_attention"


class Kind(NamedTuple):
    """A group: tokens of a block, what it is, and its window in tokens."""

    block: int
    kind: str = FULL
    window: int = 0


class PlainHybrid:
    """What an engine with groups of these kinds tells of itself, and what it would reuse."""

    def __init__(
        self, rng: random.Random, kinds: tuple[Kind, ...], tokens: int = 2, sparse: bool = True, aligned: bool = False
    ) -> None:
        self.rng = rng
        self.kinds = kinds
        self.tokens = tokens
        self.sparse = sparse
        """Whether window groups leave blocks out at random, as no engine does."""
        self.aligned = aligned
        """Whether it caches up to common multiples of all blocks only, as vLLM does."""
        self.copies: Counter[tuple[int, Path]] = Counter()
        self.seen: list[list[int]] = []
        self.handles: dict[Path, int] = {}

    # --- what it tells -------------------------------------------------------------------------------------

    def handle(self, path: Path) -> int:
        """The same in every group, whatever the group's block: a hash of all tokens up to the block's end."""
        return self.handles.setdefault(path, 1000 + len(self.handles))

    def prompt(self, most: int) -> list[int]:
        """A prompt that begins like one that was seen, or like none."""
        base = self.rng.choice(self.seen) if self.seen and self.rng.random() < 0.8 else []
        start = base[: self.rng.randint(0, len(base))]
        return [*start, *(self.rng.randrange(self.tokens) for _ in range(self.rng.randint(0, most - len(start))))]

    def serve(self, most: int) -> list[EngineEvent]:
        """A prompt is computed, in one go or in two."""
        prompt = self.prompt(most)
        self.seen.append(prompt)
        events: list[EngineEvent] = []
        cut = self.rng.randint(0, len(prompt))
        first = self.rng.choice([0, 0, cut])
        step = self.unit if self.aligned else 1
        for lower, upper in ((0, first // step * step), (first // step * step, len(prompt) // step * step)):
            groups = list(enumerate(self.kinds))
            self.rng.shuffle(groups)
            for number, group in groups:
                events += self.store(number, group, prompt, lower // group.block, upper // group.block)
        return events

    def store(self, number: int, group: Kind, prompt: list[int], lower: int, upper: int) -> list[EngineEvent]:
        """Blocks `lower` to `upper` - 1: those that are held again now and then, of a window only some."""
        paths = [tuple(prompt[: (i + 1) * group.block]) for i in range(lower, upper)]
        if group.kind == FULL:
            known = 0
            while known < len(paths) and self.copies[number, paths[known]] and self.rng.random() < 0.9:
                known += 1
            lower, paths = lower + known, paths[known:]
            kept = paths
        elif self.sparse:
            kept = [path for path in paths if self.rng.random() < 0.8]
        else:
            kept = paths[self.rng.randint(0, len(paths)) :]
        if not paths:
            return []
        for path in kept:
            self.copies[number, path] += 1
        start = lower * group.block
        parent = self.handle(tuple(prompt[:start])) if start else None
        told = tuple(prompt[start : upper * group.block])
        handles = tuple(map(self.handle, kept))
        return [
            BlocksStored(
                handles,
                parent,
                told,
                group.block,
                group=number,
                group_kind=group.kind,
                namespace=Namespace(),
                window=group.window,
            )
        ]

    def evict(self, most: int) -> list[EngineEvent]:
        """Some copies go, at random or children first."""
        held = sorted(key for key, n in self.copies.items() if n)
        if not held:
            return []
        gone = self.rng.sample(held, min(len(held), self.rng.randint(1, most)))
        if self.rng.random() < 0.5:
            gone.sort(key=lambda key: -len(key[1]))
        for key in gone:
            self.copies[key] -= 1
        return [BlocksRemoved((self.handle(path),), group=number) for number, path in gone]

    def hello(self) -> list[EngineEvent]:
        """Each group tells of nothing: one that was never heard of cannot be waited for."""
        return [
            BlocksStored((), None, (), group.block, group=number, group_kind=group.kind, window=group.window)
            for number, group in enumerate(self.kinds)
        ]

    def forget(self) -> list[EngineEvent]:
        """The cache is reset, or the engine begins anew."""
        self.copies.clear()
        return [self.rng.choice([BlocksCleared("gpu"), BlocksCleared(None), StreamRestarted()]), *self.hello()]

    def step(self, most: int) -> list[EngineEvent]:
        """Anything that an engine does."""
        kind = self.rng.random()
        return self.forget() if kind < 0.02 else self.evict(12) if kind < 0.4 else self.serve(most)

    # --- what it would reuse -------------------------------------------------------------------------------

    @property
    def unit(self) -> int:
        """The common multiple of all blocks."""
        return lcm(*(group.block for group in self.kinds))

    def holds(self, number: int, prompt: list[int], end: int) -> bool:
        """Whether a group holds the block that ends at token `end`."""
        return self.copies[number, tuple(prompt[:end])] > 0

    def allows(self, number: int, group: Kind, prompt: list[int], length: int) -> bool:
        """Whether a group has all that a hit of `length` tokens needs, going back from its end block by block."""
        if group.kind == "mamba":
            return self.holds(number, prompt, length)
        if group.kind == "sliding_window" and group.window:
            # The token behind the hit looks back at window - 1 tokens; those in front of them are not needed.
            needed = range(length, max(0, min(length - group.window + 1, length - 1)), -group.block)
        else:
            needed = range(length, 0, -group.block)
        return all(self.holds(number, prompt, end) for end in needed)

    def hit(self, prompt: list[int], also: int = 1) -> int:
        """Tokens of a prompt that would be reused, in multiples of `also` too; the last one is always computed."""
        step = lcm(self.unit, also)
        for length in range((len(prompt) - 1) // step * step, 0, -step):
            if all(self.allows(number, group, prompt, length) for number, group in enumerate(self.kinds)):
                return length
        return 0
