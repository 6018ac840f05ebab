"""What an answer carries: missing ranges, steps in order, loads that are lacking, last words; within its budgets."""

from __future__ import annotations

import random

import pytest
from network import DOMAIN, copies
from said import array, sent_by, update_of

from prefixroute import Node, NodeSettings
from prefixroute.keys.keyset import checksum
from prefixroute.replication.wire import (
    KEY_LIMIT,
    LAST_BEAT,
    Envelope,
    Kind,
    LoadWire,
    Update,
    VectorEntry,
    Want,
    decode,
)

KEYS = sorted(random.Random(3).sample(range(KEY_LIMIT), 4000))
LOAD = LoadWire(running=3, prefill_tokens_per_s=8000)


def relay(*updates: Update, age_ms: int = 0, load: LoadWire | None = None, revision: int = 0, **limits: int) -> Node:
    """Node "b", which was told of "a/0" by its owner, and knows "c"."""
    node = Node("b", DOMAIN, rng=random.Random(1), now=0.0, settings=NodeSettings(replay_window=0, **limits))  # type: ignore[arg-type]
    for name in "ac":
        node.add_peer(name, f"at {name}", 0.0)
    word = VectorEntry("a/0", 1, 5, updates[-1].version, age_ms=age_ms, revision=revision, load=load)
    for update in updates:
        node.receive_datagram(sent_by("a", Kind.ACK, vector=[word], updates=[update]), "at a", 0.0)
    assert copies(node)["a/0"].held == (1, updates[-1].version)
    return node


def asked(node: Node, *vector: VectorEntry, complete: bool = False, now: float = 0.0) -> list[Envelope]:
    """What a node answers to the vector of "c"."""
    node.receive_datagram(sent_by("c", Kind.SYN, nonce=7, complete=complete, vector=vector), "at c", now)
    out = node.datagrams_to_send(now)
    assert {datagram.address for datagram in out} == {"at c"}
    assert all(len(datagram.data) <= node.settings.datagram_bytes for datagram in out)
    assert sum(len(datagram.data) for datagram in out) <= node.settings.burst_bytes
    return [decode(datagram.data, DOMAIN.secret) for datagram in out]


def joined(updates: list[Update]) -> list[tuple[int, int]]:
    """The ranges of parts, those that touch put together."""
    ranges: list[tuple[int, int]] = []
    for update in updates:
        upper = update.upper or KEY_LIMIT
        if ranges and ranges[-1][1] == update.lower:
            ranges[-1] = (ranges[-1][0], upper)
        else:
            ranges.append((update.lower, upper))
    return ranges


MISSING = [(0, KEYS[700]), (KEYS[900], KEYS[901]), (KEYS[1500] + 1, KEYS[2600]), (KEYS[3999], KEY_LIMIT)]


def test_a_burst_goes_on_over_all_missing_ranges_and_no_others() -> None:
    answers = asked(relay(update_of("a/0", 1, 0, 2, *KEYS)), VectorEntry("a/0", 1, 5, want=Want(1, 0, 2, MISSING)))
    assert len(answers) > 5
    assert [answer.kind for answer in answers] == [Kind.SYN_ACK] + [Kind.ACK] * (len(answers) - 1)
    assert [answer.message.echo for answer in answers] == [7] + [0] * (len(answers) - 1)
    updates = [update for answer in answers for update in answer.message.updates]
    assert joined(updates) == MISSING


def test_a_burst_ends_with_its_budget_and_goes_on_from_what_is_then_missing() -> None:
    node = relay(update_of("a/0", 1, 0, 2, *KEYS), burst_bytes=4000)
    rest, rounds = list(MISSING), 0
    while rest:
        answers = asked(node, VectorEntry("a/0", 1, 5, want=Want(1, 0, 2, rest)))
        (sent, *more) = joined([update for answer in answers for update in answer.message.updates])
        for lower, upper in (sent, *more):
            assert rest[0][0] == lower
            rest = rest[1:] if rest[0][1] == upper else [(upper, rest[0][1]), *rest[1:]]
        rounds += 1
    assert rounds > 2
    assert node.counters["bursts_cut"] == rounds - 1


def test_steps_go_one_by_one_in_order() -> None:
    steps = [update_of("a/0", 1, 0, 2, *KEYS[:100])]
    for i in range(3):
        total = checksum(array(*KEYS[: 101 + i]))
        steps.append(update_of("a/0", 1, 2 + i, 3 + i, KEYS[100 + i], checksum=total, anchor_stride=4))
    (answer,) = asked(relay(*steps), VectorEntry("a/0", 1, 5, 2))
    assert [(update.since, update.version, update.anchor_stride) for update in answer.message.updates] == [
        (2, 3, 4),
        (3, 4, 4),
        (4, 5, 4),
    ]
    # They are passed on as they came.
    assert [update.added for update in answer.message.updates] == [step.added for step in steps[1:]]


@pytest.mark.parametrize(("age_ms", "owed"), [(1900, 1), (2100, 0), (30000, 0)])
def test_what_is_suspected_is_told_but_not_owed(age_ms: int, owed: int) -> None:
    (answer,) = asked(relay(update_of("a/0", 1, 0, 2, 3, 9), age_ms=age_ms), complete=True)
    assert len(answer.message.updates) == owed
    assert [(entry.endpoint, entry.age_ms) for entry in answer.message.vector] == [("a/0", age_ms)]


@pytest.mark.parametrize(("revision", "load"), [(3, LOAD), (4, None), (5, None)])
def test_a_load_travels_where_its_revision_is_lacking(revision: int, load: LoadWire | None) -> None:
    node = relay(update_of("a/0", 1, 0, 2, 3, 9), load=LOAD, revision=4)
    (answer,) = asked(node, VectorEntry("a/0", 1, 4, 2, copies(node)["a/0"].mark, revision=revision))
    (entry,) = answer.message.vector
    assert (entry.heartbeat, entry.revision, entry.load) == (5, 4, load)
    assert answer.message.updates == []


def test_a_last_word_is_passed_on_to_who_has_not_heard_it_until_it_is_old() -> None:
    node = relay(update_of("a/0", 1, 0, 2, 3, 9))
    node.receive_datagram(sent_by("a", Kind.ACK, vector=[VectorEntry("a/0", 1, LAST_BEAT)]), "at a", 1.0)
    assert "a/0" not in copies(node)
    (answer,) = asked(node, VectorEntry("a/0", 1, 5, 2), now=3.0)
    assert answer.message.vector == [VectorEntry("a/0", 1, LAST_BEAT, age_ms=2000)]
    (answer,) = asked(node, VectorEntry("a/0", 1, LAST_BEAT), now=3.0)
    assert (answer.message.vector, answer.message.updates) == ([], [])
    node.handle_timer(61.1)
    node.datagrams_to_send(61.1)
    (answer,) = asked(node, VectorEntry("a/0", 1, 5, 2), now=61.1)
    assert answer.message.vector == []
    assert "a/0" not in copies(node)
