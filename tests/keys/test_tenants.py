"""Who shares with whom: salts of tenants and groups; and what a node counts for each tenant."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from routing import BLOCK, DOMAIN, hold, mesh, prompt

from prefixroute import (
    EVERYBODY,
    Domain,
    FairQueue,
    FairSettings,
    FairStats,
    Namespace,
    Node,
    Outcome,
    Tenants,
    TenantStats,
    UsageError,
)
from prefixroute.fairness import MAX_TENANTS, OTHER
from prefixroute.keys.names import MAX_TENANT_CHARACTERS
from prefixroute.metrics import render
from prefixroute.testing import stored

SECRET = Domain("m", "t", secret=b"of the cluster")
GROUPS = {"research": ("acme", "umbrella"), "sales": ("globex",)}


def salt(tenants: Tenants, tenant: str, own: str = "") -> str:
    return tenants.namespace(tenant, salt=own).salt


# --- namespaces --------------------------------------------------------------------------------------------


def test_a_tenant_is_alone_unless_a_group_is_declared() -> None:
    tenants = Tenants(SECRET, GROUPS)
    assert salt(tenants, "acme") == salt(tenants, "umbrella")
    others = [salt(tenants, name) for name in ("acme", "globex", "unknown", "", "research", "sales", EVERYBODY, "Acme")]
    assert len(set(others)) == len(others)
    assert all(len(text) == 32 and set(text) <= set("0123456789abcdef") for text in others)
    assert [tenants.group(name) for name in ("acme", "globex", "unknown", "")] == ["research", "sales", "", ""]


def test_every_node_of_a_domain_derives_the_same_and_nobody_else() -> None:
    name = "acme"
    assert salt(Tenants(SECRET), name) == salt(Tenants(Domain("m", "t", secret=b"of the cluster")), name)
    others = [
        Domain("m", "t", secret=b"another one"),
        Domain("n", "t", secret=b"of the cluster"),
        Domain("m", "t", block_size=32, secret=b"of the cluster"),
    ]
    assert len({salt(Tenants(domain), name) for domain in (SECRET, *others)}) == 4


def test_a_group_named_as_a_tenant_is_has_another_salt() -> None:
    lonely, grouped = Tenants(SECRET), Tenants(SECRET, {"acme": ("umbrella",)})
    assert salt(lonely, "acme") == salt(grouped, "acme")
    assert salt(grouped, "umbrella") not in {salt(lonely, "acme"), salt(lonely, "umbrella")}


def test_a_clients_salt_only_narrows_and_meets_nobody_elses() -> None:
    tenants = Tenants(SECRET, GROUPS)
    names, salts = ("acme", "umbrella", "globex", "unknown", ""), ("", "x", "y", "acme")
    found = {(name, own): salt(tenants, name, own) for name, own in itertools.product(names, salts)}
    shared = {pair for pair in found if list(found.values()).count(found[pair]) > 1}
    assert shared == {("acme", ""), ("umbrella", "")}
    stolen = salt(tenants, "acme")
    assert salt(tenants, "globex", stolen) != stolen
    # Lengths go into the hash: what is moved from one part to the other gives another salt.
    assert salt(tenants, "ab", "c") != salt(tenants, "a", "bc")


def test_an_adapter_is_kept_beside_the_salt() -> None:
    tenants = Tenants(SECRET)
    assert tenants.namespace("acme", "lo") == Namespace("lo", salt(tenants, "acme"))


def test_everybody_shares_only_where_that_is_said() -> None:
    tenants = Tenants(SECRET, {**GROUPS, EVERYBODY: ()})
    assert salt(tenants, "unknown") == salt(tenants, "other") == salt(tenants, "")
    assert len({salt(tenants, name) for name in ("unknown", "acme", "globex")}) == 3


@pytest.mark.parametrize(
    ("domain", "groups", "match"),
    [
        (Domain("m", "t"), {}, "secret"),
        (SECRET, {"a": ("x",), "b": ("x",)}, "one at most"),
        (SECRET, {"a": "x"}, "list of tenants"),
        (SECRET, {"a": ("",)}, "without a name"),
        (SECRET, {"": ("x",)}, "needs a name"),
        (SECRET, {EVERYBODY: ("x",)}, "no list"),
        (SECRET, {"a" * (MAX_TENANT_CHARACTERS + 1): ("x",)}, "at most"),
        (SECRET, {"a": ("x" * (MAX_TENANT_CHARACTERS + 1),)}, "at most"),
    ],
    ids=str,
)
def test_groups_that_cannot_be_are_refused(domain: Domain, groups: Mapping[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Tenants(domain, groups)


@pytest.mark.parametrize("own", ["", "x"])
def test_a_name_that_is_too_long_is_refused(own: str) -> None:
    with pytest.raises(UsageError, match="at most"):
        Tenants(SECRET).namespace("a" * (MAX_TENANT_CHARACTERS + 1), salt=own)


def test_words_that_no_encoder_takes_are_names_all_the_same() -> None:
    assert salt(Tenants(SECRET), "\ud800", "\udfff") != salt(Tenants(SECRET), "\ud801", "\udfff")


# --- counters ----------------------------------------------------------------------------------------------


def node_of(name: str = "a") -> Node:
    node = Node(name, DOMAIN, rng=random.Random(1), now=0.0)
    node.add_endpoint("0", url=f"http://{name}", incarnation=1, now=0.0)
    return node


def rows(node: Node) -> dict[str, TenantStats]:
    return {row.tenant: row for row in node.stats(0.0).tenants}


def test_a_request_without_a_tenant_is_counted_for_nobody() -> None:
    node = node_of()
    node.report(node.route(list(range(BLOCK)), 0.0), Outcome.served(0), 0.1)
    assert node.stats(0.0).tenants == ()


def test_prompts_cached_tokens_and_prefill_are_counted_for_the_tenant() -> None:
    node = node_of()
    tokens = list(range(10 * BLOCK + 5))
    node.apply("a/0", stored(tokens), 0.0)
    decision = node.route(node.chain(tokens), 0.0, tenant="acme")
    second = node.route(prompt(1, 4), 0.0, tenant="acme")
    node.report(decision, Outcome.served(cached_tokens=8 * BLOCK), 0.1)
    node.report(second, Outcome.served(), 0.2)
    node.report(second, Outcome.served(cached_tokens=1), 0.2)
    row = rows(node)["acme"]
    assert (row.requests, row.received, row.forwards, row.declined) == (2, 0, 0, 0)
    assert row.prompt_tokens == len(tokens) + second.prompt_tokens
    assert (row.predicted_tokens, row.cached_tokens) == (10 * BLOCK, 8 * BLOCK)
    assert row.prefill_local_tokens == len(tokens) - 8 * BLOCK + second.prompt_tokens
    assert (row.prefill_received_tokens, row.prefill_forwarded_tokens) == (0, 0)
    # The second one had to wait for the first.
    assert row.expected_wait_s == second.candidates[0].wait_s > 0


def test_a_forward_is_one_request_and_its_prefill_is_counted_where_it_was_done() -> None:
    net = mesh(2)
    here, there = net.nodes["n0"], net.nodes["n1"]
    tokens = prompt(1, 64)
    hold(net, "n1/0", tokens)
    net.run(2.0)
    decision = here.route(tokens, net.now, tenant="acme")
    assert not decision.local
    theirs = there.route(tokens, net.now, forwarded=True, tenant="acme")
    declined = there.route(prompt(2, 64), net.now, forwarded=True, budget_s=0.0, tenant="acme")
    assert declined.declined
    cached = len(tokens) - 7
    for node, one in ((there, theirs), (here, decision)):
        node.report(one, Outcome.served(cached_tokens=cached), net.now)
    mine, other = rows(here)["acme"], rows(there)["acme"]
    assert (mine.requests, mine.forwards, mine.prefill_forwarded_tokens) == (1, 1, 7)
    assert (mine.cached_tokens, mine.prefill_local_tokens, mine.received) == (cached, 0, 0)
    assert (other.received, other.declined, other.requests, other.prefill_received_tokens) == (1, 1, 0, 7)
    assert (other.prompt_tokens, other.cached_tokens, other.prefill_local_tokens) == (0, 0, 0)


def test_what_never_ended_is_forgotten_with_its_flight() -> None:
    node = node_of()
    decisions = [node.route(prompt(i, 4), 0.0, tenant="acme") for i in range(3)]
    node.report(decisions[0], Outcome.cancelled(), 0.1)
    assert len(node._tallies.open) == 3
    node.handle_timer(1.0)
    assert node._tallies.open.keys() == {decisions[1].id, decisions[2].id}
    node.handle_timer(1000.0)
    assert not node._tallies.open
    assert rows(node)["acme"].prefill_local_tokens == 0


def test_beyond_the_bound_tenants_share_a_row() -> None:
    node = node_of()
    for i in range(MAX_TENANTS + 5):
        node.report(node.route([i] * BLOCK, 0.0, tenant=f"t{i}"), Outcome.served(0), 0.0)
    node.route([1] * BLOCK, 0.0, tenant="t3")
    found = rows(node)
    assert len(found) == MAX_TENANTS + 1
    assert (found[OTHER].requests, found["t3"].requests) == (5, 2)
    assert sum(row.prefill_local_tokens for row in found.values()) == (MAX_TENANTS + 5) * BLOCK


def test_tenants_and_their_turns_are_labelled_and_there_only_when_there_are_any() -> None:
    node = Node("a", Domain("m", "t"), rng=random.Random(1), now=0.0)
    node.add_endpoint("0", incarnation=1, now=0.0)
    queue = FairQueue(FairSettings(window_tokens=1))
    before = render(node, 0.0).decode()
    assert not [name for name in ("tenant", "prefixroute_fair") if name in before]
    for i, tenant in enumerate(("acme", 'q"\\', "acme")):
        queue.enter(i, tenant, 100, 0.0)
        node.report(node.route(list(range(100)), 0.0, tenant=tenant), Outcome.served(cached_tokens=16), 0.0)
    text = render(node, 0.0, {"a/0": queue}).decode()
    parsed = {metric.name: metric for metric in text_string_to_metric_families(text)}
    rows = {row.tenant: row for row in node.stats(0.0).tenants}
    for field in TenantStats._fields[1:]:
        name = "expected_wait_seconds" if field == "expected_wait_s" else field
        metric = parsed.pop(f"prefixroute_tenant_{name}")
        assert metric.type == "counter"
        assert metric.documentation.endswith(".")
        shown = {sample.labels["tenant"]: sample.value for sample in metric.samples}
        assert shown == {tenant: getattr(row, field) for tenant, row in rows.items()}
    accounts = {row.tenant: row for row in queue.stats()}
    for field in FairStats._fields[1:]:
        name = "waited_seconds" if field == "waited_s" else field
        metric = parsed.pop(f"prefixroute_fair_{name}")
        assert metric.type == ("gauge" if field in ("held", "held_tokens", "deficit_tokens") else "counter")
        assert {sample.labels["endpoint"] for sample in metric.samples} == {"a/0"}
        shown = {sample.labels["tenant"]: sample.value for sample in metric.samples}
        assert shown == {tenant: getattr(row, field) for tenant, row in accounts.items()}
    assert not [name for name in parsed if "tenant" in name or "fair" in name]
