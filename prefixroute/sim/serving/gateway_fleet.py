"""``prefixroute simulate gateways``: stateless gateways in front of many endpoints, sessions whose turns land anywhere.

Four ways in which a gateway knows which endpoint holds a session:

    one_gateway         one gateway, which hears the engines' nodes through gossip
    eight_unsynced      each gateway knows only the prompts that it routed itself
    eight_gossip        each gateway hears the engines' nodes through gossip
    eight_gossip_churn  the same; in the middle of the run some endpoints leave and as many new ones come

Rules:
1. The figure is a hit rate: of the tokens that a follow-up turn shares with the turn before, the share that was cached
   where the follow-up turn was served. A first turn does not count.
2. A host owns some endpoints, as a machine with several accelerators does. A gateway owns none. Without gossip it has
   a stand-in for each endpoint, and assumes that an endpoint holds the prompts that it routed there (LRU eviction).
3. A gateway sends a prompt to the endpoint's address, not through its node; the node learns the queue from the engine.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixroute import POLICIES, LoadReport, Node, NodeSettings, Outcome, UsageError

from ..clock import Agenda
from ..parallel import Progress, add_run_options, add_seed_options, check_writable, run_all, seeds_of, write_json
from .cells import DEFAULT
from .serving_engine import LruBlocks, ServingEngine, Speed
from .workloads import ArrivalTrace, RequestArrival, SessionShape, session_arrivals, simulated_domain


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The fleet: hosts with endpoints, gateways, sessions. Times in seconds, `rate` in requests a second.

    `gossips` lets gateways hear the nodes; `churn` is the number of endpoints that leave and that come.
    """

    gateways: int = 8
    hosts: int = 15
    endpoints_per_host: int = 8
    requests: int = 3000
    rate: float = 20.0
    capacity_tokens: int = 80000
    gossip_s: float = 1.0
    fan_out: int = 2
    delay_s: float = 0.001
    speed: Speed = Speed(0.03, 0.0001)  # noqa: RUF009 - frozen
    sessions: SessionShape = SessionShape(8, 2000, 16, 320, (6.2, 0.7), (100, 2000))  # noqa: RUF009 - frozen
    gossips: bool = True
    churn: int = 0

    def node_settings(self) -> NodeSettings:
        """Return the settings of hosts and gateways."""
        return NodeSettings(
            interval_s=self.gossip_s,
            fan_out=self.fan_out,
            idle_interval_s=0,
            publish_within_s=self.gossip_s,
            datagram_bytes=65536,
            burst_bytes=1 << 20,
            suspect_after_s=4 * self.gossip_s + 2,
        )


NORMAL = GatewaySettings()
CASES = {
    "one_gateway": GatewaySettings(gateways=1),
    "eight_unsynced": GatewaySettings(gossips=False),
    "eight_gossip": GatewaySettings(),
    "eight_gossip_churn": GatewaySettings(churn=20),
}


class GatewayRequest:
    """A request under way: its gateway, and what the gateway decided."""

    __slots__ = ("arrival", "cached", "decision", "engine", "follows", "gateway", "sent_at")

    def __init__(self, arrival: RequestArrival, gateway: int, follows: bool) -> None:
        self.arrival = arrival
        self.gateway = gateway
        self.follows = follows
        self.decision: Any = None
        self.engine = ""
        self.cached = 0
        self.sent_at = 0.0


class GatewayRun:
    """One run. `hit_rate` is the outcome."""

    def __init__(self, trace: ArrivalTrace, settings: GatewaySettings, seed: int) -> None:
        self.settings = settings
        self.trace = trace
        self.rng = random.Random(f"{seed}/gateways")
        self.engines: dict[str, ServingEngine] = {}
        self.owner: dict[str, Node] = {}
        self.nodes: dict[str, Node] = {}
        self.counts: Counter[str] = Counter()
        self.latency_s: list[float] = []
        self.sent: Counter[str] = Counter()
        """Requests that reached each endpoint."""
        self._guesses: dict[str, LruBlocks] = {}
        self._due: dict[str, float] = {}
        self._agenda = Agenda()
        self.plan = self._agenda.plan
        """`plan(at, what, argument)` plans the call `what(argument, now)` for the moment `at`, in seconds."""
        self._left = len(trace.arrivals)
        self._began = -6 * settings.gossip_s
        self.gateways = [self._node(f"gw{i}") for i in range(settings.gateways)]
        self._build()

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that follow-up turns could have found cached and that they did find cached."""
        return self.counts["found"] / max(1, self.counts["shared"])

    # --- building ------------------------------------------------------------------------------------------

    def _node(self, name: str) -> Node:
        node = Node(
            name,
            self.trace.domain,
            rng=random.Random(self.rng.random()),
            now=self._began,
            settings=self.settings.node_settings(),
            policy=POLICIES[DEFAULT](),
        )
        self.nodes[name] = node
        self._due[name] = self._began + self.settings.gossip_s * self.rng.random()
        return node

    def _build(self) -> None:
        settings = self.settings
        for h in range(settings.hosts):
            host = self._node(f"h{h}")
            for e in range(settings.endpoints_per_host):
                self._endpoint(host, str(e), 0.0)
        if not settings.gossips:
            for gateway in self.gateways:
                for engine in self.engines:
                    self._own(gateway, engine.replace("/", "-"), self._began)
            return
        for name, node in self.nodes.items():
            for other in self.nodes:
                if other != name:
                    node.add_peer(other, other, self._began)
            self.plan(self._due[name], self._timer, name)

    def _endpoint(self, host: Node, name: str, now: float) -> None:
        settings = self.settings
        endpoint = self._own(host, name, now)
        self.engines[endpoint] = ServingEngine(self._cache(), settings.speed, self.plan, self._first_token)
        self.owner[endpoint] = host

    def _cache(self) -> LruBlocks:
        block = self.trace.domain.block_size
        return LruBlocks(self.settings.capacity_tokens // block, block)

    def _own(self, node: Node, name: str, now: float) -> str:
        endpoint = node.add_endpoint(name, incarnation=1, now=now)
        node.set_load(endpoint, self._load(0), now)
        return endpoint

    def _load(self, queued_tokens: int) -> LoadReport:
        settings = self.settings
        return LoadReport(
            queued_tokens=queued_tokens,
            prefill_tokens_per_s=1 / settings.speed.token_s,
            overhead_s=settings.speed.fixed_s,
            capacity_tokens=settings.capacity_tokens,
        )

    def _churn(self, _: None, now: float) -> None:
        for endpoint in self.rng.sample(sorted(self.engines), self.settings.churn):
            host = self.owner.pop(endpoint)
            host.remove_endpoint(endpoint, now)
            del self.engines[endpoint]
            self._endpoint(host, f"new{endpoint.partition('/')[2]}", now)
            self.counts["replaced"] += 1

    # --- time ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every request is answered."""
        seen: set[int] = set()
        for arrival in self.trace.arrivals:
            way = GatewayRequest(arrival, arrival.origin % self.settings.gateways, arrival.topic in seen)
            seen.add(arrival.topic)
            self.plan(arrival.at, self._arrive, way)
        if self.settings.churn:
            self.plan(self.trace.arrivals[-1].at / 2, self._churn, None)
        while self._left:
            self._agenda.step()

    def _timer(self, name: str, now: float) -> None:
        node = self.nodes[name]
        node.handle_timer(max(now, node.next_timer()))
        self._carry(name, now)
        self.plan(max(node.next_timer(), now), self._timer, name)

    def _carry(self, name: str, now: float) -> None:
        for address, data in self.nodes[name].datagrams_to_send(now):
            self.plan(now + self.settings.delay_s, self._deliver, (str(address), name, data))

    def _deliver(self, parcel: tuple[str, str, bytes], now: float) -> None:
        name, source, data = parcel
        self.nodes[name].receive_datagram(data, source, now)
        self._carry(name, now)

    # --- requests ------------------------------------------------------------------------------------------

    def _arrive(self, way: GatewayRequest, now: float) -> None:
        gateway = self.gateways[way.gateway]
        way.decision = gateway.route(way.arrival.prompt.chain, now)
        self._send(way, way.decision.target, now)

    def _send(self, way: GatewayRequest, endpoint: str, now: float) -> None:
        way.sent_at = now
        way.engine = endpoint if self.settings.gossips else endpoint.partition("/")[2].replace("-", "/")
        self.plan(now + self.settings.delay_s, self._reach, way)

    def _reach(self, way: GatewayRequest, now: float) -> None:
        engine = self.engines.get(way.engine)
        if engine is None:
            self.plan(now + self.settings.delay_s, self._gone, way)
            return
        prompt = way.arrival.prompt
        self.sent[way.engine] += 1
        way.cached, batch = engine.cache.admit(prompt, now)
        if way.follows:
            shared = prompt.shared * self.trace.domain.block_size
            self.counts["shared"] += shared
            self.counts["found"] += min(way.cached, shared)
        if batch is not None and self.settings.gossips:
            self.owner[way.engine].apply(way.engine, batch, now)
        engine.server.take(way, prompt.chain.n_tokens - way.cached, now)
        self._probe(way.engine, now)

    def _gone(self, way: GatewayRequest, now: float) -> None:
        self.counts["failed"] += 1
        following = self.gateways[way.gateway].report(way.decision, Outcome.failed("connection refused"), now)
        if following is None:
            way.decision = self.gateways[way.gateway].route(way.arrival.prompt.chain, now)
            following = way.decision.target
        self._send(way, following, now)

    def _probe(self, endpoint: str, now: float) -> None:
        if self.settings.gossips and endpoint in self.engines:
            queued = round(self.engines[endpoint].server.wait_s(now) / self.settings.speed.token_s)
            self.owner[endpoint].set_load(endpoint, self._load(queued), now)

    def _first_token(self, way: GatewayRequest, now: float) -> None:
        self._probe(way.engine, now)
        load = None
        if self.settings.gossips and way.engine in self.engines:
            load = self.owner[way.engine].load(way.engine, now)
        self.plan(now + self.settings.delay_s, self._reply, (way, load))

    def _reply(self, came: tuple[GatewayRequest, LoadReport | None], now: float) -> None:
        way, load = came
        gateway, decision = self.gateways[way.gateway], way.decision
        gateway.report(decision, Outcome.served(way.cached, now - way.sent_at, load), now)
        if not self.settings.gossips:
            guess = self._guesses.get(decision.target) or self._guesses.setdefault(decision.target, self._cache())
            batch = guess.admit(way.arrival.prompt, now).batch
            if batch is not None:
                gateway.apply(decision.target, batch, now)
        self.latency_s.append(now - way.arrival.at)
        self._left -= 1


def run_case(name: str, seed: int, requests: int | None = None) -> dict[str, float]:
    """Run one of CASES; return its hit rate, mean seconds to first token, endpoints used, failures."""
    settings = CASES[name]
    n = requests or settings.requests
    domain = simulated_domain()
    trace = session_arrivals("gateways", settings.sessions, n, settings.gateways, seed, domain).at_rate(settings.rate)
    one = GatewayRun(trace, settings, seed)
    one.run()
    return {
        "hit_rate": round(one.hit_rate, 4),
        "mean_s": round(sum(one.latency_s) / len(one.latency_s), 4),
        "used": sum(len(engine.cache) > 0 for engine in one.engines.values()),
        "failed": one.counts["failed"],
        "replaced": one.counts["replaced"],
    }


def _task(task: tuple[str, int, int | None]) -> dict[str, float]:
    return run_case(*task)


def run(seeds: Sequence[int], workers: int, requests: int | None = None, silent: bool = True) -> dict[str, Any]:
    """Run all cases; return the command's JSON: the means over seeds of each case."""
    tasks = [(name, seed, requests) for name in CASES for seed in seeds]
    found = run_all(_task, tasks, workers, Progress(len(tasks), "runs", silent))
    result: dict[str, Any] = {"seeds": list(seeds), "default": DEFAULT}
    for i, name in enumerate(CASES):
        mine = found[i * len(seeds) : (i + 1) * len(seeds)]
        result[name] = {key: round(sum(one[key] for one in mine) / len(mine), 4) for key in mine[0]}
    return result


# --- the command -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--requests", type=int, metavar="N", help=f"requests of a run ({NORMAL.requests})")
    add_seed_options(parser, 101, 1)
    add_run_options(parser)


def run_options(options: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError` for options that cannot be used."""
    if options.seeds < 1 or (options.requests is not None and options.requests < 1):
        raise UsageError("gateways need seeds >= 1 and requests >= 1")
    check_writable(options.json)
    silent = options.json == "-"
    seeds = seeds_of(options)
    result = run(seeds, options.workers, options.requests, silent)
    if not silent:
        print(f"{'':<20}{'hit rate':>9}{'mean s':>8}{'used':>6}{'failed':>8}   (hit rate of follow-up turns)")
        for name in CASES:
            r = result[name]
            print(f"{name:<20}{r['hit_rate']:>9.3f}{r['mean_s']:>8.3f}{r['used']:>6.0f}{r['failed']:>8.0f}")
    write_json(options.json, result)
    return 0
