"""The emulated engine without its HTTP face: the scheduler, the event loop that drives it, the event sockets.

Rules:
1. One timer is set, for the next event that is due; nothing else wakes an idle engine.
2. The cache events of a step are published before its tokens are handed out: a client that has its answer can ask
   for a replay, and finds the events of its own request there.
3. Everything runs on the event loop that called `start`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from types import TracebackType

from typing_extensions import Self

from prefixroute.emulator.answer import Answer
from prefixroute.emulator.block_cache import BlockCache
from prefixroute.emulator.emulator_config import EngineConfig, KvEventsConfig
from prefixroute.emulator.event_socket import EventPublisher
from prefixroute.emulator.metrics_page import Metric, render, single
from prefixroute.emulator.protocol import ApiCall
from prefixroute.emulator.scheduler import CANCELLED, Busy, Load, Output, RunningSequence, Scheduler
from prefixroute.emulator.vllm_wire import Batch


class Generation:
    """One request being served: await `next` until an output is the last."""

    def __init__(self, sequence: RunningSequence) -> None:
        self.sequence = sequence
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    async def next(self) -> Output:
        """The next output: more tokens, or the end (`output.last`)."""
        return await self._outputs.get()

    def _put(self, output: Output) -> None:
        self._outputs.put_nowait(output)


class EngineDriver:
    """Drives a `Scheduler` on the running event loop; `start` and `stop` bound its life."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.cache = BlockCache(
            self.config.capacity_blocks,
            self.config.block_size,
            hash_seed=self.config.hash_seed,
            int_hashes=not self.config.byte_hashes,
            caching=self.config.prefix_caching,
        )
        self.scheduler = Scheduler(self.cache, self.config.service, self.config.limits)
        self.publisher = EventPublisher(self.config.kv_events)
        self.counters: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter({"max_num_queued_reqs": 0, "max_num_queued_tokens": 0})
        self.running = False
        self._generations: dict[RunningSequence, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at = math.inf
        self._wall = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the event sockets and begin to serve; UsageError when an endpoint cannot be used."""
        await self.publisher.start()
        self._loop = asyncio.get_running_loop()
        # The wall clock is read once, so that batches keep the order of the planned time line if the clock is set.
        self._wall = time.time() - self._loop.time()
        self.running = True

    async def stop(self) -> None:
        """Cancel what runs and close the sockets. Stopping twice is harmless."""
        self.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._armed_at = math.inf
        await self.publisher.stop()

    def abort(self) -> None:
        """Refuse new requests and cancel those that are being served."""
        self.running = False
        for generation in list(self._generations.values()):
            self.cancel(generation)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- serving -------------------------------------------------------------------------------------------

    def submit(self, call: ApiCall, answer: Answer) -> Generation:
        """Begin to serve a request; raises Busy past a limit, or when the engine is stopped."""
        if not self.running:
            raise Busy("stopped", "The engine is not running.")
        try:
            sequence = self.scheduler.submit(
                call.prompt,
                call.max_tokens,
                answer.token,
                self._now(),
                scope=call.scope,
                every_token=call.stream,
            )
        except Busy as refusal:
            self.refusals[refusal.reason] += 1
            self._advance()
            raise
        generation = self._generations[sequence] = Generation(sequence)
        self._advance()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Stop serving a request, free its blocks and wake its waiting caller; harmless after its end."""
        if self._generations.pop(generation.sequence, None) is None:
            return
        sequence = generation.sequence
        self.scheduler.cancel(sequence, self._now())
        self.counters["cancelled"] += 1
        generation._put(Output(sequence, sequence.tokens_out, CANCELLED))
        self._advance()

    def reset_prefix_cache(self) -> bool:
        """Clear the cache; False while blocks are in use. The event leaves with the next step."""
        done = self.scheduler.reset_cache(self._now())
        self._advance()
        return done

    # --- looking -------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """Requests that run and that wait."""
        return self.scheduler.load()

    def kv_event_sources(self) -> dict[str, KvEventsConfig]:
        """Event configuration by rank, with the ports that were really taken."""
        return {"0": self.publisher.config}

    def metrics(self) -> str:
        """The Prometheus text."""
        return render(self._metrics(), self.config.model)

    def _metrics(self) -> list[Metric]:
        load, cache, count = self.load(), self.cache.stats(), self.counters
        config = self.config
        info = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": str(config.prefix_caching),
            # vLLM counts the null block; a reader subtracts it.
            "num_gpu_blocks": str(config.capacity_blocks + 1),
            "kv_cache_size_tokens": str(config.cache_tokens),
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
        }
        rejections = tuple(({"reason": reason}, n) for reason, n in self.refusals.items())
        return [
            single("vllm:num_requests_running", "gauge", "Requests being computed.", load.running),
            single("vllm:num_requests_waiting", "gauge", "Requests that wait.", load.waiting),
            single("vllm:kv_cache_usage_perc", "gauge", "Share of blocks in use, 0 to 1.", self.cache.usage()),
            single("vllm:prefix_cache_queries_total", "counter", "Tokens looked up.", cache.queried_tokens),
            single("vllm:prefix_cache_hits_total", "counter", "Tokens found cached.", cache.hit_tokens),
            single("vllm:prompt_tokens_total", "counter", "Prompt tokens served.", count["prompt_tokens"]),
            single("vllm:prompt_tokens_cached_total", "counter", "Of these, cached.", count["cached_tokens"]),
            single("vllm:generation_tokens_total", "counter", "Output tokens.", count["output_tokens"]),
            Metric(
                "vllm:request_success_total",
                "counter",
                "Finished requests.",
                (({"finished_reason": "length"}, count["finished"]),),
            ),
            Metric("vllm:admission_rejections_total", "counter", "Refused requests.", rejections),
            Metric("vllm:cache_config_info", "gauge", "The cache's configuration.", ((info, 1),)),
        ]

    # --- inside --------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._loop.time() if self._loop else 0.0

    def _advance(self) -> None:
        """Run the scheduler up to now, publish its cache events, hand out its outputs, and set the next timer."""
        now = self._now()
        self.scheduler.handle_timer(now)
        for step in self.scheduler.steps():
            self.publisher.publish(Batch(self._wall + step.at, step.events))
        for output in self.scheduler.outputs():
            self._hand_out(output)
        due = self.scheduler.next_timer()
        if self._loop is not None and due != self._armed_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._on_timer) if due < math.inf else None
            self._armed_at = due

    def _on_timer(self) -> None:
        self._timer = None
        self._armed_at = math.inf
        self._advance()

    def _hand_out(self, output: Output) -> None:
        sequence = output.sequence
        generation = self._generations.get(sequence)
        if generation is None:
            return
        if output.last:
            del self._generations[sequence]
            self.counters["finished"] += 1
            self.counters["prompt_tokens"] += len(sequence.prompt)
            self.counters["cached_tokens"] += sequence.cached_tokens
            self.counters["output_tokens"] += output.tokens
        generation._put(output)
