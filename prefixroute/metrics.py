"""Prometheus metrics of a node, as text. Needs the extra `metrics` (prometheus-client).

Rule: metrics are read off the node when they are scraped; nothing on the request path touches a metrics library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    message = "prefixroute.metrics needs prometheus_client: pip install 'prefixroute[metrics]'"
    raise ModuleNotFoundError(message, name=error.name) from error

from .events import flat_name
from .fairness import FairQueue
from .node import Node
from .routing.zones import FORWARDS
from .stats import EndpointStats, NodeStats

_LABELLED = {
    "rejected": ("prefixroute_datagrams_rejected", "Datagrams that could not be used.", "kind"),
    "domain_mismatch": ("prefixroute_domain_mismatches", "Peers refused, by the field that differs.", "field"),
    "updates": ("prefixroute_updates", "Updates by what became of them.", "verdict"),
    "outcomes": ("prefixroute_outcomes", "Reported outcomes.", "kind"),
    "decisions": ("prefixroute_decisions", "Decisions: local, or forward.", "target"),
}
"""Name of a count that has a label -> family name, help, the label's name."""

_ZONE_FORWARDS = "zone_forwards"
_ZONE_WITHHELD = {f"zone_withheld_{rule}": rule for rule in FORWARDS}
"""Counts of pairs of zones, labelled with the zone to; of those withheld, the rule by name of the count."""

_ENDPOINT_GAUGES = {
    "blocks": "Canonical blocks known to be matchable.",
    "version": "Version of the endpoint's set.",
    "age_s": "Seconds since the owner's own last word.",
    "confidence": "Share of a match that is counted.",
    "rtt_s": "Network round trip in seconds.",
    "wait_s": "Expected wait in seconds.",
    "usable": "Whether the endpoint is a candidate.",
}

_RESULTS = ("exact", "near", "high", "low")
_ENDPOINT_SUMS = {
    "predicted_tokens": "Cached tokens that were predicted, of the answers that told theirs.",
    "cached_tokens": "Cached tokens that those answers told.",
}

_TENANT_SUMS = {
    "requests": "Requests of a tenant that clients sent here.",
    "received": "Requests of a tenant that peers sent here.",
    "forwards": "Requests of a tenant that were sent to peers.",
    "declined": "Requests of a tenant that peers sent and got back.",
    "prompt_tokens": "Prompt tokens of a tenant's requests.",
    "predicted_tokens": "Cached tokens that were predicted for a tenant, of the answers that told theirs.",
    "cached_tokens": "Cached tokens that those answers told.",
    "prefill_local_tokens": "Tokens computed here for a tenant's requests from here.",
    "prefill_received_tokens": "Tokens computed here for a tenant's requests from peers.",
    "prefill_forwarded_tokens": "Tokens computed at peers for a tenant's requests from here.",
    "expected_wait_s": "Waits that decisions for a tenant expected, added up, in seconds.",
}
"""Of `TenantStats`; at most `MAX_TENANTS` tenants and one row for the rest."""

_QUEUE_GAUGES = {
    "held": "Requests of a tenant that wait for their turn.",
    "held_tokens": "Tokens that they are to compute.",
    "deficit_tokens": "What a tenant lacks of its fair share: 0 for who is next, below 0 for who had more.",
}
_QUEUE_SUMS = {
    "released": "Requests of a tenant that went to the engine.",
    "tokens": "Tokens that a tenant was charged.",
    "waited_s": "Seconds that a tenant's requests waited for their turn.",
    "refused": "Requests of a tenant that found the queue full.",
}


class _NodeCollector(Collector):
    def __init__(self, node: Node, now: float, queues: Mapping[str, FairQueue]) -> None:
        self._node, self._now, self._queues = node, now, queues

    def collect(self) -> Iterator[Metric]:
        stats = self._node.stats(self._now)
        counts = sorted(self._node.journal.counts.items(), key=lambda row: flat_name(*row[0]))
        yield from _counters(stats.node, counts)
        yield from _zones(stats, counts)
        yield from _predictions(stats)
        yield from _gauges(stats)
        yield from _tenants(stats)
        yield from _queues(stats.node, self._queues)


def render(node: Node, now: float, queues: Mapping[str, FairQueue] | None = None) -> bytes:
    """Return the node's metrics in Prometheus' text format. O(endpoints + tenants).

    `queues` are the fair queues before its endpoints, by endpoint.
    """
    registry = CollectorRegistry()
    registry.register(_NodeCollector(node, now, queues or {}))
    return generate_latest(registry)


_Counts: TypeAlias = list[tuple[tuple[str, str | None], int]]
"""((name, label), count), by flat name."""


def _counters(node: str, counts: _Counts) -> Iterator[Metric]:
    """A family for each count without a label, and one for each group of labelled ones; zones have their own."""
    families: dict[str, CounterMetricFamily] = {}
    for (name, label), value in counts:
        if name in _LABELLED:
            family, text, kind = _LABELLED[name]
            metric = families.setdefault(family, CounterMetricFamily(family, text, labels=["node", kind]))
            metric.add_metric([node, label or ""], value)
        elif name != _ZONE_FORWARDS and name not in _ZONE_WITHHELD:
            flat = flat_name(name, label)
            family, text = f"prefixroute_{flat}", flat.replace("_", " ").capitalize() + "."
            families[family] = CounterMetricFamily(family, text, labels=["node"])
            families[family].add_metric([node], value)
    yield from families.values()


def _zones(stats: NodeStats, counts: _Counts) -> Iterator[Metric]:
    """Forwards by pair of zones, those that a rule withheld, and the way to each peer; only what there is of each."""
    labels = ["node", "from", "to"]
    text = "Forwards that were tried, by the zones from and to."
    forwards = CounterMetricFamily("prefixroute_zone_forwards", text, labels=labels)
    text = "Prompts that might have been quicker in a zone from which a rule kept them."
    withheld = CounterMetricFamily("prefixroute_zone_withheld", text, labels=[*labels, "rule"])
    for (name, to), value in counts:
        if name == _ZONE_FORWARDS:
            forwards.add_metric([stats.node, stats.zone, to or ""], value)
        elif name in _ZONE_WITHHELD:
            withheld.add_metric([stats.node, stats.zone, to or "", _ZONE_WITHHELD[name]], value)
    text = "Network round trip to a peer in seconds, as gossip measured it."
    rtt = GaugeMetricFamily("prefixroute_peer_rtt_seconds", text, labels=["node", "peer", "zone"])
    for way in stats.round_trips:
        if way.rtt_s is not None:
            rtt.add_metric([stats.node, way.peer, way.zone], way.rtt_s)
    yield from (family for family in (forwards, withheld, rtt) if family.samples)


def _predictions(stats: NodeStats) -> Iterator[Metric]:
    labels = ["node", "endpoint", "local"]
    text = "Predicted hits against the engine's own count: equal, within one hit unit, too high, too low."
    results = CounterMetricFamily("prefixroute_endpoint_predictions", text, labels=[*labels, "result"])
    for row in stats.endpoints:
        for result in _RESULTS:
            results.add_metric([stats.node, row.endpoint, _flag(row), result], getattr(row.accuracy, result))
    yield results
    for field, text in _ENDPOINT_SUMS.items():
        tokens = CounterMetricFamily(f"prefixroute_endpoint_{field}", text, labels=labels)
        for row in stats.endpoints:
            tokens.add_metric([stats.node, row.endpoint, _flag(row)], getattr(row.accuracy, field))
        yield tokens
    text = "Largest over-estimate of a hit, in tokens."
    over = GaugeMetricFamily("prefixroute_endpoint_most_over_tokens", text, labels=labels)
    text = "Times that more blocks were live than the engine has, which proves lost removals."
    inflated = CounterMetricFamily("prefixroute_endpoint_inflated", text, labels=["node", "endpoint"])
    text = "1 for what the blocks of a local endpoint are known from."
    residency = GaugeMetricFamily("prefixroute_endpoint_residency", text, labels=["node", "endpoint", "state"])
    for row in stats.endpoints:
        over.add_metric([stats.node, row.endpoint, _flag(row)], row.accuracy.most_over)
        if row.local:
            inflated.add_metric([stats.node, row.endpoint], row.inflated)
            residency.add_metric([stats.node, row.endpoint, row.residency], 1.0)
    yield from (over, inflated, residency)


def _gauges(stats: NodeStats) -> Iterator[Metric]:
    for field, text in _ENDPOINT_GAUGES.items():
        name = field.replace("_s", "_seconds") if field.endswith("_s") else field
        gauge = GaugeMetricFamily(f"prefixroute_endpoint_{name}", text, labels=["node", "endpoint", "local"])
        for row in stats.endpoints:
            gauge.add_metric([stats.node, row.endpoint, _flag(row)], float(getattr(row, field)))
        yield gauge
    state = GaugeMetricFamily(
        "prefixroute_endpoint_push_back", "1 for the state that holds.", labels=["node", "endpoint", "state"]
    )
    for row in stats.endpoints:
        state.add_metric([stats.node, row.endpoint, row.push_back], 1.0)
    yield state
    index = GaugeMetricFamily("prefixroute_index_keys", "Distinct keys in the merged index.", labels=["node"])
    index.add_metric([stats.node], stats.index_keys)
    yield index
    flights = GaugeMetricFamily("prefixroute_in_flight", "Decisions without a final outcome.", labels=["node"])
    flights.add_metric([stats.node], stats.in_flight)
    yield flights


def _tenants(stats: NodeStats) -> Iterator[Metric]:
    for field, text in _TENANT_SUMS.items() if stats.tenants else ():
        name = field.removesuffix("_s") + "_seconds" if field.endswith("_s") else field
        family = CounterMetricFamily(f"prefixroute_tenant_{name}", text, labels=["node", "tenant"])
        for row in stats.tenants:
            family.add_metric([stats.node, row.tenant], float(getattr(row, field)))
        yield family


def _queues(node: str, queues: Mapping[str, FairQueue]) -> Iterator[Metric]:
    if not queues:
        return
    labels = ["node", "endpoint", "tenant"]
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for field, text in _QUEUE_GAUGES.items():
        families[field] = GaugeMetricFamily(f"prefixroute_fair_{field}", text, labels=labels)
    for field, text in _QUEUE_SUMS.items():
        name = field.removesuffix("_s") + "_seconds" if field.endswith("_s") else field
        families[field] = CounterMetricFamily(f"prefixroute_fair_{name}", text, labels=labels)
    for endpoint, queue in queues.items():
        for row in queue.stats():
            for field, family in families.items():
                family.add_metric([node, endpoint, row.tenant], float(getattr(row, field)))
    yield from families.values()


def _flag(row: EndpointStats) -> str:
    return "true" if row.local else "false"
