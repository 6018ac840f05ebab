"""Engine blocks of any size, mapped onto the canonical blocks of a radix tree.

A canonical block is *vouched for* in a tier by the `Run` that holds its last token, when that run and the ones above
it, back to the block's first token, all have a copy in the tier. So of the blocks that end in a run only the first may
depend on another run: all others are counted at once.

Rules:
1. A run vouches once per tier, however many copies it has: copies are counted in the run.
2. Runs whose engine blocks begin and end on canonical boundaries vouch alone, and leave their tokens to the tree.
   Other runs (pages smaller than a block, sizes that do not divide) keep their tokens and vouch together.
3. A run whose path to the root is not known is *unresolved* and vouches for nothing. A run that the tree cannot take is
   unresolved too, and so is everything below an unresolved run. Resolving a run resolves what hangs below it.
4. `key` is the key at depth end // block. A run in which no canonical block ends has the key of its parent.
5. The group's block size is that of its resolved, held blocks, the largest in the GPU tier: a partial block is smaller,
   and what another tier keeps as one may be several blocks. What an event says of blocks that were never placed, or are
   gone, counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..events import GPU, ContentSpan
from ..keys.chain import TOKEN_BYTES, ChainSpec, block_extras
from .runs import Run
from .tree import RadixTree


class Reblocker:
    """Keeps one tree's counts equal to what the runs of one group vouch for."""

    def __init__(self, spec: ChainSpec, tree: RadixTree) -> None:
        self._size = spec.block_tokens
        self._width = spec.block_bytes
        self.tree = tree
        self._sizes: dict[int, int] = {}
        """Tokens of a block -> resolved blocks of that size in the GPU tier."""
        self._last_size = 0
        self.placed_any = False
        """Whether any block was ever on a known path."""

    @property
    def block_size(self) -> int:
        """Tokens of the group's blocks in the GPU tier; while there is none, of the last one, 0 before the first."""
        return max(self._sizes, default=self._last_size)

    def clear(self) -> None:
        """Forget all blocks."""
        self.tree.clear()
        self._last_size = self.block_size
        self._sizes.clear()

    def _resize(self, unit: int, n: int, tier: str) -> None:
        """Count `n` more blocks of `unit` tokens in a tier, or fewer."""
        self.placed_any = True
        if tier != GPU:
            return
        sizes = self._sizes
        left = sizes.get(unit, 0) + n
        if left:
            sizes[unit] = left
        else:
            del sizes[unit]
            if not sizes:
                self._last_size = unit

    def resolve(self, run: Run, root: int) -> None:
        """Give `run` and all below it their places, and vouch for what they hold. O(blocks resolved)."""
        stack = [run]
        while stack:
            run = stack.pop()
            if run.root is not None or not run.known:
                continue
            size = run.end - run.start
            run.start = run.parent.end if run.parent is not None else 0
            run.end = run.start + size
            run.root = root
            for tier in run.copies:
                self._resize(run.unit, len(run.handles), tier)
            for tier in run.copies:
                if run.root is not None:
                    self._hold(run, tier)
            if run.root is not None:
                stack.extend(run.each_kid())

    def hold(self, run: Run, tier: str) -> None:
        """Vouch in `tier`, in which `run` has just gained its first copy. O(blocks)."""
        if run.root is not None:
            self._resize(run.unit, len(run.handles), tier)
            self._hold(run, tier)

    def _hold(self, run: Run, tier: str) -> None:
        n = self._own(run, run.start, tier)
        if n and not self._add(run, run.end // self._size, n, tier):
            return
        if run.start % self._size == 0 and run.unit % self._size == 0:
            run.tokens, run.contents = None, ()
        elif run.kids is not None and run.end % self._size:
            for kid in self._finishing(run):
                depth = run.end // self._size + 1
                if _vouched(kid, (depth - 1) * self._size, tier):
                    self._add(kid, depth, 1, tier)

    def release(self, run: Run, tier: str) -> None:
        """Take back what `run` vouches for in `tier`. Call it before the copy is dropped. O(blocks)."""
        if run.root is None:
            return
        self._resize(run.unit, -len(run.handles), tier)
        self._take_back(run, run.start, tier)
        if run.kids is not None and run.end % self._size:
            depth = run.end // self._size + 1
            for kid in self._finishing(run):
                if self._placed(kid) and _vouched(kid, (depth - 1) * self._size, tier):
                    assert kid.key is not None
                    self.tree.remove(self._up(kid, kid.key, depth), depth, 1, tier)

    def shorten(self, run: Run, at: int, tier: str) -> None:
        """Take back what the blocks from block `at` on vouch for in `tier`, their only one, and forget their tokens."""
        if not run.known:
            return
        if run.root is not None:
            self._resize(run.unit, at - len(run.handles), tier)
            key = self.key_at(run, at)
            self._take_back(run, run.start + at * run.unit, tier)
            run.key = key
        run.trim(at)

    def unresolve(self, run: Run) -> None:
        """Forget the places of `run` and all below it, of which the tree holds nothing. O(runs)."""
        stack = [run]
        while stack:
            run = stack.pop()
            if run.root is not None:
                for tier in run.copies:
                    self._resize(run.unit, -len(run.handles), tier)
                run.root = run.key = None
                stack.extend(run.each_kid())

    def lost(self, run: Run) -> bool:
        """Whether only the tree had the run's tokens and has dropped them with the last copy."""
        return run.known and run.tokens is None and not self._placed(run)

    def ends_block(self, run: Run) -> bool:
        """Whether a canonical block ends in the run."""
        return run.end // self._size > run.start // self._size

    def key_at(self, run: Run, at: int) -> int | None:
        """Return the key at the end of block `at` - 1 of a run, None if the tree does not have the run."""
        if run.root is None or run.key is None or not self._placed(run):
            return None
        return self._up(run, run.key, (run.start + at * run.unit) // self._size)

    def check(self, run: Run) -> None:
        """Assert that the tree has what the run vouches for. O(runs above)."""
        if run.root is not None:
            assert self._placed(run) or not any(self._own(run, run.start, tier) for tier in run.copies)

    def check_sizes(self, runs: Iterable[Run]) -> None:
        """Assert that the sizes are those of the resolved blocks among all `runs`. O(runs)."""
        counted: dict[int, int] = {}
        for run in runs:
            if run.root is not None and GPU in run.copies:
                counted[run.unit] = counted.get(run.unit, 0) + len(run.handles)
        assert counted == self._sizes

    def _placed(self, run: Run) -> bool:
        return self.tree.has(run.key, run.end // self._size)

    def _own(self, run: Run, since: int, tier: str) -> int:
        """How many of the canonical blocks that end in the run after token `since` it vouches for: all, or one less."""
        first = since // self._size
        n = run.end // self._size - first
        if n and first * self._size < run.start and not _vouched(run, first * self._size, tier):
            return n - 1
        return n

    def _add(self, run: Run, depth: int, n: int, tier: str) -> bool:
        """Count the `n` blocks down to `depth`, which end in the run; return whether the tree could take the run."""
        key, counted = self._ensure(run, n if depth == run.end // self._size else 0, tier)
        if key is None:
            self.unresolve(run)
        elif not counted:
            self.tree.add(self._up(run, key, depth), depth, n, tier)
        return key is not None

    def _take_back(self, run: Run, since: int, tier: str) -> None:
        if self._placed(run):
            n = self._own(run, since, tier)
            if n:
                assert run.key is not None
                self.tree.remove(run.key, run.end // self._size, n, tier)

    def _finishing(self, run: Run) -> list[Run]:
        """The resolved runs below that hold the last token of the canonical block in which `run` ends."""
        end = run.end // self._size * self._size + self._size
        found = []
        stack = list(run.each_kid())
        while stack:
            kid = stack.pop()
            if kid.root is None:
                continue
            if kid.end >= end:
                found.append(kid)
            else:
                stack.extend(kid.each_kid())
        return found

    def _up(self, run: Run, key: int, depth: int) -> int:
        """Key at `depth` of the path that ends with `run`, whose key is `key`."""
        last = run.end // self._size
        return self.tree.up(key, last, last - depth) if depth < last else key

    def _ensure(self, run: Run, n: int, tier: str) -> tuple[int | None, bool]:
        """Make the path to the run in the tree; return the run's key, None if tokens of the path are not known.

        If just the last `n` blocks had to be made, they are counted in `tier` as well. Also return whether they were.
        """
        tree, size = self.tree, self._size
        if self._placed(run):
            return run.key, False
        assert run.root is not None
        unplaced: list[Run] = []
        above: Run | None = run
        while above is not None and not self._placed(above):
            unplaced.append(above)
            above = above.parent
        key = run.root if above is None or above.key is None else above.key
        depth = 0 if above is None else above.end // size
        data = _tokens(run, depth * size, run.end // size * size)
        if data is None:
            return None, False
        tree.plant(run.root)
        blocks = [data[i : i + self._width] for i in range(0, len(data), self._width)]
        contents = _contents(run, depth * size)
        if contents:
            extras = block_extras(contents, size)
            blocks = [block + extras.get(depth + i, b"") for i, block in enumerate(blocks)]
        counted = n > 0 and n == len(blocks)
        keys = tree.store(key, depth, blocks, tier if counted else None)
        if len(keys) < len(blocks):
            if counted and keys:
                tree.remove(keys[-1], depth + len(keys), len(keys), tier)
            return None, False
        for placed in unplaced:
            placed.key = keys[placed.end // size - depth - 1] if placed.end // size > depth else key
        return run.key, counted


def _vouched(run: Run, start: int, tier: str) -> bool:
    """Whether `run` and the runs above it, back to token `start`, all have a copy in `tier`."""
    at: Run | None = run
    while at is not None and tier in at.copies:
        if at.start <= start:
            return True
        at = at.parent
    return False


def _tokens(run: Run, start: int, end: int) -> bytes | None:
    """Packed tokens `start` to `end` of the path that ends with `run`. O(tokens and runs)."""
    parts: list[bytearray] = []
    at: Run | None = run
    while at is not None and at.end > start:
        if at.tokens is None:
            return None
        lower = max(start - at.start, 0)
        upper = max(end - at.start, 0)
        parts.append(at.tokens[lower * TOKEN_BYTES : upper * TOKEN_BYTES])
        at = at.parent
    parts.reverse()
    return b"".join(parts)


def _contents(run: Run, start: int) -> list[ContentSpan]:
    """Content items of the path that start at token `start` or later, by their place on the path."""
    found: list[ContentSpan] = []
    at: Run | None = run
    while at is not None and at.end > start:
        first = at.start
        found += [
            ContentSpan(item.content_id, first + item.start) for item in at.contents if first + item.start >= start
        ]
        at = at.parent
    return found
