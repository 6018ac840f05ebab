"""The emulated engine's step loop as a state machine on a planned time line: no clock, no task, no socket.

| a sequence is | it holds | it ends this state |
|---|---|---|
| waiting | nothing | when the prefill server is free, a seat is free (`max_num_seqs`) and its blocks fit |
| in prefill | blocks up to the chunk being computed | when its last chunk ends, with its first token |
| decoding | blocks up to the token being computed | at its last token |
| finished or cancelled | nothing (what it cached stays) | - |

Rules:
1. First come, first served: a sequence that does not fit yet holds up those behind it, as in vLLM.
2. The cache is searched when prefill starts, not on arrival, so a prompt profits from the one before it.
3. Every call first lets the events due by `now` happen, in order and each at the time when it was due. Later
   events are planned from an event's own time, so a late wake-up delays nothing but itself.
4. An event that touched the cache makes one batch. A block that is evicted in a step leaves with the batch
   of the next step that ends: before the store that took its place.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixroute.emulator.block_cache import NO_SCOPE, BlockCache, CacheScope, Lease
from prefixroute.emulator.service_times import ServiceModel
from prefixroute.emulator.vllm_wire import CacheEvent
from prefixroute.errors import UsageError

WAITING, PREFILL, DECODE, FINISHED, CANCELLED = "waiting", "prefill", "decode", "finished", "cancelled"


class Busy(Exception):  # noqa: N818 - an outcome of submitting, not a failure of the program
    """The engine refuses a request; `reason` is the label of its counter, the text is for the client."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Output(NamedTuple):
    """Sequence `sequence` has `tokens` output tokens now; `state` tells whether more will come."""

    sequence: RunningSequence
    tokens: int
    state: str

    @property
    def last(self) -> bool:
        """Whether this is the sequence's last output."""
        return self.state in (FINISHED, CANCELLED)


class StepEvents(NamedTuple):
    """The cache events of one step, and its time in seconds on the planned time line."""

    at: float
    events: list[CacheEvent]


class Load(NamedTuple):
    """Sequences that run and that wait, and prompt tokens not computed yet (cache hits not subtracted)."""

    running: int
    waiting: int
    queued_tokens: int


@dataclass(eq=False, slots=True)
class RunningSequence:
    """One request inside the engine. Made by `Scheduler.submit`; read it, but do not change it."""

    prompt: array[int]
    max_tokens: int
    answer: Callable[[int], int]
    scope: CacheScope
    every_token: bool
    state: str = WAITING
    lease: Lease | None = None
    computed: int = 0
    tokens_out: int = 0
    first_token_at: float = math.nan
    cancel_asked: bool = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache; 0 while waiting."""
        return self.lease.cached_tokens if self.lease else 0

    @property
    def done(self) -> bool:
        """Whether the sequence has ended, so that no more outputs will come."""
        return self.state in (FINISHED, CANCELLED)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the engine does at once, and the queue lengths at which it refuses requests (0: never)."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_queued_reqs: int = 0
    max_num_queued_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_num_queued_reqs", 0),
            ("max_num_queued_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(order=True, slots=True)
class _Due:
    at: float
    order: int
    action: Callable[[float], None] = field(compare=False)


class Scheduler:
    """Admission, serial prefill in chunks and steady decode over one `BlockCache`."""

    def __init__(self, cache: BlockCache, model: ServiceModel, limits: Limits = Limits()) -> None:
        self.cache = cache
        self.finished = 0
        self._model = model
        self._limits = limits
        self._waiting: deque[RunningSequence] = deque()
        self._running: set[RunningSequence] = set()
        self._prefilling: RunningSequence | None = None
        self._due: list[_Due] = []
        self._order = itertools.count()
        self._outputs: list[Output] = []
        self._steps: list[StepEvents] = []
        self._queued_tokens = 0

    # --- what a caller does --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        answer: Callable[[int], int],
        now: float,
        *,
        scope: CacheScope = NO_SCOPE,
        every_token: bool = True,
    ) -> RunningSequence:
        """Queue a request whose i-th output token is `answer(i)`.

        Raises Busy past a limit, and UsageError for a request that could never fit into the cache. With
        `every_token` false only the end is reported, which costs fewer wake-ups and changes nothing else.
        """
        needed = self.cache.blocks_for(len(prompt) + max_tokens - 1)
        if not len(prompt) or max_tokens < 1 or needed > self.cache.capacity:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {max_tokens} output tokens: pass at least one of each, and "
                f"no more than {self.cache.capacity} blocks of {self.cache.block_size} hold"
            )
        self.handle_timer(now)
        in_flight = len(self._waiting) + len(self._running)
        if 0 < self._limits.max_num_queued_reqs <= in_flight:
            raise Busy(
                "max_num_queued_reqs",
                f"The engine is currently busy: {in_flight} requests are in flight, "
                f"{self._limits.max_num_queued_reqs} are allowed. Try again later or on another instance.",
            )
        if 0 < self._limits.max_num_queued_tokens <= self._queued_tokens:
            raise Busy(
                "max_num_queued_tokens",
                f"The engine reached its prefill token backlog limit: {self._queued_tokens} tokens wait, "
                f"{self._limits.max_num_queued_tokens} are allowed. Try again later or on another instance.",
            )
        sequence = RunningSequence(array("I", prompt), max_tokens, answer, scope, every_token)
        self._queued_tokens += len(sequence.prompt)
        self._waiting.append(sequence)
        self._start_waiting(now)
        return sequence

    def cancel(self, sequence: RunningSequence, now: float) -> None:
        """Stop a sequence: at once, or at the end of the chunk that is being computed for it."""
        self.handle_timer(now)
        if sequence.state == WAITING:
            self._waiting.remove(sequence)
            self._queued_tokens -= len(sequence.prompt)
            self._end(sequence, CANCELLED)
        elif sequence.state == PREFILL:
            sequence.cancel_asked = True
        elif sequence.state == DECODE:
            self._end(sequence, CANCELLED)
        self._start_waiting(now)

    def reset_cache(self, now: float) -> bool:
        """Clear the prefix cache; False while a sequence holds blocks. Announced with the next step."""
        self.handle_timer(now)
        return self.cache.reset()

    def next_timer(self) -> float:
        """When something is due next; infinity when nothing is."""
        return self._due[0].at if self._due else math.inf

    def handle_timer(self, now: float) -> None:
        """Let everything happen that is due by `now`."""
        while self._due and self._due[0].at <= now:
            due = heapq.heappop(self._due)
            due.action(due.at)

    def outputs(self) -> list[Output]:
        """The outputs of sequences since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def steps(self) -> list[StepEvents]:
        """The cache events of steps since the last call, in order; steps without events are left out."""
        steps, self._steps = self._steps, []
        return steps

    def load(self) -> Load:
        """Counts of this moment."""
        return Load(len(self._running), len(self._waiting), self._queued_tokens)

    # --- inside --------------------------------------------------------------------------------------------

    def _plan(self, at: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._due, _Due(at, next(self._order), action))

    def _start_waiting(self, at: float) -> None:
        """Give the prefill server its next prompt, if it is free and the prompt fits."""
        if self._prefilling or not self._waiting or len(self._running) >= self._limits.max_num_seqs:
            return
        sequence = self._waiting[0]
        lease = self.cache.admit(sequence.prompt, sequence.scope, decode_tokens=sequence.max_tokens - 1)
        if lease is None:
            return
        self._waiting.popleft()
        self._running.add(sequence)
        self._prefilling = sequence
        sequence.lease = lease
        sequence.state = PREFILL
        sequence.computed = lease.cached_tokens
        self._start_chunk(sequence, at, first=True)

    def _start_chunk(self, sequence: RunningSequence, at: float, *, first: bool) -> None:
        lease = _lease(sequence)
        left = len(sequence.prompt) - sequence.computed
        chunk = min(left, self._limits.max_num_batched_tokens)
        self.cache.grow(lease, sequence.computed + chunk)
        end = at + self._model.prefill_s(chunk, first_chunk=first)
        self._plan(end, lambda ended: self._end_chunk(sequence, chunk, ended))

    def _end_chunk(self, sequence: RunningSequence, chunk: int, at: float) -> None:
        sequence.computed += chunk
        self.cache.fill(_lease(sequence), sequence.computed)
        if sequence.computed < len(sequence.prompt) and not sequence.cancel_asked:
            self._step_done(at)
            self._start_chunk(sequence, at, first=False)
            return
        self._prefilling = None
        self._queued_tokens -= len(sequence.prompt)
        if sequence.cancel_asked:
            self._end(sequence, CANCELLED)
        else:
            sequence.state = DECODE
            sequence.first_token_at = at
            self._emit(sequence, 1)
        self._step_done(at)
        self._start_waiting(at)

    def _emit(self, sequence: RunningSequence, tokens: int) -> None:
        """The sequence has reached this many output tokens: report, then plan the next stop or end."""
        self._generate(sequence, tokens)
        if tokens >= sequence.max_tokens:
            self._end(sequence, FINISHED)
            self.finished += 1
            return
        if sequence.every_token:
            self._outputs.append(Output(sequence, tokens, DECODE))
        stop = self._next_stop(sequence)
        # The block that the step writes to is taken when the step starts, not when it ends.
        self.cache.grow(_lease(sequence), len(sequence.prompt) + tokens)
        at = sequence.first_token_at + self._model.decode_s(stop - 1)
        self._plan(at, lambda due: self._decode_to(sequence, stop, due))

    def _generate(self, sequence: RunningSequence, tokens: int) -> None:
        for index in range(sequence.tokens_out, tokens):
            self.cache.append(_lease(sequence), sequence.answer(index))
        sequence.tokens_out = tokens

    def _next_stop(self, sequence: RunningSequence) -> int:
        """The next output token at which something can be seen: each, or a block's end, or the last."""
        if sequence.every_token:
            return sequence.tokens_out + 1
        # Output token k comes with prompt + k - 1 tokens computed, so a block is full at its end plus one.
        size = self.cache.block_size
        computed = len(sequence.prompt) + sequence.tokens_out - 1
        next_full = (computed // size + 1) * size - len(sequence.prompt) + 1
        return min(next_full, sequence.max_tokens)

    def _decode_to(self, sequence: RunningSequence, tokens: int, at: float) -> None:
        if sequence.state != DECODE:
            return
        self._generate(sequence, tokens)
        self.cache.fill(_lease(sequence), len(sequence.prompt) + tokens - 1)
        self._emit(sequence, tokens)
        self._step_done(at)
        if sequence.done:
            self._start_waiting(at)

    def _end(self, sequence: RunningSequence, state: str) -> None:
        sequence.state = state
        self._running.discard(sequence)
        if sequence.lease is not None:
            self.cache.release(sequence.lease)
        self._outputs.append(Output(sequence, sequence.tokens_out, state))

    def _step_done(self, at: float) -> None:
        events = self.cache.take_events()
        if events:
            self._steps.append(StepEvents(at, events))


def _lease(sequence: RunningSequence) -> Lease:
    assert sequence.lease is not None
    return sequence.lease
