"""Clients of one node in virtual time: they ask for prompts, wait for as long as they like, and report what they like.

The nodes are real and gossip all the time. What an endpoint does with a request is a function of the test's: seconds
until its first token, or never. An engine that answers does one prompt after the other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from routing import BLOCK, DOMAIN, prompt

from prefixroute import Decision, LoadReport, Node, NodeSettings, Outcome, PeerChanged
from prefixroute.testing import Mesh, stored

RATE = 40_000
FAST = LoadReport(prefill_tokens_per_s=RATE, overhead_s=0.01)
BLOCKS = 100
"""Of each prompt: 0.04 s of prefill where it is not held."""

NEVER = inf


@dataclass(slots=True)
class Request:
    """A client's request and how it fares."""

    tokens: list[int]
    came_at: float
    decision: Decision
    target: str | None
    began_at: float
    tries: list[tuple[float, str]] = field(default_factory=list)
    answered_by: str = ""


Answers = Callable[[str, Request, float], float]
"""(endpoint, request, now) -> seconds of prefill until its first token; `NEVER` hangs."""


def fleet(
    n: int, *, gateway: bool, holders: Sequence[str] = (), prefixes: int = 1, **settings: Any
) -> tuple[Mesh, Node]:
    """`n` nodes, of which n0 or a gateway beside them is the origin; `holders` hold `prefixes` prompts at first."""
    net = Mesh()
    for i in range(n):
        node = Node(f"n{i}", DOMAIN, rng=random.Random(i), now=0.0, settings=NodeSettings(**SMALL, **settings))
        node.set_load(node.add_endpoint("0", url=f"http://n{i}", incarnation=1, now=0.0), FAST, 0.0)
        net.add(node)
    for endpoint in holders:
        for seed in range(prefixes):
            net.nodes[endpoint.partition("/")[0]].apply(endpoint, stored(prompt(seed, BLOCKS)), 0.0)
    origin = net.nodes["n0"]
    if gateway:
        origin = net.add(Node("gw", DOMAIN, rng=random.Random(99), now=0.0, settings=NodeSettings(**SMALL, **settings)))
    net.run(5.0)
    origin.events()
    return net, origin


SMALL: dict[str, Any] = {"datagram_bytes": 60_000, "interval_s": 0.6}
"""Rounds three times as long as by default: what is tested here takes seconds, and gossip takes most of the time."""


class Clients:
    """They report first tokens and outcomes, or whole answers after `answer_s` alone, or nothing (`reports`)."""

    def __init__(
        self,
        net: Mesh,
        origin: Node,
        answers: Answers,
        patience_s: float,
        *,
        reports: str = "tokens",
        answer_s: float = 0.0,
        gives_up: Callable[[], Outcome] = Outcome.timed_out,
    ) -> None:
        self.net, self.origin, self.answers, self.patience_s = net, origin, answers, patience_s
        self.reports, self.answer_s, self.gives_up = reports, answer_s, gives_up
        self.requests: list[Request] = []
        self.events: list[PeerChanged] = []
        self._agenda: list[tuple[float, int, str, Request, int]] = []
        self._serial = 0
        self._free_at: dict[str, float] = {}
        self._held: dict[str, set[tuple[int, ...]]] = {}

    def ask(self, tokens: list[int], **how: Any) -> Request:
        """One request now."""
        now = self.net.now
        decision = self.origin.route(tokens, now, **how)
        request = Request(tokens, now, decision, decision.target, now)
        self.requests.append(request)
        self._send(request)
        return request

    def run(self, seconds: float, per_s: float, prompts: Callable[[int], list[int]]) -> None:
        """Ask `per_s` times a second for so long."""
        began, n = self.net.now, 0
        while n < seconds * per_s:
            self.until(began + n / per_s)
            self.ask(prompts(n))
            n += 1
        self.until(began + seconds)

    def until(self, end: float) -> None:
        """Let time pass."""
        while self._agenda and self._agenda[0][0] <= end:
            at, _, what, request, number = heappop(self._agenda)
            self.net.run(max(0.0, at - self.net.now))
            if number == len(request.tries) and not request.answered_by and request.target is not None:
                getattr(self, f"_{what}")(request)
        self.net.run(max(0.0, end - self.net.now))
        self.events += [e for e in self.origin.events() if isinstance(e, PeerChanged)]

    def settle(self) -> None:
        """Wait until every request has ended one way or the other."""
        while self._agenda:
            self.until(self._agenda[0][0])

    # --- what they tell ------------------------------------------------------------------------------------

    def sent_to(self, node: str) -> list[float]:
        """When something went to a node's endpoints."""
        return [at for r in self.requests for at, target in r.tries if target.startswith(f"{node}/")]

    @property
    def unanswered(self) -> int:
        """Requests that got no answer."""
        return sum(not request.answered_by for request in self.requests)

    @property
    def shares(self) -> Counter[str]:
        """Answers by endpoint."""
        return Counter(request.answered_by for request in self.requests)

    def changes(self, state: str) -> list[str]:
        """Peers that became `suspended` or `resumed`."""
        return [event.peer for event in self.events if event.state == state]

    # --- an attempt ----------------------------------------------------------------------------------------

    def _plan(self, at: float, what: str, request: Request) -> None:
        self._serial += 1
        heappush(self._agenda, (at, self._serial, what, request, len(request.tries)))

    def _send(self, request: Request) -> None:
        target, now = request.target, self.net.now
        if target is None:
            return
        request.tries.append((now, target))
        request.began_at = now
        work_s = self.answers(target, request, now)
        if work_s < NEVER:
            self._free_at[target] = done = max(now, self._free_at.get(target, 0.0)) + work_s
            self._plan(done, "first", request)
        self._plan(now + self.patience_s, "away", request)

    def _first(self, request: Request) -> None:
        target, now = request.target, self.net.now
        assert target is not None
        if self.reports == "tokens":
            self.origin.first_token(request.decision, now)
        owner = self.net.nodes[target.partition("/")[0]]
        key = tuple(request.tokens[:64])
        if key not in self._held.setdefault(target, set()):
            self._held[target].add(key)
            owner.apply(target, stored(request.tokens[: BLOCKS * BLOCK]), now)
        if self.answer_s:
            self._plan(now + self.answer_s, "whole", request)
        else:
            self._whole(request)

    def _whole(self, request: Request) -> None:
        assert request.target is not None
        request.answered_by = request.target
        if self.reports != "nothing":
            self.origin.report(request.decision, Outcome.served(), self.net.now, endpoint=request.target)

    def _away(self, request: Request) -> None:
        if self.reports == "nothing":
            return
        now = self.net.now
        outcome = self.gives_up()
        request.target = self.origin.report(request.decision, outcome, now, endpoint=request.target)
        self._send(request)


def engine(net: Mesh, dead: Callable[[str, Request, float], bool], times: float = 1.0) -> Answers:
    """Endpoints that answer at their rate (times slower), but where `dead` says that they hang."""

    def answers(endpoint: str, request: Request, now: float) -> float:
        if dead(endpoint, request, now):
            return NEVER
        owner = net.nodes[endpoint.partition("/")[0]]
        index, chain = owner._table.index, owner.chain(request.tokens)
        held = index.depth(chain, index.bit(endpoint)) * BLOCK
        return times * (0.01 + (len(request.tokens) - held) / RATE)

    return answers


def tails(prefixes: int) -> Callable[[int], list[int]]:
    """Prompts that share one of so many prefixes, each with a tail of its own."""
    shared = [prompt(seed, BLOCKS, 0) for seed in range(prefixes)]
    return lambda n: [*shared[n % prefixes], *prompt(10_000 + n, 2)]
