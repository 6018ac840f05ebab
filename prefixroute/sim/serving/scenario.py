"""``prefixroute simulate run SCENARIO``: your own fleet and workload, from a TOML or JSON file.

The classes below are the tables of the file, and their fields are its keys. An unknown key is refused. Names that end
in `_ms` are milliseconds, all other times are seconds.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prefixroute import POLICIES, UsageError, ZoneRule, Zones

from ..parallel import Progress, add_run_options, check_writable, run_all, write_json
from .cells import DEFAULT, RULES, CellSettings, run_cell, summary, table, trace_of, unit_trace
from .faults import KINDS, Fault, FaultSettings, Faulty, served_once
from .figures import Figures, figures
from .serving_engine import Speed
from .workloads import maker


class ScenarioZone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes beside each other. `slower` multiplies their service time."""

    name: str
    nodes: int = 4
    slower: float = 1.0


class ScenarioLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One-way delay between the nodes of two zones."""

    zones: tuple[str, str]
    delay_ms: float


class ScenarioRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """What nodes of one zone forward to another zone: a `ZoneRule`. `source` and `to` name zones, ``*`` is any zone."""

    source: str
    to: str
    forward: str = "always"
    saving_ms: float = 0.0


class ScenarioEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine: `overhead_ms` a request, prefill rate, and the cache in tokens, or as a share of all prefix tokens.

    With `batch_tokens` it prefills in steps of so many tokens, and decodes `output_tokens` of each request in the same
    steps; each decoding request makes a step `decode_ms` longer.
    """

    prefill_tokens_per_s: float = 8000.0
    overhead_ms: float = 20.0
    cache_tokens: int = 0
    cache_share: float = 0.5
    batch_tokens: int = 0
    output_tokens: int = 0
    decode_ms: float = 0.0


class ScenarioWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workload: a kind of `workloads.maker`, and a `rate` (requests a second), or with rate 0 a `load`."""

    kind: str = "zipf1.5"
    requests: int = 2500
    rate: float = 0.0
    load: float = 0.6
    tail_tokens: int = 100
    cache_tails: bool = False
    file: str = ""


class ScenarioGossip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gossip: in a round of `interval_s` a node talks to `fan_out` others; `loss` is the share of datagrams lost."""

    interval_s: float = 1.0
    fan_out: int = 3
    loss: float = 0.0


class ScenarioFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of a node (counted from 0 over all zones) from `begin` to `end`, shares of the run from 0 to 1."""

    kind: str
    node: int
    begin: float
    end: float = 1.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A what-if: zones, the links and rules between them, engines, workload, gossip, failures, policies, seeds."""

    title: str = ""
    zones: tuple[ScenarioZone, ...] = (ScenarioZone("here"),)
    links: tuple[ScenarioLink, ...] = ()
    rules: tuple[ScenarioRule, ...] = ()
    inside_ms: float = 0.5
    """One-way delay inside a zone."""
    engine: ScenarioEngine = ScenarioEngine()
    workload: ScenarioWorkload = ScenarioWorkload()
    gossip: ScenarioGossip = ScenarioGossip()
    failures: tuple[ScenarioFailure, ...] = ()
    timeout_s: float = 60.0
    policies: tuple[str, ...] = ("none", "longest", "greedy", DEFAULT, "exact")
    seeds: tuple[int, ...] = (1, 2, 3)

    def zone_of(self) -> list[int]:
        """Return the zone of every node."""
        return [i for i, zone in enumerate(self.zones) for _ in range(zone.nodes)]

    def delays_s(self) -> tuple[tuple[float, ...], ...]:
        """Return the one-way delays between nodes, in seconds. Raises `UsageError` when two zones have no link."""
        names = [zone.name for zone in self.zones]
        linked = {frozenset(link.zones): link.delay_ms / 1000 for link in self.links}
        for link in self.links:
            for name in link.zones:
                if name not in names:
                    raise UsageError(f"a link names the zone {name!r}; the zones are {', '.join(names)}")

        def between(a: int, b: int) -> float:
            if a == b:
                return self.inside_ms / 1000
            pair = frozenset((names[a], names[b]))
            if pair not in linked:
                raise UsageError(f"no link says the delay between the zones {names[a]} and {names[b]}")
            return linked[pair]

        zones = self.zone_of()
        return tuple(tuple(between(a, b) for b in zones) for a in zones)

    def zone_rules(self) -> Zones:
        """Return the rules between zones. Raises `UsageError` for a rule of an unknown zone, or a repeated rule."""
        names = [zone.name for zone in self.zones]
        rules: dict[tuple[str, str], ZoneRule] = {}
        for rule in self.rules:
            pair = (rule.source, rule.to)
            for name in pair:
                if name not in (*names, "*"):
                    raise UsageError(f"a rule names the zone {name!r}; the zones are {', '.join(names)}")
            if pair in rules:
                raise UsageError(f"two rules are from {rule.source} to {rule.to}")
            rules[pair] = ZoneRule(rule.forward, rule.saving_ms / 1000)
        return Zones(rules)

    def cell(self, folder: Path) -> CellSettings:
        """Return the cell of this scenario; the workload's file is looked for in `folder`."""
        zones, workload = self.zone_of(), self.workload
        options: dict[str, Any] = {"tail_tokens": workload.tail_tokens, "cache_tails": workload.cache_tails}
        if workload.file:
            options["file"] = str(folder / workload.file)
        maker(workload.kind, **options)
        engine = self.engine
        told, share = tuple(sorted(options.items())), engine.cache_share
        if engine.cache_tokens:
            trace = unit_trace(workload.kind, told, 1.0, workload.requests, len(zones), self.seeds[0])
            share = engine.cache_tokens / trace.prefix_tokens
        extra: dict[str, Any] = {
            "delay_s": self.delays_s(),
            "slower": tuple(self.zones[zone].slower for zone in zones),
            "fan_out": self.gossip.fan_out,
            "loss": self.gossip.loss,
            "timeout_s": self.timeout_s if self.failures else 3600.0,
        }
        if self.rules:
            extra["zones"] = tuple(self.zones[zone].name for zone in zones)
            extra["rules"] = self.zone_rules()
        speed = Speed(
            engine.overhead_ms / 1000,
            1 / engine.prefill_tokens_per_s,
            engine.batch_tokens,
            engine.output_tokens,
            decode_s=engine.decode_ms / 1000,
        )
        return CellSettings(
            nodes=len(zones),
            workload=workload.kind,
            capacity=share,
            gossip_s=self.gossip.interval_s,
            load=workload.load,
            requests=workload.requests,
            rate=workload.rate,
            speed=speed,
            extra=tuple(sorted(extra.items())),
            workload_options=told,
        )


def read(path: Path) -> Scenario:
    """Read a scenario. Raises a `UsageError` that says what is wrong and where."""
    try:
        data = path.read_bytes()
        tree = msgspec.json.decode(data) if path.suffix == ".json" else msgspec.toml.decode(data)
        scenario = msgspec.convert(tree, Scenario)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ImportError:
        raise UsageError(
            "with Python 3.10 TOML needs the extra sim: pip install 'prefixroute[sim]'; JSON does not"
        ) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    _check(scenario, path)
    return scenario


def _check(scenario: Scenario, path: Path) -> None:
    for policy in scenario.policies:
        if policy not in RULES:
            raise UsageError(f"{path}: unknown policy {policy!r}: {', '.join(RULES)}")
    nodes = len(scenario.zone_of())
    if nodes < 1 or not scenario.seeds or not scenario.policies or scenario.workload.requests < 1:
        raise UsageError(f"{path}: a scenario needs a node, a request, a policy and a seed")
    if max(scenario.workload.rate, scenario.workload.load) <= 0:
        raise UsageError(f"{path}: a workload needs rate > 0 or load > 0")
    for failure in scenario.failures:
        if failure.kind not in KINDS or not 0 <= failure.node < nodes or not 0 <= failure.begin < failure.end:
            raise UsageError(f"{path}: a failure is of {', '.join(KINDS)}, at a node from 0 to {nodes - 1}")
    if scenario.failures and set(scenario.policies) - set(POLICIES):
        raise UsageError(f"{path}: with failures the policies are of {', '.join(POLICIES)}")
    if scenario.rules and set(scenario.policies) - set(POLICIES):
        raise UsageError(f"{path}: with rules the policies are of {', '.join(POLICIES)}")


# --- running -----------------------------------------------------------------------------------------------


class _ScenarioRun(msgspec.Struct, frozen=True):
    figures: Figures
    shares: list[float]
    """Share of requests that each node served."""
    counts: dict[str, int]
    forwards: dict[str, float]
    """Forwards that were tried, by "zone > zone", divided by the number of requests."""


def _task(task: tuple[Scenario, Path, str, int]) -> _ScenarioRun:
    scenario, folder, policy, seed = task
    cell = scenario.cell(folder)
    counts: dict[str, int] = {}
    if scenario.failures:
        trace = trace_of(cell, seed)
        length = trace.arrivals[-1].at
        faults = [Fault(f.kind, f.node, f.begin * length, f.end * length) for f in scenario.failures]
        run = Faulty(trace, cell.serving(trace), seed, POLICIES[policy], FaultSettings(tuple(faults)))
        served = run.run()
        counts = {"answered_once": int(served_once(run, served)), "fallbacks": served.counts["fallbacks"]}
        found = figures(served, trace)
    else:
        one = run_cell(cell, policy, seed)
        served, found = one.served, one.figures
    shares = Counter(served.server)
    zones = [scenario.zones[i].name for i in scenario.zone_of()]
    forwards: Counter[str] = Counter()
    for (origin, target), n in served.forwards.items():
        forwards[f"{zones[origin]} > {zones[target]}"] += n
    by_pair = {pair: n / cell.requests for pair, n in sorted(forwards.items())}
    return _ScenarioRun(found, [round(shares[i] / cell.requests, 4) for i in range(cell.nodes)], counts, by_pair)


def run(scenario: Scenario, folder: Path, workers: int = 1, silent: bool = True) -> dict[str, Any]:
    """Run a scenario; return by policy its figures, their ratios to no routing, and each node's share of requests."""
    policies = tuple(dict.fromkeys(("none", *scenario.policies)))
    tasks = [(scenario, folder, policy, seed) for policy in policies for seed in scenario.seeds]
    runs = run_all(_task, tasks, workers, Progress(len(tasks), "runs", silent))
    by_policy: dict[str, Sequence[_ScenarioRun]] = {
        policy: runs[i * len(scenario.seeds) : (i + 1) * len(scenario.seeds)] for i, policy in enumerate(policies)
    }
    none = [one.figures for one in by_policy["none"]]
    result: dict[str, Any] = {"title": scenario.title, "seeds": list(scenario.seeds), "default": DEFAULT}
    result["policies"] = {
        policy: {
            **{name: round(value, 4) for name, value in summary([one.figures for one in mine], none).items()},
            "node_shares": [
                round(sum(each) / len(mine), 4) for each in zip(*(one.shares for one in mine), strict=True)
            ],
            "forwards": _means([one.forwards for one in mine]),
            **{name: sum(one.counts[name] for one in mine) for name in mine[0].counts},
        }
        for policy, mine in by_policy.items()
    }
    return result


def compare(scenario: Scenario, folder: Path, workers: int = 1, silent: bool = True) -> dict[str, Any]:
    """Run a scenario three times: with its rules, with "always" and with "never" for each rule; return all results."""
    if not scenario.rules:
        raise UsageError("there are no rules to compare: the scenario has none")
    return {name: run(told, folder, workers, silent) for name, told in _variants(scenario).items()}


def _variants(scenario: Scenario) -> dict[str, Scenario]:
    def all_of(forward: str) -> Scenario:
        rules = tuple(msgspec.structs.replace(rule, forward=forward, saving_ms=0.0) for rule in scenario.rules)
        return msgspec.structs.replace(scenario, rules=rules)

    return {"always": all_of("always"), "as given": scenario, "never": all_of("never")}


def _means(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    pairs = sorted({pair for one in runs for pair in one})
    return {pair: round(sum(one.get(pair, 0.0) for one in runs) / len(runs), 4) for pair in pairs}


# --- the command -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("scenario", type=Path, metavar="SCENARIO", help="a TOML or JSON file; see examples/scenarios")
    add("--compare-rules", action="store_true", help="run it also with each rule replaced by always, and by never")
    add_run_options(parser)


def run_options(options: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError` for a file that cannot be used."""
    scenario = read(options.scenario)
    folder = options.scenario.parent
    scenario.cell(folder)
    check_writable(options.json)
    silent = options.json == "-"
    if options.compare_rules:
        result = compare(scenario, folder, options.workers, silent)
    else:
        result = run(scenario, folder, options.workers, silent)
    if not silent:
        print(scenario.title or options.scenario)
        for name, one in result.items() if options.compare_rules else (("", result),):
            if name:
                print(f"rules: {name}")
            _tell(scenario, one["policies"])
    write_json(options.json, result)
    return 0


def _tell(scenario: Scenario, policies: dict[str, Any]) -> None:
    print(table(policies))
    zones = [scenario.zones[i].name for i in scenario.zone_of()]
    for policy, found in policies.items():
        shares = " ".join(f"{zone}:{share:.2f}" for zone, share in zip(zones, found["node_shares"], strict=True))
        print(f"served by node, {policy}: {shares}")
    for policy, found in policies.items():
        if found["forwards"]:
            shares = ", ".join(f"{pair} {share:.3f}" for pair, share in found["forwards"].items())
            print(f"forwards a request, {policy}: {shares}")
