"""The same policies on exact knowledge, without gossip: the bound of what better news could give a router.

Rules:
1. One node owns all endpoints and hears every engine at once; it only looks prompts up.
2. What it finds is relabelled as the origin sees it: its own endpoint is local, the others are a round trip away.
3. Waits are those of the engines' queues when the request would reach them; room and ages are the caches' own.
4. Each origin has a policy of its own, since a policy may keep state.

With no delay at all and `GreedyCost` it is a central router that knows everything at once.
"""

from __future__ import annotations

import random
from typing import Any

from prefixroute import Candidate, LoadReport, Node, NodeSettings, NoRouting, Outcome, Request

from .serving import Attempt, Bare, Job, MakePolicy, ServingSettings
from .workloads import Trace


class Exact(Bare):
    """A run in which every origin knows all caches and queues as they are."""

    def __init__(self, trace: Trace, settings: ServingSettings, seed: int, make_policy: MakePolicy) -> None:
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
            self._endpoints.append(endpoint)
        self._target = {endpoint: i for i, endpoint in enumerate(self._endpoints)}
        self._policies = [make_policy() for _ in range(settings.nodes)]

    def route(self, job: Job, now: float) -> int:
        """Ask the origin's policy."""
        chain = job.arrival.prompt.chain
        decision = self._oracle.route(chain, now)
        self._oracle.report(decision, Outcome.cancelled(), now)
        candidates = [self._seen_from(job.origin, candidate, now) for candidate in decision.candidates]
        choice = self._policies[job.origin].choose(Request(chain, now), candidates, self.rng)
        return self._target[choice.order[0].endpoint]

    def admitted(self, attempt: Attempt, batch: Any, now: float) -> None:
        """Let the oracle hear of it."""
        self._oracle.apply(self._endpoints[attempt.target], batch, now)

    def _seen_from(self, origin: int, candidate: Candidate, now: float) -> Candidate:
        i = self._target[candidate.endpoint]
        delay, engine = self.settings.delay(origin, i), self.engines[i]
        rtt = delay + self.settings.delay(i, origin)
        wait = max(0.0, engine.server.wait_s(now) - delay)
        return candidate._replace(
            local=i == origin,
            rtt_s=rtt,
            wait_s=wait,
            cost_s=rtt + wait + candidate.overhead_s + candidate.prefill_s,
            queued=engine.server.queued,
            room_tokens=float(engine.cache.room_tokens),
            eviction_age_s=engine.cache.eviction_age_s,
        )
