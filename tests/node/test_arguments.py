"""Wrong arguments: `UsageError` that says what to pass, at the call, and the node is as it was."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from routing import DOMAIN, IDLE, new, prompt

from prefixroute import (
    BlocksStored,
    ContentSpan,
    Domain,
    EngineBatch,
    LoadReport,
    Namespace,
    Node,
    NodeSettings,
    Outcome,
    OutcomeKind,
    PushBackSettings,
    RentOrBuy,
    UsageError,
    Zones,
)

RNG = random.Random(1)


def own(**more: Any) -> Node:
    node = new("a", **more)
    node.add_endpoint("0", incarnation=1, now=0.0)
    node.set_load("a/0", IDLE, 0.0)
    return node


def refuses(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"domain": "m"}, "domain must be of type Domain, not str 'm'"),
        ({"domain": None}, "domain must be of type Domain"),
        ({"domain": Domain}, "not the class Domain itself"),
        ({"rng": None}, "rng must be of type Random"),
        ({"rng": random}, "rng must be of type Random, not module"),
        ({"rng": 5}, "rng must be of type Random"),
        ({"rng": np.random.default_rng(1)}, "rng must be of type Random, not Generator"),
        ({"settings": {}}, "settings must be of type NodeSettings, not dict"),
        ({"settings": PushBackSettings()}, "settings must be of type NodeSettings"),
        ({"policy": "rent"}, "policy must be a policy with a method `choose`"),
        ({"policy": RentOrBuy}, r"policy must be a policy .* as RentOrBuy\(\)"),
        ({"policy": object()}, "policy must be a policy"),
        ({"secrets": 5}, "secrets must be a list"),
        ({"secrets": "abc"}, "secrets must be a list"),
        ({"secrets": ["abc"]}, "a secret must be at most"),
        ({"now": None}, "`now` must be a clock reading"),
        ({"node": 5}, "a name has 1 to 40"),
        ({"node": b"a"}, "a name has 1 to 40"),
    ],
)
def test_a_node_is_not_made_of_it(wrong: dict[str, Any], says: str) -> None:
    given = {"node": "a", "domain": DOMAIN, "rng": RNG, "now": 0.0, **wrong}
    refuses(lambda: Node(**given), says)


WORDS = {"zone": str, "contact": str, "learn_peers": bool}
"""The settings for which some of the values below are right."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in NodeSettings.__dataclass_fields__
        for value in (None, "1", b"1", [1], float("nan"), True, {}, 1j)
        if not (name in WORDS and isinstance(value, WORDS[name]))
    ],
)
def test_a_setting_of_another_type_is_named(name: str, value: Any) -> None:
    refuses(lambda: NodeSettings(**{name: value}), name if name != "zone" else "a zone is a label")


def test_settings_take_ints_and_infinity_where_they_make_sense() -> None:
    assert NodeSettings(interval_s=1, excess=float("inf"), fan_out=np.int64(2)).fan_out == 2  # type: ignore[arg-type]
    assert NodeSettings(zones=Zones(), push_back=PushBackSettings(3, 1, 2)).push_back.enter_s == 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda node: node.apply("a/0", (), 0.0), "batch must be of type EngineBatch, not tuple"),
        (lambda node: node.apply("a/0", None, 0.0), "batch must be of type EngineBatch"),
        (lambda node: node.apply("a/0", BlocksStored((1,), None, [1], 1), 0.0), "batch must be of type EngineBatch"),
        (lambda node: node.apply("a/0", EngineBatch(BlocksStored((1,), None, [1], 1)), 0.0), "events must be of type"),  # type: ignore[arg-type]
        (lambda node: node.apply("a/0", EngineBatch(None), 0.0), "events must be of type"),  # type: ignore[arg-type]
        (lambda node: node.apply(None, EngineBatch(()), 0.0), "is no endpoint of this node: it has"),
        (lambda node: node.apply(["a/0"], EngineBatch(()), 0.0), "is no endpoint of this node"),
        (lambda node: node.set_load("a/0", {"running": 1}, 0.0), "report must be of type LoadReport, not dict"),
        (lambda node: node.set_load("a/0", LoadReport, 0.0), "report must be .* not the class LoadReport itself"),
        (lambda node: node.set_load(0, LoadReport(), 0.0), "is no endpoint of this node"),
        (lambda node: node.load({}, 0.0), "is no endpoint of this node"),
        (lambda node: node.residency(None), "is no endpoint of this node"),
        (lambda node: node.remove_endpoint(None, 0.0), "is no endpoint of this node"),
        (lambda node: node.report(node.route([1], 0.0), "served", 0.0), r"report\(decision, outcome, now\)"),
        (lambda node: node.report(node.route([1], 0.0), OutcomeKind.SERVED, 0.0), r"report\(decision, outcome, now\)"),
        (lambda node: node.report(Outcome.served(), node.route([1], 0.0), 0.0), r"report\(decision, outcome, now\)"),
        (lambda node: node.report(1, Outcome.served(), 0.0), r"report\(decision, outcome, now\)"),
        (lambda node: node.report(None, Outcome.served(), 0.0), r"report\(decision, outcome, now\)"),
        (lambda node: node.report(node.route([1], 0.0), Outcome.served, 0.0), r"report\(decision, outcome, now\)"),
        (lambda node: node.first_token(None, 0.0), "decision must be of type Decision"),
        (lambda node: node.explain("a/0"), "decision must be of type Decision"),
        (lambda node: node.add_endpoint(0, incarnation=1, now=0.0), "a name has 1 to 40"),
        (lambda node: node.add_endpoint("1", url=None, incarnation=1, now=0.0), "url is a text"),
        (lambda node: node.add_endpoint("1", url=b"http://x", incarnation=1, now=0.0), "url is a text"),
        (lambda node: node.add_endpoint("1", incarnation="1", now=0.0), "incarnation must be an int"),
        (lambda node: node.add_endpoint("1", incarnation=True, now=0.0), "incarnation must be an int"),
        (lambda node: node.add_endpoint("1", incarnation=1.5, now=0.0), "incarnation must be an int"),
        (lambda node: node.add_endpoint("1", incarnation=1, now=0.0, credited="gpu"), "credited must be a list of"),
        (lambda node: node.add_endpoint("1", incarnation=1, now=0.0, credited=None), "credited must be a list of"),
        (lambda node: node.add_endpoint("1", incarnation=1, now=0.0, credited=[1]), "credited must be a list of"),
        (lambda node: node.add_peer("b", ["10.0.0.1", 7000], 0.0), "an address must be hashable"),
        (lambda node: node.seed(["10.0.0.1", 7000]), "an address must be hashable"),
        (lambda node: node.add_peer(None, "b", 0.0), "a name has 1 to 40"),
        (lambda node: node.add_peer(["b"], "b", 0.0), "a name has 1 to 40"),
        (lambda node: node.remove_peer(["b"], 0.0), "a name has 1 to 40"),
        (lambda node: node.receive_datagram("text", "b", 0.0), "a datagram must be of type bytes"),
        (lambda node: node.receive_datagram(None, "b", 0.0), "a datagram must be of type bytes"),
        (lambda node: node.set_secrets(None), "secrets must be a list"),
        (lambda node: node.route([1], 0.0, namespace="tenant"), "namespace must be of type Namespace"),
        (lambda node: node.route([1], 0.0, namespace=None), "namespace must be of type Namespace"),
        (lambda node: node.chain([1], namespace=("a", "b")), "namespace must be of type Namespace"),
        (lambda node: node.route([1], 0.0, contents=["image"]), "contents must be a list of ContentSpan"),
        (lambda node: node.route([1], 0.0, contents=[ContentSpan(5, 0)]), "contents must be a list of ContentSpan"),  # type: ignore[arg-type]
        (lambda node: node.route([1], 0.0, contents=[ContentSpan("i", "0")]), "contents must be a list of ContentSpan"),  # type: ignore[arg-type]
        (lambda node: node.route([1], 0.0, contents=5), "contents must be"),
        (lambda node: node.route([1], 0.0, budget_s="5"), "budget_s must be seconds"),
        (lambda node: node.route([1], 0.0, budget_s=float("nan"), forwarded=True), "budget_s must be seconds"),
        (lambda node: node.route([1], 0.0, budget_s=None), "budget_s must be seconds"),
        (lambda node: node.route([1], 0.0, tenant=5), "a tenant's name is a text"),
        (lambda node: node.route([1], 0.0, tenant=["x"]), "a tenant's name is a text"),
        (lambda node: node.limit_datagrams(None), "gossip needs datagrams of at least"),
        (lambda node: Namespace(5), "a namespace is of texts"),  # type: ignore[arg-type]
        (lambda node: Outcome.served(cached_tokens="5"), "cached_tokens must be"),  # type: ignore[arg-type]
        (lambda node: Outcome.served(cached_tokens=True), "cached_tokens must be"),
        (lambda node: Outcome.served(ttft_s="0.1"), "ttft_s must be seconds"),  # type: ignore[arg-type]
        (lambda node: Outcome.served(ttft_s=float("nan")), "ttft_s must be seconds"),
        (lambda node: Outcome.served(load={"running": 1}), "an outcome's load must be of type LoadReport"),  # type: ignore[arg-type]
        (lambda node: Outcome.failed(ValueError("x")), "an outcome's reason is a text"),  # type: ignore[arg-type]
        (lambda node: Outcome("served"), "an outcome's kind must be an OutcomeKind"),  # type: ignore[arg-type]
        (lambda node: LoadReport(running="3"), "LoadReport.running"),  # type: ignore[arg-type]
        (lambda node: LoadReport(running=None), "LoadReport.running"),  # type: ignore[arg-type]
        (lambda node: LoadReport(waiting=True), "LoadReport.waiting"),
        (lambda node: LoadReport(overhead_s=float("nan")), "LoadReport.overhead_s"),
        (lambda node: LoadReport(kv_used="50%"), "LoadReport.kv_used"),  # type: ignore[arg-type]
        (lambda node: LoadReport(reason=None), "LoadReport.reason"),  # type: ignore[arg-type]
        (lambda node: LoadReport(refusing="no"), "LoadReport.refusing"),  # type: ignore[arg-type]
    ],
)
def test_a_call_says_what_to_pass_and_the_node_is_as_it_was(call: Callable[[Any], object], says: str) -> None:
    node = own()
    refuses(lambda: call(node), says)
    in_flight = node.stats(0.0).in_flight
    assert node.route(prompt(1, 3), 0.0).target == "a/0"
    assert node.stats(0.0).in_flight == in_flight + 1
    assert [row.endpoint for row in node.stats(0.0).endpoints] == ["a/0"]
    node._check()


# --- tokens ------------------------------------------------------------------------------------------------

BAD_TOKENS: dict[str, Any] = {
    "a batch of one prompt": [[1, 2, 3]],
    "a batch of long ones": [[1] * 16] * 40,
    "texts": ["a", "b"],
    "a text": "hello",
    "bytes": b"hello",
    "nothing": None,
    "a generator": (i for i in range(40)),
    "a set": {1, 2},
    "a dict": {1: 2},
    "a number": 5,
    "floats": [1.0, 2.0],
    "NaN": [float("nan")],
    "None within": [1, None, 3],
    "negative": [-1],
    "too large": [2**32],
    "padded on the right": [1] * 40 + [-100] * 8,
    "bad after the first block": [1] * 16 + ["x"],
    "a tuple of tuples": ((1, 2),),
    "an array of floats": np.array([1.0, 2.0]),
    "an array of two dimensions": np.array([[1, 2]]),
    "an array of bools": np.array([True, False]),
    "a negative array": np.array([-1, 5]),
    "a wide array": np.array([2**32], dtype=np.int64),
    "an array of objects": np.array([1, None], dtype=object),
    "a number as array": np.array(5),
}


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
@pytest.mark.parametrize("forwarded", [False, True])
def test_tokens_that_are_none_are_refused_at_the_call(tokens: Any, forwarded: bool) -> None:
    node = own()
    refuses(lambda: node.route(tokens, 0.0, forwarded=forwarded), "token")
    assert node.stats(0.0).in_flight == 0
    assert node.stats(0.0).counters.get("decisions_local", 0) == 0
    node._check()


@pytest.mark.parametrize("length", [0, 3, 15, 16, 17, 40])
@pytest.mark.parametrize(
    "kind",
    [list, tuple, deque, np.array, lambda ids: [np.int64(i) for i in ids], lambda ids: [np.uint32(i) for i in ids]],
    ids=["list", "tuple", "deque", "array", "int64", "uint32"],
)
def test_token_ids_in_any_form_are_taken(kind: Callable[[Any], Any], length: int) -> None:
    node = own()
    tokens = range(1, length + 1)
    given = kind(list(tokens)) if length else kind([])
    if isinstance(given, np.ndarray) and not length:
        given = given.astype(np.int64)
    decision = node.route(given, 0.0)
    assert decision.prompt_tokens == length
    node.report(decision, Outcome.served(0, 0.1), 0.0)
    node.apply(
        "a/0",
        EngineBatch((BlocksStored(tuple(range(length // 16)), None, list(tokens)[: length // 16 * 16], 16),)),
        0.0,
    )
    assert node.route(list(tokens), 0.0).matched_tokens == (length - 1) // 16 * 16 * (length > 16)


def test_a_bad_token_amid_a_prompt_harms_nobody_else() -> None:
    """A prompt that nobody holds is not read whole: what is wrong in its middle comes out later, and is counted."""
    node = own()
    start, bad = prompt(1, 1, 0), [*prompt(1, 1, 0), *range(40), -1, *range(40)]
    decision = node.route(bad, 0.0)
    assert node.route([*start, *range(100)], 0.0).target == "a/0", "an honest one that begins alike"
    for i in range(20):
        node.handle_timer(0.1 * i)
    node.report(decision, Outcome.served(0, 0.1), 2.0)
    assert node.counters["prompts_unusable"] == 1
    refuses(lambda: node.chain(bad).key(3), "token ids must be in 0")
    node.apply("a/0", EngineBatch((BlocksStored((1, 2), None, [*start, *range(16)], 16),)), 2.0)
    refuses(lambda: node.route(bad, 2.0), "token ids must be in 0")
    node.handle_timer(3.0)
    node._check()
