"""Requests that ask the engine for a report: when, and what becomes of the client's own words."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prefixroute_serving.attach import Attachment, EngineConfig
from prefixroute_serving.attach.kinds import KINDS
from prefixroute_serving.attach.repairs import LONGEST_PAUSE_S, PAUSE_S, Repairs, Reports, asking_for_report
from prefixroute_vllm import REPORT_SESSION, decode_batch

from prefixroute import BlocksStored, Domain, EngineBatch, Node, Residency, StreamGap, StreamRestarted


def partial(residency: Residency) -> Residency:
    residency.apply(EngineBatch((StreamGap(1),)))
    return residency


def taught(residency: Residency, n: int) -> None:
    residency.apply(EngineBatch((BlocksStored((n,), None, tuple(range(n, n + 16)), 16, confirmed=True),)))


def test_only_a_partial_residency_is_repaired() -> None:
    repairs, residency = Repairs(), Residency(Domain("m", "t"))
    assert not repairs.due("n/0", residency, 0.0)
    partial(residency)
    assert repairs.due("n/0", residency, 0.0)
    residency.apply(EngineBatch((StreamRestarted(),)))
    assert not repairs.due("n/0", residency, 99.0)
    assert repairs.asked == 1


def test_one_request_in_a_while_asks_and_each_endpoint_has_its_own() -> None:
    repairs, one, two = Repairs(), partial(Residency(Domain("m", "t"))), partial(Residency(Domain("m", "t")))
    assert repairs.due("n/0", one, 0.0)
    assert not repairs.due("n/0", one, 0.9 * PAUSE_S)
    assert repairs.due("n/1", two, 0.9 * PAUSE_S)
    assert repairs.due("n/0", one, PAUSE_S)


def test_reports_that_tell_nothing_are_asked_for_less_and_less() -> None:
    repairs, residency = Repairs(), partial(Residency(Domain("m", "t")))
    now, asked = 0.0, []
    while now < 1000.0:
        if repairs.due("n/0", residency, now):
            asked.append(now)
        now += 0.5
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert set(pauses[6:]) == {LONGEST_PAUSE_S}
    taught(residency, 1)
    assert repairs.due("n/0", residency, asked[-1] + LONGEST_PAUSE_S)
    assert repairs.due("n/0", residency, asked[-1] + LONGEST_PAUSE_S + PAUSE_S), "one that told something pays"


def test_a_new_gap_is_repaired_at_once() -> None:
    repairs, residency = Repairs(), partial(Residency(Domain("m", "t")))
    assert [repairs.due("n/0", residency, now) for now in (0.0, 1.0, 3.0, 4.0)] == [True, True, True, False]
    partial(residency)
    assert [repairs.due("n/0", residency, now) for now in (4.0, 4.5, 5.0)] == [True, False, True]


# --- the request -------------------------------------------------------------------------------------------


def test_the_clients_own_words_stay() -> None:
    body = b'{"prompt": [1,2], "temperature": 0.10, "vllm_xargs": {"mine": 123456789012345678901}}'
    asked = asking_for_report([("a", "b")], body, 7)
    assert asked is not None
    assert json.loads(asked) == {
        "prompt": [1, 2],
        "temperature": 0.1,
        "session_id": f"{REPORT_SESSION}-7",
        "vllm_xargs": {"mine": 123456789012345678901, "kv_cache_report_mode": "full"},
    }
    assert b"0.10" in asked
    for null in (b'{"prompt": "x"}', b'{"prompt": "x", "vllm_xargs": null}'):
        asked = asking_for_report([], null, 1)
        assert asked is not None and json.loads(asked)["vllm_xargs"] == {"kv_cache_report_mode": "full"}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([], b'{"session_id": "mine"}'),
        ([], b'{"vllm_xargs": {"session_id": "mine"}}'),
        ([("x-session-id", "mine")], b"{}"),
        ([], b'{"vllm_xargs": "nonsense"}'),
    ],
)
def test_a_request_with_a_session_of_its_own_is_left_alone(headers: list[tuple[str, str]], body: bytes) -> None:
    assert asking_for_report(headers, body, 1) is None


def test_a_request_is_marked_when_it_is_due_and_the_engine_can() -> None:
    node = Node("n", Domain("m", "t"), rng=random.Random(0), now=0.0)
    engine = Attachment(node, EngineConfig(url="http://e"), "", 0.0)
    engine._driver = SimpleNamespace(now=lambda: 5.0)  # type: ignore[assignment]
    node.apply("n/0", EngineBatch((StreamGap(1),)), 0.0)
    assert engine.aimed("n/0", [], b"{}")[1] == b"{}", "it is not known to report"
    engine._reports = KINDS["vllm"].reports
    assert isinstance(engine._reports, Reports)
    assert b"kv_cache_report_mode" in engine.aimed("n/0", [], b"{}")[1]
    assert engine.aimed("n/0", [], b"{}")[1] == b"{}", "not so soon again"
    assert KINDS["sglang"].reports is None


# --- the event ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("session", "parent", "confirmed"),
    [
        (f"{REPORT_SESSION}-7", None, True),
        (f"{REPORT_SESSION}-7", 5, False),  # stored by the same request, below what it reused
        ("a client's", None, False),
        (None, None, False),
        (17, None, False),
    ],
)
def test_a_report_is_known_by_its_session(session: Any, parent: int | None, confirmed: bool) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": parent, "token_ids": list(range(16))}
    event |= {"block_size": 16, "medium": "GPU", "session_id": session}
    (stored,) = decode_batch(msgspec.msgpack.encode([1.0, [event], 0])).events
    assert isinstance(stored, BlocksStored)
    assert stored.confirmed is confirmed
