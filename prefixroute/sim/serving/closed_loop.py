"""Clients that wait for their answers: each thinks, asks, and asks again; all of them at one node or at a gateway.

Rules:
1. A client has one request under way. It thinks for `think_s` after each answer, and for a random part of it at first.
2. All enter at one node. With `gateway` that node has no engine of its own; the others serve.
3. A run lasts `until_s`; what is not answered by then is not counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prefixroute import POLICIES, LoadReport, Node

from .loop import Attempt, Gossiping, Job, ServingSettings
from .serving_engine import Speed
from .workloads import ArrivalTrace, one_prefix


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """One hot prefix before `engines` equal engines. Times in seconds."""

    clients: int = 64
    gateway: bool = False
    engines: int = 4
    think_s: float = 0.5
    until_s: float = 40.0
    gossip_s: float = 1.0
    delay_s: float = 0.0005
    speed: Speed = Speed(0.0, 1 / 5000)  # noqa: RUF009 - frozen
    prefix_tokens: int = 1600
    tail_tokens: int = 200
    capacity_tokens: int = 100_000

    def serving(self) -> ServingSettings:
        """Return the settings of the fleet."""
        return ServingSettings(
            nodes=self.engines + self.gateway,
            capacity_tokens=self.capacity_tokens,
            delay_s=self.delay_s,
            gossip_s=self.gossip_s,
            speed=self.speed,
        )


class Answer(NamedTuple):
    """When a request was answered, after how long, in seconds, and by which node."""

    at: float
    latency_s: float
    server: int


class Answered(NamedTuple):
    """What came of a run: `answers`, their mean latency in seconds, the share of the busiest engine."""

    answers: int
    mean_s: float
    hottest: float


class ClosedRun(Gossiping):
    """One run of a closed loop under a policy, by name; clients take the prompts of the trace in turn."""

    def __init__(self, loop: ClosedLoop, policy: str, seed: int) -> None:
        trace = _prompts(loop, seed)
        super().__init__(trace, loop.serving(), seed, POLICIES[policy])
        self.loop = loop
        self.answers: list[Answer] = []
        self._entry = self.settings.nodes - 1 if loop.gateway else 0
        self._asked = 0

    def last(self) -> list[Answer]:
        """Run until `until_s`; return all answers."""
        self.begin()
        for _ in range(self.loop.clients):
            self._ask(self.rng.random() * self.loop.think_s)
        while self.now < self.loop.until_s:
            self._agenda.step()
        return self.answers

    def start(self, i: int, incarnation: int, now: float) -> Node:
        """Make a node; a gateway has no endpoint."""
        if not self.loop.gateway or i != self._entry:
            return super().start(i, incarnation, now)
        settings, rng = self.settings.node_settings(i), random.Random(f"{self.rng.random()}/{i}")
        return Node(self.names[i], self.trace.domain, rng=rng, now=now, settings=settings, policy=self.make_policy())

    def replied(self, attempt: Attempt, load: LoadReport | None, now: float) -> None:
        """Note the answer; its client thinks, and asks again."""
        super().replied(attempt, load, now)
        self.answers.append(Answer(now, now - attempt.job.arrival.at, attempt.target))
        self._ask(now + self.loop.think_s)

    def _ask(self, at: float) -> None:
        arrivals = self.trace.arrivals
        arrival = arrivals[self._asked % len(arrivals)]._replace(at=at)
        self.plan(at, self._arrive, Job(self._asked % len(arrivals), arrival, self._entry))
        self._asked += 1


def _prompts(loop: ClosedLoop, seed: int) -> ArrivalTrace:
    # As many as engines could ever answer; the rest of the run would repeat the first tails.
    most_per_s = loop.engines / (loop.speed.fixed_s + loop.speed.token_s * loop.tail_tokens)
    n = int(min(loop.clients / loop.think_s, most_per_s) * loop.until_s) + loop.clients
    return one_prefix(n, loop.prefix_tokens, loop.tail_tokens, seed)


def counted(answers: Sequence[Answer], since_s: float = 0.0) -> Answered:
    """Return the figures of the answers that came after `since_s`."""
    late = [answer for answer in answers if answer.at >= since_s]
    n = max(1, len(late))
    busiest = max(Counter(answer.server for answer in late).values(), default=0)
    return Answered(len(late), sum(answer.latency_s for answer in late) / n, busiest / n)
