"""Blocks that an owner publishes before its engine tells of them: those of the prompts that it serves now.

A cold prompt takes its prefill's time to become a prefix that others could use. Without a word of it, each node that
gets a prompt with that prefix meanwhile prefills it as well: 7 of 48 prompts over 6 prefixes were cold at four engines.

Rules:
1. A promise is made when a prompt begins to be served here, and ends with its outcome: by then the engine has told.
2. It is thought over with the next round, off the path of requests: a prompt that is over by then costs nothing.
3. What is promised is prefix-closed above what is held, as all that is published: a peer that is told the last block
   is told those above it that its stride asks for. Of a hybrid model it is the one end that the prompt will leave.
4. Only peers are told. This node's own decisions have its predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..keys.chain import TokenChain, wire_key
from ..keys.hit_marks import marked, section


class Promise(NamedTuple):
    """Blocks `above` + 1 to `depth` of a prompt."""

    chain: TokenChain
    above: int
    depth: int

    def keys(self, every: int) -> Iterator[int]:
        """Yield the wire keys to publish at an anchor stride: what a search asks for (`index`, rule 4), and the end.

        O(blocks / every) hashes of up to a chain's stride.
        """
        for depth in range(self.above + 1, self.depth):
            if depth == 1 or depth % every == 0:
                yield wire_key(self.chain.key(depth))
        yield wire_key(self.chain.key(self.depth))

    def end(self) -> Iterator[int]:
        """Yield the wire keys to publish of an endpoint whose hits end at some depths only: the end, and its marks."""
        yield wire_key(self.chain.key(self.depth))
        yield wire_key(marked(self.chain.key(1)))
        if section(self.depth):
            yield wire_key(marked(self.chain.key(section(self.depth))))


class Promises:
    """What one endpoint promises, by prompt, and how many prompts promise each wire key."""

    __slots__ = ("_counts", "_made", "_new")

    def __init__(self) -> None:
        self._new: dict[int, Promise] = {}
        self._made: dict[int, tuple[int, ...]] = {}
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of wire keys that are promised."""
        return len(self._counts)

    def __contains__(self, wire: object) -> bool:
        return wire in self._counts

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def begin(self, ticket: int, promise: Promise) -> None:
        """Take a prompt that is served from now on. O(1)."""
        if promise.depth > promise.above:
            self._new[ticket] = promise

    def settle(self, every: int, ends_only: bool = False) -> set[int]:
        """Make the promises of the prompts that are still under way; return wire keys that were not promised before.

        At an anchor stride, or only as the ends that they will leave.
        """
        gained: set[int] = set()
        for ticket, promise in self._new.items():
            keys = self._made[ticket] = tuple(dict.fromkeys(promise.end() if ends_only else promise.keys(every)))
            for wire in keys:
                count = self._counts.get(wire, 0)
                self._counts[wire] = count + 1
                if not count:
                    gained.add(wire)
        self._new.clear()
        return gained

    def end(self, ticket: int) -> set[int]:
        """Take back what a prompt promised; return the wire keys that nobody promises any more. O(its blocks)."""
        self._new.pop(ticket, None)
        lost: set[int] = set()
        for wire in self._made.pop(ticket, ()):
            count = self._counts[wire] - 1
            if count:
                self._counts[wire] = count
            else:
                del self._counts[wire]
                lost.add(wire)
        return lost

    def _check(self) -> None:
        """Assert that the counts are those of the promises."""
        counts: dict[int, int] = {}
        for keys in self._made.values():
            for wire in keys:
                counts[wire] = counts.get(wire, 0) + 1
        assert counts == self._counts
        assert not self._new.keys() & self._made.keys()
