"""Prometheus text: it parses, names and labels are stable, and figures are the node's own."""

from __future__ import annotations

import importlib
import random
import sys

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from prefixroute import Domain, EngineBatch, LoadReport, Node, NodeSettings, Outcome, StreamGap, ZoneRule, Zones
from prefixroute.metrics import render
from prefixroute.testing import Mesh, stored

PROMPT = list(range(16 * 12 + 1))
GAUGES = {
    "prefixroute_endpoint_blocks",
    "prefixroute_endpoint_version",
    "prefixroute_endpoint_age_seconds",
    "prefixroute_endpoint_confidence",
    "prefixroute_endpoint_rtt_seconds",
    "prefixroute_endpoint_wait_seconds",
    "prefixroute_endpoint_usable",
    "prefixroute_endpoint_push_back",
    "prefixroute_endpoint_most_over_tokens",
    "prefixroute_endpoint_residency",
    "prefixroute_index_keys",
    "prefixroute_in_flight",
}
MEASURED = {"prefixroute_peer_rtt_seconds"}
"""Gauges of peers to which the way was measured."""
OF_ENDPOINTS = {
    "prefixroute_endpoint_predictions",
    "prefixroute_endpoint_predicted_tokens",
    "prefixroute_endpoint_cached_tokens",
    "prefixroute_endpoint_inflated",
}
GROUPED = {
    "prefixroute_datagrams_rejected": "kind",
    "prefixroute_domain_mismatches": "field",
    "prefixroute_updates": "verdict",
    "prefixroute_outcomes": "kind",
    "prefixroute_decisions": "target",
}


def busy_pair() -> tuple[Mesh, Node, Node]:
    """Two nodes with a little of everything behind them: hits, misses, failures, refusals, junk, a foreign domain."""
    settings = NodeSettings(datagram_bytes=60_000)
    a, b = (Node(name, Domain("m", "t"), rng=random.Random(name), now=0.0, settings=settings) for name in "ab")
    for node in (a, b):
        node.add_endpoint("0", url=f'http://{node.node}/"x"\\', incarnation=1, now=0.0)
    net = Mesh(a, b)
    b.apply("b/0", stored(PROMPT), 0.0)
    b.set_load("b/0", LoadReport(queued_tokens=5000, prefill_tokens_per_s=1000), 0.0)
    net.run(1.0)
    for outcome in (Outcome.served(cached_tokens=16), Outcome.failed("x"), Outcome.timed_out(), Outcome.refused("y")):
        decision = a.route(PROMPT, net.now)
        while a.report(decision, outcome, net.now) is not None:
            pass
    a.report(decision, Outcome.served(), net.now)
    a.receive_datagram(b"junk", "nowhere", net.now)
    stranger = Node("c", Domain("other", "t"), rng=random.Random(1), now=0.0)
    stranger.add_peer("a", "a", net.now)
    stranger.handle_timer(net.now)
    for datagram in stranger.datagrams_to_send(net.now):
        a.receive_datagram(datagram.data, "c", net.now)
    a.route(PROMPT, net.now)
    return net, a, b


def families(node: Node, now: float) -> dict[str, Metric]:
    text = render(node, now).decode()
    parsed = list(text_string_to_metric_families(text))
    names = [metric.name for metric in parsed]
    assert len(names) == len(set(names)), "a family comes once"
    assert text.count("# TYPE ") == text.count("# HELP ") == len(names)
    return {metric.name: metric for metric in parsed}


def test_it_parses_and_every_family_is_described() -> None:
    net, a, b = busy_pair()
    for node in (a, b):
        for name, metric in families(node, net.now).items():
            assert name.startswith("prefixroute_")
            assert metric.documentation.endswith(".")
            assert metric.type == ("gauge" if name in GAUGES | MEASURED else "counter")
            assert metric.samples, name
            for sample in metric.samples:
                assert sample.labels["node"] == node.node
                if metric.type == "counter":
                    assert sample.name == f"{name}_total"


def test_gauges_are_there_from_the_first_scrape() -> None:
    node = Node("a", Domain("m", "t"), rng=random.Random(1), now=0.0)
    assert set(families(node, 0.0)) == GAUGES | OF_ENDPOINTS
    node.add_endpoint("0", incarnation=1, now=0.0)
    assert set(families(node, 0.0)) == GAUGES | OF_ENDPOINTS


def test_every_counter_of_the_node_is_shown_once_with_its_value() -> None:
    net, a, _ = busy_pair()
    shown = {}
    for name, metric in families(a, net.now).items():
        if metric.type == "counter" and name not in OF_ENDPOINTS:
            for sample in metric.samples:
                label = GROUPED.get(name)
                assert set(sample.labels) == {"node", *([label] if label else [])}
                shown[name, sample.labels.get(label or "", "")] = sample.value
    assert sum(shown.values()) == sum(a.counters.values())
    assert len(shown) == len(a.counters)
    assert shown["prefixroute_rounds", ""] == a.counters["rounds"]
    assert shown["prefixroute_bytes_sent", ""] == a.counters["bytes_sent"]
    assert shown["prefixroute_datagrams_rejected", "truncated"] == 1
    assert shown["prefixroute_datagrams_rejected", "domain"] == 1
    assert shown["prefixroute_domain_mismatches", "model"] == 1
    assert shown["prefixroute_outcomes", "timed_out"] == a.counters["outcomes_timed_out"] > 0
    assert shown["prefixroute_outcomes", "late"] == 1
    assert shown["prefixroute_decisions", "local"] == a.counters["decisions_local"]


def test_endpoints_are_labelled_and_their_figures_are_those_of_stats() -> None:
    net, a, _ = busy_pair()
    parsed = families(a, net.now)
    rows = {row.endpoint: row for row in a.stats(net.now).endpoints}
    columns = {
        "blocks": "blocks",
        "version": "version",
        "age_seconds": "age_s",
        "confidence": "confidence",
        "rtt_seconds": "rtt_s",
        "wait_seconds": "wait_s",
        "usable": "usable",
    }
    for name, column in columns.items():
        samples = parsed[f"prefixroute_endpoint_{name}"].samples
        assert {sample.labels["endpoint"] for sample in samples} == {"a/0", "b/0"}
        for sample in samples:
            row = rows[sample.labels["endpoint"]]
            assert sample.labels == {"node": "a", "endpoint": row.endpoint, "local": str(row.local).lower()}
            assert sample.value == pytest.approx(float(getattr(row, column)))
    states = {
        (s.labels["endpoint"], s.labels["state"]): s.value for s in parsed["prefixroute_endpoint_push_back"].samples
    }
    assert states == {(row.endpoint, row.push_back): 1.0 for row in rows.values()}
    assert parsed["prefixroute_index_keys"].samples[0].value == 12
    assert parsed["prefixroute_in_flight"].samples[0].value == 1


def test_predictions_are_shown_endpoint_by_endpoint() -> None:
    net, a, _ = busy_pair()
    parsed = families(a, net.now)
    rows = {row.endpoint: row for row in a.stats(net.now).endpoints}
    assert sum(row.accuracy.compared for row in rows.values()) == 1
    assert rows["a/0"].accuracy.near == 1, "16 tokens were cached, and none of them was predicted"
    shown = {
        (s.labels["endpoint"], s.labels["result"]): s.value for s in parsed["prefixroute_endpoint_predictions"].samples
    }
    assert shown == {(e, r): getattr(rows[e].accuracy, r) for e in rows for r in ("exact", "near", "high", "low")}
    for field in ("predicted_tokens", "cached_tokens"):
        for sample in parsed[f"prefixroute_endpoint_{field}"].samples:
            row = rows[sample.labels["endpoint"]]
            assert sample.labels == {"node": "a", "endpoint": row.endpoint, "local": str(row.local).lower()}
            assert sample.value == getattr(row.accuracy, field)
    for sample in parsed["prefixroute_endpoint_most_over_tokens"].samples:
        assert sample.value == rows[sample.labels["endpoint"]].accuracy.most_over


def test_what_a_local_endpoint_is_known_from_is_shown() -> None:
    net, a, _ = busy_pair()

    def state() -> dict[str, str]:
        shown = families(a, net.now)["prefixroute_endpoint_residency"].samples
        assert {s.value for s in shown} == {1.0}
        return {s.labels["endpoint"]: s.labels["state"] for s in shown}

    assert state() == {"a/0": "exact"}
    a.apply("a/0", EngineBatch((StreamGap(1),)), net.now)
    assert state() == {"a/0": "partial"}
    a.go_by_history("a/0", "no events", net.now)
    assert state() == {"a/0": "silent"}
    a.apply("a/0", stored(PROMPT), net.now)
    a.set_load("a/0", LoadReport(capacity_tokens=64), net.now)
    a.apply("a/0", stored(PROMPT), net.now)
    assert state() == {"a/0": "partial"}
    assert families(a, net.now)["prefixroute_endpoint_inflated"].samples[0].value == 1


def test_zones_are_shown_by_pair_and_by_rule_and_the_way_to_each_peer() -> None:
    rules = Zones({("eu", "us"): ZoneRule("above", 60.0), ("eu", "a_b"): ZoneRule("never")})
    net = Mesh()
    for name, zone in (("a", "eu"), ("b", "us"), ("c", "a_b"), ("d", "eu")):
        settings = NodeSettings(datagram_bytes=60_000, zone=zone, zones=rules if name == "a" else Zones())
        node = Node(name, Domain("m", "t"), rng=random.Random(name), now=0.0, settings=settings)
        node.add_endpoint("0", url=f"http://{name}", incarnation=1, now=0.0)
        node.set_load(f"{name}/0", LoadReport(prefill_tokens_per_s=1000, overhead_s=0.01), 0.0)
        net.add(node)
    longer = list(range(16 * 40 + 1))
    for name, tokens in (("b", longer[: 16 * 38]), ("c", longer), ("d", longer[: 16 * 20])):
        net.nodes[name].apply(f"{name}/0", stored(tokens), 0.0)
    net.run(1.0)
    a = net.nodes["a"]
    assert a.route(longer, net.now).target == "d/0"
    parsed = families(a, net.now)
    (forwards,) = parsed["prefixroute_zone_forwards"].samples
    assert (forwards.labels, forwards.value) == ({"node": "a", "from": "eu", "to": "eu"}, 1)
    withheld = {(s.labels["to"], s.labels["rule"]): s.value for s in parsed["prefixroute_zone_withheld"].samples}
    assert withheld == {("us", "above"): 1, ("a_b", "never"): 1}
    ways = {s.labels["peer"]: s.labels["zone"] for s in parsed["prefixroute_peer_rtt_seconds"].samples}
    assert ways == {"b": "us", "c": "a_b", "d": "eu"}


def test_two_nodes_are_told_apart_by_their_label() -> None:
    net, a, b = busy_pair()
    ours, theirs = families(a, net.now), families(b, net.now)
    for name in GAUGES:
        keys = [
            tuple(sorted(sample.labels.items())) for metric in (ours[name], theirs[name]) for sample in metric.samples
        ]
        assert len(keys) == len(set(keys))


def test_a_scrape_changes_nothing() -> None:
    net, a, _ = busy_pair()
    before = a.stats(net.now)
    assert render(a, net.now) == render(a, net.now)
    assert a.stats(net.now) == before


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "prefixroute.metrics")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'prefixroute\[metrics\]'"):
        importlib.import_module("prefixroute.metrics")
