"""Rubbish from adapters: counted, told once, never raised; good events beside it count, and it is exact no more."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from routing import new, prompt

from prefixroute import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    EngineBatch,
    Node,
    ResidencyChanged,
    StreamGap,
    UnknownEvent,
    metrics,
)
from prefixroute.endpoint.intake import fault_in, taken_in
from prefixroute.testing import stored

TOKENS = list(range(32))
GOOD = stored(prompt(1, 4)).events[0]


def a_store(**wrong: Any) -> BlocksStored:
    return BlocksStored(**{"handles": (7, 8), "parent": None, "tokens": TOKENS, "block_size": 16, **wrong})


RUBBISH: dict[str, Any] = {
    "too few tokens": a_store(tokens=TOKENS[1:]),
    "too many tokens": a_store(tokens=[*TOKENS, 1]),
    "another block size": a_store(block_size=8),
    "no block size": a_store(block_size=0),
    "a negative block size": a_store(block_size=-16),
    "block size as text": a_store(block_size="16"),
    "block size as a float": a_store(block_size=16.0),
    "tokens as text": a_store(tokens="x" * 32),
    "tokens as texts": a_store(tokens=["x"] * 32),
    "no tokens": a_store(tokens=None),
    "negative tokens": a_store(tokens=[-1] * 32),
    "large tokens": a_store(tokens=[2**32] * 32),
    "tokens as floats": a_store(tokens=[0.5] * 32),
    "tokens as a generator": a_store(tokens=(i for i in range(32))),
    "one None among the tokens": a_store(tokens=[*TOKENS[1:], None]),
    "handles as text": a_store(handles="ab"),
    "one handle": a_store(handles=7),
    "no handles": a_store(handles=None),
    "None among the handles": a_store(handles=(7, None)),
    "lists among the handles": a_store(handles=(7, [8])),
    "a parent that is a list": a_store(parent=[7]),
    "a parent that is a text": a_store(parent="7"),
    "a tier that is none": a_store(tier=None),
    "a group that is a text": a_store(group="0"),
    "a namespace that is a text": a_store(namespace="lora"),
    "contents that are texts": a_store(contents=("image",)),
    "a window that is none": a_store(window=None),
    "a removal of a text": BlocksRemoved("ab"),  # type: ignore[arg-type]
    "a removal of nothing": BlocksRemoved(None),  # type: ignore[arg-type]
    "a removal of lists": BlocksRemoved(([1],)),  # type: ignore[arg-type]
    "a removal from a list": BlocksRemoved((1,), tier=["gpu"]),  # type: ignore[arg-type]
    "a removal told so often": BlocksRemoved((1,), told="2"),  # type: ignore[arg-type]
    "a clear of a number": BlocksCleared(5),  # type: ignore[arg-type]
    "a gap of a text": StreamGap("7"),  # type: ignore[arg-type]
    "a dict": {"type": "BlockStored"},
    "a text": "BlockStored",
    "None": None,
    "a class": BlocksStored,
    "a batch": EngineBatch(()),
}


def own() -> Node:
    node = new("a")
    node.add_endpoint("0", incarnation=1, now=0.0)
    return node


def state(node: Node) -> str:
    return node.stats(0.0).endpoints[0].residency


@pytest.mark.parametrize("event", RUBBISH.values(), ids=RUBBISH)
@pytest.mark.parametrize("place", [0, 1])
def test_rubbish_is_counted_and_told_and_costs_its_siblings_nothing(event: Any, place: int) -> None:
    node = own()
    node.apply("a/0", stored(prompt(2, 3)), 0.0)
    events: list[Any] = [GOOD]
    events.insert(place, event)
    for _ in range(3):
        node.apply("a/0", EngineBatch(tuple(events)), 0.0)
    assert node.stats(0.0).counters["engine_events_unusable"] == 3
    assert b'prefixroute_engine_events_unusable_total{node="a"} 3.0' in metrics.render(node, 0.0)
    told = [event for event in node.events() if isinstance(event, ResidencyChanged)]
    assert [event.state for event in told] == ["faulty", "partial"]
    assert told[0].reason.startswith("an event of the adapter cannot be used: ")
    assert state(node) == "partial"
    assert node.residency("a/0").confidence < 1
    assert node.residency("a/0").canonical_blocks == 7
    assert node.route(prompt(1, 4), 0.0).matched_tokens == 64
    node._check()


def test_doubt_ends_as_after_any_gap() -> None:
    node = own()
    node.apply("a/0", EngineBatch((None,)), 0.0)  # type: ignore[arg-type]
    assert state(node) == "partial"
    node.apply("a/0", EngineBatch((BlocksCleared(),)), 0.0)
    assert state(node) == "exact"


def test_events_that_an_adapter_does_not_know_are_counted_apart_and_doubt_nothing() -> None:
    node = own()
    node.apply("a/0", EngineBatch((UnknownEvent("NewKind"), UnknownEvent("NewKind"))), 0.0)
    assert node.counters["engine_events_unknown"] == 2
    assert node.counters["engine_events_unusable"] == 0
    assert state(node) == "exact"


@pytest.mark.parametrize(
    "event",
    [
        GOOD,
        a_store(tokens=()),
        a_store(tokens=TOKENS[1:], mappable=False),
        a_store(tokens=TOKENS[1:], group_kind="sliding_window"),
        a_store(tokens=tuple(TOKENS)),
        a_store(tokens=np.arange(32)),
        a_store(handles=[7, 8]),
        a_store(handles=(np.int64(7), b"8")),
        a_store(parent=b"6", contents=(ContentSpan("i", 3),)),
        a_store(handles=(), tokens=()),
        BlocksRemoved((b"1", 2)),
        BlocksCleared(None),
        StreamGap(),
        UnknownEvent("x"),
    ],
    ids=repr,
)
def test_what_an_engine_may_say_is_sound(event: Any) -> None:
    assert fault_in(event) == ""
    batch = EngineBatch((event,))
    assert taken_in(batch).batch is batch


@pytest.mark.parametrize("ts", [None, "now", float("nan")])
def test_a_batch_without_a_time_is_taken(ts: Any) -> None:
    node = own()
    node.apply("a/0", EngineBatch((GOOD,), 0, ts), 0.0)
    assert node.residency("a/0").canonical_blocks == 4
    assert state(node) == "exact"


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_an_adapter_says_raises(seed: int) -> None:
    """Events with fields drawn from all kinds of values, over a mirror that is checked after each."""
    rng = random.Random(seed)
    node = own()
    values: list[Any] = [
        None,
        0,
        16,
        -1,
        2**70,
        1.5,
        "x",
        b"x",
        (),
        (1, 2),
        [3],
        (None,),
        {},
        TOKENS,
        float("nan"),
        object(),
    ]
    for _ in range(60):
        kind = rng.choice((BlocksStored, BlocksRemoved, BlocksCleared, StreamGap, UnknownEvent))
        fields = kind.__dataclass_fields__
        given = {name: rng.choice(values) for name in fields if rng.random() < 0.3}
        for name, good in (
            ("handles", (rng.randrange(9), rng.randrange(9))),
            ("parent", None),
            ("tokens", TOKENS),
            ("block_size", 16),
            ("tag", "t"),
        ):
            if name in fields:
                given.setdefault(name, good)
        node.apply("a/0", EngineBatch((kind(**given),)), 0.0)
        node._check()
    node.handle_timer(0.0)
