"""The same policies on exact knowledge, without gossip: the bound of what fresher news could give a router.

Rules:
1. One node, the oracle, owns all endpoints and hears every engine at once; it only looks prompts up.
2. Its candidates are relabelled as the origin sees them: the origin's own endpoint is local, others a round trip away.
3. A wait is that of the engine's queue when the request would reach it, with all requests then on their way to that
   engine, from any origin; their blocks count as held when they arrive. Room and ages are the caches' own.
4. Each origin has a policy of its own, since a policy may keep state.

Without any delay and with `GreedyCost`, this run is a central router that knows everything at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp
from typing import Any, NamedTuple

from prefixroute import (
    BlocksRemoved,
    BlocksStored,
    Candidate,
    EngineBatch,
    LoadReport,
    Node,
    NodeSettings,
    NoRouting,
    Outcome,
    Request,
)

from .loop import Attempt, Job, MakePolicy, ServingSettings, Unrouted
from .workloads import ArrivalTrace

ARRIVALS_S = 30.0
"""Seconds after which an arrival counts 1/e (about a third) in the rate of arrivals, as in the nodes."""


class Flying(NamedTuple):
    """A request on its way to a node: when it arrives, its work there in seconds, and the blocks that it leaves."""

    arrives_at: float
    work_s: float
    blocks: tuple[int, ...]


class ExactKnowledge(Unrouted):
    """A run in which every origin knows all caches and queues as they are."""

    def __init__(self, trace: ArrivalTrace, settings: ServingSettings, seed: int, make_policy: MakePolicy) -> None:
        super().__init__(trace, settings, seed)
        quiet = NodeSettings(outcome_timeout_s=2 * settings.timeout_s, push_back=settings.push_back)
        self._oracle = Node(
            "oracle", trace.domain, rng=random.Random(seed), now=0.0, settings=quiet, policy=NoRouting()
        )
        self._endpoints = []
        for i in range(settings.nodes):
            speed = settings.speed_of(i)
            endpoint = self._oracle.add_endpoint(str(i), incarnation=1, now=0.0)
            load = LoadReport(
                prefill_tokens_per_s=1 / speed.token_s,
                overhead_s=speed.fixed_s,
                capacity_tokens=int(settings.capacity_tokens),
            )
            self._oracle.set_load(endpoint, load, 0.0)
            # One stored and removed block shows that this engine reports events; without events the oracle would
            # guess the cache from the prompts that were looked up.
            first = BlocksStored((1,), None, range(trace.domain.block_size), trace.domain.block_size)
            self._oracle.apply(endpoint, EngineBatch((first, BlocksRemoved((1,)))), 0.0)
            self._endpoints.append(endpoint)
        self._target = {endpoint: i for i, endpoint in enumerate(self._endpoints)}
        self._policies = [make_policy() for _ in range(settings.nodes)]
        self._flying: list[dict[int, Flying]] = [{} for _ in range(settings.nodes)]
        self._came = [(0.0, 0.0)] * settings.nodes
        """By node: the requests that came, weighted down by their age, and when that sum was taken (seconds)."""

    def route(self, job: Job, now: float) -> int:
        """Ask the origin's policy."""
        prompt, origin = job.arrival.prompt, job.origin
        decision = self._oracle.route(prompt.chain, now)
        # A served request, unlike a cancelled one, leaves nothing behind from which the oracle would guess.
        self._oracle.report(decision, Outcome.served(), now)
        candidates = [self._seen_from(origin, candidate, prompt.blocks, now) for candidate in decision.candidates]
        best = self._policies[origin].choose(Request(prompt.chain, now), candidates, self.rng).order[0]
        target = self._target[best.endpoint]
        if target != origin:
            at = now + self.settings.delay(origin, target)
            self._flying[target][job.index] = Flying(at, best.overhead_s + best.prefill_s, prompt.blocks)
        return target

    def accept(self, attempt: Attempt, now: float) -> bool:
        """Note that the request has arrived."""
        del self._flying[attempt.target][attempt.job.index]
        return True

    def serve(self, attempt: Attempt, now: float) -> None:
        """Count the arrival at its target, and serve it."""
        self._came[attempt.target] = (1.0 + self._recent(attempt.target, now), now)
        super().serve(attempt, now)

    def _recent(self, i: int, now: float) -> float:
        count, at = self._came[i]
        return count * exp((at - now) / ARRIVALS_S)

    def admitted(self, attempt: Attempt, batch: Any, now: float) -> None:
        """Give the oracle the engine's events."""
        self._oracle.apply(self._endpoints[attempt.target], batch, now)

    def _seen_from(self, origin: int, candidate: Candidate, blocks: Sequence[int], now: float) -> Candidate:
        i = self._target[candidate.endpoint]
        delay, engine = self.settings.delay(origin, i), self.engines[i]
        rtt, there = delay + self.settings.delay(i, origin), now + delay
        free_at, depth = now + engine.server.wait_s(now), candidate.depth
        for flying in self._flying[i].values():
            if flying.arrives_at <= there:
                free_at = max(free_at, flying.arrives_at) + flying.work_s
                depth = max(depth, _common(blocks, flying.blocks))
        wait, size = max(0.0, free_at - there), self.trace.domain.block_size
        matched = min(depth * size, candidate.prompt_tokens - 1) // size * size
        prefill = (candidate.prompt_tokens - matched) * candidate.s_per_token
        return candidate._replace(
            local=i == origin,
            depth=depth,
            matched_tokens=matched,
            rtt_s=rtt,
            wait_s=wait,
            prefill_s=prefill,
            cost_s=rtt + wait + candidate.overhead_s + prefill,
            queued=engine.server.queued,
            room_tokens=float(engine.cache.room_tokens),
            eviction_age_s=engine.cache.eviction_age_s,
            arrivals_per_s=self._recent(i, now) / ARRIVALS_S,
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading blocks two prompts share; equal handles mean equal blocks from the root on."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
