"""Requests over real nodes on virtual time: arrivals, decisions, forwards, service, replies, gossip.

Rules:
1. Every event is planned on one `Agenda`; events of one moment happen in the order in which they were planned.
2. A forward and its reply take the same one-way delay as gossip does between the two nodes.
3. A reply carries the load that the target advertises when it answers.
4. A request is answered once: later answers to the same request are counted as late and change nothing.
5. Gossip starts some rounds before the first request, so that the nodes know each other; their caches are empty.

`Unrouted` is the common base: it has no nodes and serves each request where it arrives. `Gossiping` routes by real
nodes that gossip; `ExactKnowledge` routes by the same policies on exact knowledge.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prefixroute import (
    Decision,
    LoadReport,
    Node,
    NodeSettings,
    Outcome,
    OutcomeKind,
    Policy,
    PushBackSettings,
    UsageError,
    Zones,
)

from ..clock import Agenda
from .serving_engine import LruBlocks, ServingEngine, Speed
from .workloads import ArrivalTrace, RequestArrival

MakePolicy = Callable[[], Policy]

_DOWN = float("inf")


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """A fleet that serves: times in seconds, `capacity_tokens` is the size of each node's cache.

    `delay_s` is one-way: a number, or a row of numbers for each node. `gossip_s` is a round of gossip, in which a node
    talks to `fan_out` others. `slower[i]` multiplies the service time of node i. With `whole_prompts` caches evict
    whole prompts, as in the paper's model. `digest_bytes` bounds a digest, `loss` is the share of datagrams lost.
    `zones[i]` is the zone of node i, and `rules` are the rules between zones.

    Errors on purpose: `gossip_delay` multiplies the delay of gossip, so nodes measure wrong round trips; `told_rate`
    multiplies the prefill rate that nodes are told of their engines.
    """

    nodes: int = 4
    capacity_tokens: float = 19569.0
    delay_s: float | Sequence[Sequence[float]] = 0.002
    gossip_s: float = 2.0
    fan_out: int = 3
    speed: Speed = Speed()  # noqa: RUF009 - frozen
    slower: Sequence[float] = ()
    whole_prompts: bool = False
    push_back: PushBackSettings = PushBackSettings()  # noqa: RUF009 - frozen
    digest_bytes: int = 49152
    timeout_s: float = 3600.0
    loss: float = 0.0
    gossip_delay: float = 1.0
    told_rate: float = 1.0
    zones: Sequence[str] = ()
    rules: Zones = Zones()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.capacity_tokens < 0 or self.gossip_s <= 0:
            raise UsageError("a simulated fleet needs nodes >= 1, capacity_tokens >= 0 and gossip_s > 0")
        if self.slower and len(self.slower) != self.nodes:
            raise UsageError("slower needs a factor for each node")
        if self.zones and len(self.zones) != self.nodes:
            raise UsageError("zones needs a label for each node")
        if not isinstance(self.delay_s, (int, float)) and len(self.delay_s) != self.nodes:
            raise UsageError("delay_s needs one number, or a row for each node")

    def delay(self, source: int, to: int) -> float:
        """Return the one-way delay between two nodes, in seconds."""
        if source == to:
            return 0.0
        return self.delay_s if isinstance(self.delay_s, (int, float)) else self.delay_s[source][to]

    def longest_delay(self) -> float:
        """Return the longest one-way delay of the fleet, in seconds."""
        return max(self.delay(i, j) for i in range(self.nodes) for j in range(self.nodes))

    def speed_of(self, node: int) -> Speed:
        """Return the speed of a node's engine."""
        return self.speed.slower(self.slower[node]) if self.slower else self.speed

    def node_settings(self, node: int = 0) -> NodeSettings:
        """Return the settings of a node; nodes differ in their zones only."""
        rtt = 2 * self.longest_delay() * self.gossip_delay
        return NodeSettings(
            interval_s=self.gossip_s,
            fan_out=max(1, min(self.fan_out, self.nodes - 1)),
            idle_interval_s=0,
            publish_within_s=self.gossip_s,
            datagram_bytes=65536,
            burst_bytes=1 << 20,
            suspect_after_s=3 * self.gossip_s + 2 * rtt + 2,
            forget_after_s=30 * self.gossip_s + 20 * rtt + 20,
            outcome_timeout_s=2 * self.timeout_s,
            push_back=self.push_back,
            digest_bytes=self.digest_bytes,
            zone=self.zones[node] if self.zones else "",
            zones=self.rules,
        )


class Job:
    """A request under way at its origin."""

    __slots__ = ("answered", "arrival", "decision", "index", "origin", "tries")

    def __init__(self, index: int, arrival: RequestArrival, origin: int) -> None:
        self.index = index
        self.arrival = arrival
        self.origin = origin
        self.decision: Decision | None = None
        self.tries = 0
        self.answered = False


class Attempt:
    """One try of a request at one node; `decision` is the target's own decision on a forward.

    The first try has the budget of the origin's decision, in seconds; later tries have no bound.
    """

    __slots__ = ("budget_s", "cached", "decision", "job", "life", "number", "origin", "reached_at", "sent_at", "target")

    def __init__(self, job: Job, target: int, now: float) -> None:
        self.job = job
        self.target = target
        self.origin = job.origin
        self.sent_at = now
        self.number = job.tries
        self.budget_s = job.decision.budget_s if job.decision is not None and job.tries == 1 else float("inf")
        self.reached_at = now
        self.cached = 0
        self.life = 0
        self.decision: Decision | None = None


class ServedRequests:
    """The results of a run, lists by number of the request; `latency_s` is until the origin has the first token."""

    __slots__ = ("cached", "counts", "forwards", "hits", "latency_s", "server", "virtual_s")

    def __init__(self, n: int) -> None:
        self.latency_s = [0.0] * n
        self.server = [-1] * n
        self.cached = [0] * n
        self.hits = [False] * n
        """Whether the whole shared part of the prompt was cached."""
        self.counts: Counter[str] = Counter()
        self.forwards: Counter[tuple[int, int]] = Counter()
        """Attempts at other nodes than the origin, by (origin, target)."""
        self.virtual_s = 0.0


class Unrouted:
    """A run that serves every request where it arrives; the base of those that route."""

    def __init__(self, trace: ArrivalTrace, settings: ServingSettings, seed: int) -> None:
        self.trace = trace
        self.settings = settings
        self.rng = random.Random(f"{seed}/serving")
        self.served = ServedRequests(len(trace.arrivals))
        self._agenda = Agenda()
        self.plan = self._agenda.plan
        """`plan(at, what, argument)` plans the call `what(argument, now)` for the moment `at`, in seconds."""
        self._left = len(trace.arrivals)
        block = trace.domain.block_size
        self.engines = [
            ServingEngine(
                LruBlocks(int(settings.capacity_tokens / block), block, settings.whole_prompts),
                settings.speed_of(i),
                self.plan,
                self._first_token,
            )
            for i in range(settings.nodes)
        ]

    @property
    def now(self) -> float:
        """Virtual time in seconds: the moment of the latest event."""
        return self._agenda.now

    def run(self) -> ServedRequests:
        """Run until every request is answered."""
        for i, arrival in enumerate(self.trace.arrivals):
            self.plan(arrival.at, self._arrive, Job(i, arrival, arrival.origin % self.settings.nodes))
        self.begin()
        while self._left:
            self._agenda.step()
        self.served.virtual_s = self.now
        return self.served

    # --- what routing replaces -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Plan the events other than requests; here there are none."""

    def route(self, job: Job, now: float) -> int:
        """Return the node that a new request goes to."""
        return job.origin

    def accept(self, attempt: Attempt, now: float) -> bool:
        """Note that a forwarded attempt reached its target; return whether it is served there."""
        return True

    def admitted(self, attempt: Attempt, batch: Any, now: float) -> None:
        """Note the events of the target's engine for a prompt that it has taken; here they are ignored."""

    def finished(self, attempt: Attempt, now: float) -> LoadReport | None:
        """Note the first token of an attempt at its target; return the load that the reply carries."""
        return None

    def replied(self, attempt: Attempt, load: LoadReport | None, now: float) -> None:
        """Note a reply at the origin."""

    # --- a request's way -----------------------------------------------------------------------------------

    def _arrive(self, job: Job, now: float) -> None:
        self.send(job, self.route(job, now), now)

    def send(self, job: Job, target: int, now: float) -> None:
        """Send a request to a node, which may be its origin."""
        job.tries += 1
        attempt = Attempt(job, target, now)
        if target == job.origin:
            self.serve(attempt, now)
        else:
            self.served.counts["forwards"] += 1
            self.served.forwards[job.origin, target] += 1
            self.plan(now + self.settings.delay(job.origin, target), self._reach, attempt)

    def _reach(self, attempt: Attempt, now: float) -> None:
        attempt.reached_at = now
        if self.accept(attempt, now):
            self.serve(attempt, now)

    def serve(self, attempt: Attempt, now: float) -> None:
        """Hand an attempt to the engine of its target."""
        engine, prompt = self.engines[attempt.target], attempt.job.arrival.prompt
        attempt.cached, batch = engine.cache.admit(prompt, now)
        attempt.life = engine.life
        if batch is not None:
            self.admitted(attempt, batch, now)
        engine.server.take(attempt, prompt.chain.n_tokens - attempt.cached, now)

    def _first_token(self, attempt: Attempt, now: float) -> None:
        if attempt.life != self.engines[attempt.target].life:
            return
        load = self.finished(attempt, now)
        if attempt.target == attempt.origin:
            self._reply((attempt, load), now)
        else:
            self.plan(now + self.settings.delay(attempt.target, attempt.origin), self._reply, (attempt, load))

    def _reply(self, came: tuple[Attempt, LoadReport | None], now: float) -> None:
        attempt, load = came
        job = attempt.job
        self.replied(attempt, load, now)
        if job.answered:
            self.served.counts["late"] += 1
            return
        job.answered = True
        self._left -= 1
        served, i, prompt = self.served, job.index, job.arrival.prompt
        served.latency_s[i] = now - job.arrival.at
        served.server[i] = attempt.target
        served.cached[i] = attempt.cached
        served.hits[i] = attempt.cached >= min(prompt.shared, len(prompt.blocks)) * self.trace.domain.block_size
        served.counts["answered"] += 1


class Gossiping(Unrouted):
    """A run over real nodes that gossip; each has a policy of its own, made by `make_policy`."""

    def __init__(self, trace: ArrivalTrace, settings: ServingSettings, seed: int, make_policy: MakePolicy) -> None:
        super().__init__(trace, settings, seed)
        self.make_policy = make_policy
        self.nodes: list[Node] = []
        self.names = [f"n{i}" for i in range(settings.nodes)]
        self.endpoints = [f"{name}/0" for name in self.names]
        self._index = {name: i for i, name in enumerate(self.names)}
        self._target = {endpoint: i for i, endpoint in enumerate(self.endpoints)}
        self._due: list[float] = []
        self._began: list[float] = []
        """When each node was there: nobody hears it before."""

    def begin(self) -> None:
        """Start the nodes, some rounds early and out of step with each other."""
        settings = self.settings
        early = 2 * settings.gossip_s + 4 * settings.longest_delay() * settings.gossip_delay
        for i in range(settings.nodes):
            at = -early - settings.gossip_s * self.rng.random()
            self.nodes.append(self.start(i, 1, at))
            self._due.append(at)
            self._began.append(at)
            self.plan(at, self._timer, i)
        for i, node in enumerate(self.nodes):
            for j, name in enumerate(self.names):
                if i != j:
                    node.add_peer(name, name, self._due[i])

    def start(self, i: int, incarnation: int, now: float) -> Node:
        """Make a node with its endpoint."""
        settings, speed = self.settings, self.settings.speed_of(i)
        rng = random.Random(f"{self.rng.random()}/{i}")
        node = Node(
            self.names[i],
            self.trace.domain,
            rng=rng,
            now=now,
            settings=settings.node_settings(i),
            policy=self.make_policy(),
        )
        endpoint = node.add_endpoint("0", url=self.endpoints[i], incarnation=incarnation, now=now)
        node.set_load(
            endpoint,
            LoadReport(
                prefill_tokens_per_s=settings.told_rate / speed.token_s,
                overhead_s=speed.fixed_s,
                capacity_tokens=int(settings.capacity_tokens),
            ),
            now,
        )
        return node

    # --- gossip --------------------------------------------------------------------------------------------

    def _timer(self, i: int, now: float) -> None:
        if now != self._due[i]:
            return
        node = self.nodes[i]
        node.handle_timer(max(now, node.next_timer()))
        self.carry(i, now)
        # A node with work left is due again at this very moment.
        self._due[i] = float("-inf")
        self._wind(i, now)

    def _wind(self, i: int, now: float) -> None:
        due = max(self.nodes[i].next_timer(), now)
        if due != self._due[i]:
            self._due[i] = due
            self.plan(due, self._timer, i)

    def carry(self, i: int, now: float) -> None:
        """Plan the delivery of the datagrams that a node wants to send."""
        settings = self.settings
        for address, data in self.nodes[i].datagrams_to_send(now):
            if settings.loss and self.rng.random() < settings.loss:
                continue
            j = self._index[str(address)]
            self.plan(now + settings.gossip_delay * settings.delay(i, j), self._deliver, (j, i, data))

    def _deliver(self, parcel: tuple[int, int, bytes], now: float) -> None:
        i, source, data = parcel
        if self._due[i] == _DOWN or now < self._began[i]:
            return
        self.nodes[i].receive_datagram(data, self.names[source], now)
        self.carry(i, now)
        if self.nodes[i].next_timer() < self._due[i]:
            self._wind(i, now)

    # --- requests ------------------------------------------------------------------------------------------

    def decide(self, i: int, job: Job, now: float, **how: Any) -> Decision:
        """Ask a node where a request goes."""
        return self.nodes[i].route(job.arrival.prompt.chain, now, **how)

    def route(self, job: Job, now: float) -> int:
        """Ask the origin's node."""
        job.decision = self.decide(job.origin, job, now)
        return self._target[job.decision.target]

    def accept(self, attempt: Attempt, now: float) -> bool:
        """Ask the target's node, which serves the forward or hands it back."""
        i = attempt.target
        attempt.decision = decision = self.decide(i, attempt.job, now, forwarded=True, budget_s=attempt.budget_s)
        if decision.declined:
            self.served.counts["declined"] += 1
            outcome = Outcome.declined(self.nodes[i].load(self.endpoints[i], now), decision.matched_tokens)
            self.plan(now + self.settings.delay(i, attempt.origin), self._handed_back, (attempt, outcome))
        return not decision.declined

    def _handed_back(self, came: tuple[Attempt, Outcome], now: float) -> None:
        self.elsewhere(*came, now)

    def elsewhere(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """Report to the origin that an attempt was not served, and send the request where the origin then says."""
        job = attempt.job
        if job.answered or job.origin != attempt.origin or job.tries != attempt.number:
            return
        assert job.decision is not None
        node = self.nodes[job.origin]
        following = node.report(job.decision, outcome, now, endpoint=self.endpoints[attempt.target])
        if outcome.kind is not OutcomeKind.DECLINED:
            self.served.counts["fallbacks"] += 1
        self.send(job, job.origin if following is None else self._target[following], now)

    def admitted(self, attempt: Attempt, batch: Any, now: float) -> None:
        """Give the node its engine's events."""
        i = attempt.target
        self.nodes[i].apply(self.endpoints[i], batch, now)

    def finished(self, attempt: Attempt, now: float) -> LoadReport | None:
        """Report the outcome to the target's node."""
        if attempt.decision is None:
            return None
        i = attempt.target
        outcome = Outcome.served(attempt.cached, now - attempt.reached_at)
        self.nodes[i].report(attempt.decision, outcome, now)
        return self.nodes[i].load(self.endpoints[i], now)

    def replied(self, attempt: Attempt, load: LoadReport | None, now: float) -> None:
        """Report the outcome to the origin's node."""
        job = attempt.job
        if job.decision is None:
            return
        outcome = Outcome.served(attempt.cached, now - attempt.sent_at, load)
        self.nodes[job.origin].report(job.decision, outcome, now, endpoint=self.endpoints[attempt.target])
