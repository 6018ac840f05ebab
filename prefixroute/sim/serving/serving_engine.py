"""The simulated engine of a node: a cache of blocks and a server of prefill.

Rules:
1. The cache is looked up and touched when a request reaches the node; its changes are reported as an engine's events.
2. The least recently used block is evicted first, and in a prompt the deepest block first, so a held prefix always
   begins at the root.
3. The last token is never reused: of a prompt that is held whole, one block is computed anew.
4. An engine knows no policy and no network.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from prefixroute import BlocksRemoved, BlocksStored, EngineBatch, UsageError

from .workloads import SimulatedPrompt

AGE_WEIGHT = 0.1
"""Weight of the newest eviction in the mean idle age of what is evicted."""


class Admission(NamedTuple):
    """The result of admitting a prompt: tokens that were held, and the engine's events, None if there are none."""

    cached_tokens: int
    batch: EngineBatch | None


class LruBlocks:
    """An LRU cache of `capacity` blocks; with `whole` it evicts whole prompts, as in the paper's model."""

    __slots__ = ("_held", "_roots", "block_tokens", "capacity", "eviction_age_s", "whole")

    def __init__(self, capacity: int, block_tokens: int, whole: bool = False) -> None:
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.whole = whole
        self.eviction_age_s = float("inf")
        """Mean idle time of evicted blocks, in seconds; infinite before the first eviction."""
        self._held: OrderedDict[int, float] = OrderedDict()
        self._roots: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def room_tokens(self) -> int:
        """Tokens that can be stored without an eviction."""
        return max(0, self.capacity - len(self._held)) * self.block_tokens

    def held(self, prompt: SimulatedPrompt) -> int:
        """Return how many leading blocks of a prompt are held. O(log blocks)."""
        blocks, held = prompt.blocks, self._held
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def admit(self, prompt: SimulatedPrompt, now: float) -> Admission:
        """Look a prompt up, touch its blocks, store the missing ones, and evict others for them. O(blocks)."""
        blocks, held, size = prompt.blocks, self._held, self.block_tokens
        hit = self.held(prompt)
        if len(blocks) > self.capacity and not self.whole:
            blocks = blocks[: self.capacity]
        if self.whole and blocks:
            self._roots[blocks[0]] = blocks
            self._roots.move_to_end(blocks[0])
        for handle in reversed(blocks):
            held[handle] = now
            held.move_to_end(handle)
        cached = hit * size
        if cached >= prompt.chain.n_tokens:
            cached -= size
        if hit >= len(blocks):
            return Admission(cached, None)
        removed = self._evict(now)
        above, tokens = blocks[hit - 1] if hit else None, prompt.tokens[hit * size : len(blocks) * size]
        stored = BlocksStored(blocks[hit:], above, tokens, size, namespace=prompt.chain.namespace)
        events = (BlocksRemoved(tuple(removed)), stored) if removed else (stored,)
        return Admission(cached, EngineBatch(events))

    def clear(self) -> None:
        """Forget everything, as a new process would."""
        self._held.clear()
        self._roots.clear()

    def _evict(self, now: float) -> list[int]:
        held = self._held
        removed: list[int] = []
        while len(held) > self.capacity and (not self.whole or len(self._roots) > 1):
            if self.whole:
                going = self._roots.pop(next(iter(self._roots)))
                last = held[going[0]]
                for handle in reversed(going):
                    del held[handle]
                removed += reversed(going)
            else:
                handle, last = held.popitem(last=False)
                removed.append(handle)
            age, known = now - last, self.eviction_age_s < float("inf")
            self.eviction_age_s = self.eviction_age_s + AGE_WEIGHT * (age - self.eviction_age_s) if known else age
        return removed


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an engine is: `fixed_s` a request and `token_s` a token of prefill, both seconds.

    With `batch_tokens` the engine prefills in steps of up to so many tokens, which the waiting requests share. It
    decodes `output_tokens` of each request, at most `slots` requests at a time; each makes a step `decode_s` longer.
    """

    fixed_s: float = 0.1
    token_s: float = 0.001
    batch_tokens: int = 0
    output_tokens: int = 0
    slots: int = 64
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        if self.fixed_s < 0 or self.token_s <= 0 or self.slots < 1:
            raise UsageError("an engine needs fixed_s >= 0, token_s > 0 and slots >= 1")

    def slower(self, factor: float) -> Speed:
        """Return the speed of an engine that takes `factor` times as long."""
        return Speed(
            self.fixed_s * factor,
            self.token_s * factor,
            self.batch_tokens,
            self.output_tokens,
            self.slots,
            self.decode_s * factor,
        )


Schedule = Callable[[float, Callable[..., None], Any], None]
"""The function by which a server plans a call: (when, what, argument)."""


class FifoServer:
    """A server of one request after another; `queued` counts the requests without a first token."""

    __slots__ = ("_done", "_plan", "busy_s", "free_at", "queued", "speed")

    def __init__(self, speed: Speed, plan: Schedule, done: Callable[[Any, float], None]) -> None:
        self.speed = speed
        self.free_at = 0.0
        self.queued = 0
        self.busy_s = 0.0
        self._plan = plan
        self._done = done

    def wait_s(self, now: float) -> float:
        """Return the seconds until a request that comes now would begin."""
        return max(0.0, self.free_at - now)

    def take(self, job: Any, uncached: int, now: float) -> None:
        """Queue a request; `done(job, when)` is called at its first token."""
        work = self.speed.fixed_s + self.speed.token_s * uncached
        self.free_at = max(now, self.free_at) + work
        self.busy_s += work
        self.queued += 1
        self._plan(self.free_at, self._end, job)

    def _end(self, job: Any, now: float) -> None:
        self.queued -= 1
        self._done(job, now)


class BatchServer:
    """A server of chunked prefill, first come first served, in steps of a token budget that also decode."""

    __slots__ = ("_done", "_plan", "_running", "_stepping", "_waiting", "busy_s", "queued", "speed")

    def __init__(self, speed: Speed, plan: Schedule, done: Callable[[Any, float], None]) -> None:
        self.speed = speed
        self.queued = 0
        self.busy_s = 0.0
        self._plan = plan
        self._done = done
        self._waiting: deque[tuple[Any, int]] = deque()
        self._running: list[int] = []
        self._stepping = False

    def wait_s(self, now: float) -> float:
        """Return the seconds of prefill in front of a request that comes now."""
        tokens = sum(left for _, left in self._waiting)
        return tokens * self.speed.token_s + (self.speed.fixed_s if self._waiting else 0.0)

    def take(self, job: Any, uncached: int, now: float) -> None:
        """Queue a request; `done(job, when)` is called at its first token."""
        self._waiting.append((job, uncached))
        self.queued += 1
        if not self._stepping:
            self._stepping = True
            self._step(None, now)

    def _step(self, ended: list[Any] | None, now: float) -> None:
        speed = self.speed
        for job in ended or ():
            self.queued -= 1
            self._done(job, now)
        if not self._waiting and not self._running:
            self._stepping = False
            return
        budget, room, ending, used = speed.batch_tokens, speed.slots - len(self._running), [], 0
        while self._waiting and budget and room:
            job, left = self._waiting[0]
            part = min(left, budget)
            budget -= part
            used += part
            if part < left:
                self._waiting[0] = (job, left - part)
                break
            self._waiting.popleft()
            ending.append(job)
            room -= 1
        took = speed.token_s * used + speed.decode_s * len(self._running) + (speed.fixed_s if used else 0.0)
        took = max(took, 1e-6)
        self._running = [left - 1 for left in self._running if left > 1]
        if speed.output_tokens:
            self._running += [speed.output_tokens] * len(ending)
        self.busy_s += took
        self._plan(now + took, self._step, ending)


class ServingEngine:
    """A cache and a server; `life` counts its restarts."""

    __slots__ = ("_make", "cache", "life", "server")

    def __init__(
        self,
        cache: LruBlocks,
        speed: Speed,
        plan: Schedule,
        done: Callable[[Any, float], None],
    ) -> None:
        self.cache = cache
        self.life = 0
        self._make = partial(BatchServer if speed.batch_tokens else FifoServer, speed, plan, done)
        self.server: BatchServer | FifoServer = self._make()

    def crash(self) -> None:
        """Lose cache and queue. Calls that the old server had planned still come; their old `life` tells them apart."""
        self.life += 1
        self.cache.clear()
        self.server = self._make()
