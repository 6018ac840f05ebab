"""Prometheus metrics of a node, as text. Needs the extra `metrics` (prometheus-client).

Rule: metrics are read off the node when they are scraped; nothing on the request path touches a metrics library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from .stats import NodeStats

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
    node, zone = stats.node, stats.zone
    text = "Forwards that were tried, by the zones from and to."
    rows: _Rows = [((node, zone, to or ""), value) for (name, to), value in counts if name == _ZONE_FORWARDS]
    forwards = _family(CounterMetricFamily, "zone_forwards", text, "node from to", rows)
    text = "Prompts that might have been quicker in a zone from which a rule kept them."
    rules = _ZONE_WITHHELD
    rows = [((node, zone, to or "", rules[name]), value) for (name, to), value in counts if name in rules]
    withheld = _family(CounterMetricFamily, "zone_withheld", text, "node from to rule", rows)
    text = "Network round trip to a peer in seconds, as gossip measured it."
    rows = [((node, way.peer, way.zone), way.rtt_s) for way in stats.round_trips if way.rtt_s is not None]
    rtt = _family(GaugeMetricFamily, "peer_rtt_seconds", text, "node peer zone", rows)
    yield from (family for family in (forwards, withheld, rtt) if family.samples)


def _predictions(stats: NodeStats) -> Iterator[Metric]:
    labels = "node endpoint local"
    ids = [((stats.node, row.endpoint, str(row.local).lower()), row.accuracy) for row in stats.endpoints]
    text = "Predicted hits against the engine's own count: equal, within one hit unit, too high, too low."
    rows: _Rows = [((*known, result), getattr(accuracy, result)) for known, accuracy in ids for result in _RESULTS]
    yield _family(CounterMetricFamily, "endpoint_predictions", text, f"{labels} result", rows)
    for field, text in _ENDPOINT_SUMS.items():
        rows = [(known, getattr(accuracy, field)) for known, accuracy in ids]
        yield _family(CounterMetricFamily, f"endpoint_{field}", text, labels, rows)
    text = "Largest over-estimate of a hit, in tokens."
    rows = [(known, accuracy.most_over) for known, accuracy in ids]
    yield _family(GaugeMetricFamily, "endpoint_most_over_tokens", text, labels, rows)
    own = [row for row in stats.endpoints if row.local]
    text = "Times that more blocks were live than the engine has, which proves lost removals."
    rows = [((stats.node, row.endpoint), row.inflated) for row in own]
    yield _family(CounterMetricFamily, "endpoint_inflated", text, "node endpoint", rows)
    text = "1 for what the blocks of a local endpoint are known from."
    rows = [((stats.node, row.endpoint, row.residency), 1) for row in own]
    yield _family(GaugeMetricFamily, "endpoint_residency", text, "node endpoint state", rows)


def _gauges(stats: NodeStats) -> Iterator[Metric]:
    node = stats.node
    for field, text in _ENDPOINT_GAUGES.items():
        rows: _Rows = [((node, row.endpoint, str(row.local).lower()), getattr(row, field)) for row in stats.endpoints]
        yield _family(GaugeMetricFamily, f"endpoint_{_with_unit(field)}", text, "node endpoint local", rows)
    rows = [((node, row.endpoint, row.push_back), 1) for row in stats.endpoints]
    text = "1 for the state that holds."
    yield _family(GaugeMetricFamily, "endpoint_push_back", text, "node endpoint state", rows)
    text = "Distinct keys in the merged index."
    yield _family(GaugeMetricFamily, "index_keys", text, "node", [((node,), stats.index_keys)])
    text = "Decisions without a final outcome."
    yield _family(GaugeMetricFamily, "in_flight", text, "node", [((node,), stats.in_flight)])


def _tenants(stats: NodeStats) -> Iterator[Metric]:
    for field, text in _TENANT_SUMS.items() if stats.tenants else ():
        rows: _Rows = [((stats.node, row.tenant), getattr(row, field)) for row in stats.tenants]
        yield _family(CounterMetricFamily, f"tenant_{_with_unit(field)}", text, "node tenant", rows)


def _queues(node: str, queues: Mapping[str, FairQueue]) -> Iterator[Metric]:
    accounts = [((node, endpoint, row.tenant), row) for endpoint, queue in queues.items() for row in queue.stats()]
    for kind, texts in ((GaugeMetricFamily, _QUEUE_GAUGES), (CounterMetricFamily, _QUEUE_SUMS)) if queues else ():
        for field, text in texts.items():
            rows: _Rows = [(labels, getattr(row, field)) for labels, row in accounts]
            yield _family(kind, f"fair_{_with_unit(field)}", text, "node endpoint tenant", rows)


_Rows: TypeAlias = Sequence[tuple[Sequence[str], float]]
"""Samples of one family: the labels' values, and the value."""


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, labels: str, rows: _Rows
) -> Metric:
    family = kind(f"prefixroute_{name}", text, labels=labels.split())
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _with_unit(field: str) -> str:
    return field.removesuffix("_s") + "_seconds" if field.endswith("_s") else field
