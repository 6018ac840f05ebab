"""A sidecar's attachment to its engine, without sockets: ranks that come and go, silence, refusals, readings anew."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import httpx
import prefixroute_vllm
import pytest
from prefixroute_serving.attach import ENGINE_KINDS, Attachment, EngineConfig, ranks
from prefixroute_serving.attach import attachment as attach
from prefixroute_serving.attach.kinds import KINDS, RANK_FIELD, RANK_HEADER, LoadPush, by_field, by_header
from prefixroute_zmq import EventSource
from sidecar_pair import until

from prefixroute import Domain, LoadReport, Node, Outcome
from prefixroute.errors import UsageError
from prefixroute.events import BlocksStored, EngineBatch, ResidencyChanged, StreamRestarted

NOBODY = "http://127.0.0.1:1"
"""Where no engine listens."""


class Clock:
    """A driver that only tells the time."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wake(self) -> None:
        """Nothing sleeps here."""


class Quiet:
    """A follower that is handed what to say. Its class remembers those that were made."""

    made: list[Quiet]

    engine = prefixroute_vllm.ENGINE

    def __init__(self, source: EventSource, on_batch: Callable[..., None]) -> None:
        self.source, self.say, self.finished, self.resyncs = source, on_batch, 0, 0
        self.connected, self.runs, self.silent = True, False, False
        self.made.append(self)

    async def run(self) -> None:
        if self.source.topic == "unusable":
            raise UsageError("cannot connect")
        self.runs = True
        try:
            await asyncio.Event().wait()
        finally:
            self.runs = False

    def stats(self) -> Quiet:
        return self

    def _asdict(self) -> dict[str, Any]:
        return {"silent": self.silent}

    def resync(self) -> None:
        self.resyncs += 1

    def note_finished(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.finished += 1


def source(rank: int, topic: str = "") -> EventSource:
    return EventSource(rank=rank, topic=topic, discovered=True)


class Desk:
    """An attachment with fakes all around it: what the engine tells is said by the test, and may be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sources: list[EventSource], **changes: Any) -> None:
        self.events = type("Events", (Quiet,), {"made": []})
        self.loads = type("Loads", (Quiet,), {"made": []})
        self.polled: dict[int, LoadReport] = {}
        self.told: list[EventSource] | UsageError = sources
        self.loads_told = sources
        self.asked = self.reads = 0
        probe = SimpleNamespace(read_all=self._read)
        push = LoadPush(self._discover_load, self.loads)
        kind = KINDS["sglang"]._replace(
            discover=self._discover, follower=self.events, probe=lambda *_, **__: probe, push=push
        )
        monkeypatch.setattr(attach, "KINDS", {"sglang": kind})
        self.clock = Clock()
        config = EngineConfig(url=NOBODY, kind="sglang", load_probe_s=0.001, prefill_tokens_per_s=700, **changes)
        self.node = Node("n", Domain(model="m", tokenizer="t"), rng=random.Random(0), now=100.0)
        self.engine = Attachment(self.node, config, "http://me", 100.0)
        self.taken: dict[str, LoadReport] = {}
        set_load = self.node.set_load

        def take(endpoint: str, load: LoadReport, now: float) -> None:
            self.taken[endpoint] = load
            set_load(endpoint, load, now)

        monkeypatch.setattr(self.node, "set_load", take)

    async def _read(self) -> dict[int, LoadReport]:
        self.reads += 1
        return self.polled

    async def _discover(self, *_: object, **__: object) -> list[EventSource]:
        self.asked += 1
        if isinstance(self.told, UsageError):
            raise self.told
        return list(self.told)

    async def _discover_load(self, *_: object, **__: object) -> list[EventSource]:
        return list(self.loads_told)

    def running(self) -> list[EventSource]:
        """The sources that are followed now."""
        return [follower.source for follower in self.events.made if follower.runs]

    def states(self) -> dict[str, str]:
        """What each endpoint's blocks are known from."""
        return {row.endpoint: row.residency for row in self.node.stats(100.0).endpoints}

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with httpx.AsyncClient() as client:
                self.engine.connect(client, self.clock)  # type: ignore[arg-type]
                tasks = [asyncio.create_task(work) for work in self.engine.work()]
                try:
                    await test()
                    assert not [task for task in tasks if task.done() and task.exception()]
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(main())


def test_the_table_and_the_configuration_know_the_same_kinds() -> None:
    assert tuple(KINDS) == ENGINE_KINDS


def test_endpoints_are_the_ranks_that_the_engine_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(2), source(3)])
    assert desk.engine.endpoints == {"n/0": 0}, "the node can serve before the engine tells"

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        assert desk.engine.endpoints == {"n/2": 2, "n/3": 3}
        assert [row.endpoint for row in desk.node.stats(100.0).endpoints] == ["n/2", "n/3"]
        tokens = tuple(range(32))
        stored = BlocksStored(handles=(1, 2), parent=None, tokens=tokens, block_size=16)
        desk.events.made[1].say(EngineBatch((stored,), rank=3))
        assert desk.node.residency("n/3").canonical_blocks == 2
        assert desk.node.residency("n/2").canonical_blocks == 0
        desk.engine.answered("n/3", 200, 9)
        assert [follower.finished for follower in desk.events.made] == [0, 1]

    desk.run(test)


def test_a_stream_in_trouble_is_complained_about_once_until_it_is_well_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(monkeypatch, [source(0)])

    async def looked_at_again(reads: int) -> None:
        await until(lambda: desk.reads > reads + 5)

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 1)
        for times in (1, 2):
            desk.events.made[0].silent = True
            await looked_at_again(desk.reads)
            assert caplog.text.count("n/0: the engine has served many long prompts") == times
            desk.events.made[0].silent = False
            await looked_at_again(desk.reads)

    desk.run(test)


def test_loads_that_are_pushed_and_asked_for_reach_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0), source(1)])

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        assert not desk.loads.made, "an engine that is not up cannot tell where it pushes"
        desk.polled = {0: LoadReport(running=1), 1: LoadReport(running=2, prefill_tokens_per_s=50.0), 7: LoadReport()}
        await until(lambda: len(desk.loads.made) == 2)
        assert desk.taken["n/0"].prefill_tokens_per_s == 700
        assert desk.taken["n/1"].prefill_tokens_per_s == 50
        desk.polled = {}
        desk.loads.made[1].say(1, LoadReport(capacity_tokens=640))
        assert (desk.taken["n/0"].capacity_tokens, desk.taken["n/1"].capacity_tokens) == (0, 640)

    desk.run(test)


def test_a_refusal_counts_for_its_rank_until_it_serves_or_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0), source(1)])

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        desk.polled = {0: LoadReport(), 1: LoadReport()}
        await until(lambda: len(desk.taken) == 2)
        for end in ("served", "time"):
            desk.engine.answered("n/1", 503, 9)
            await until(lambda: desk.taken["n/1"].refusing)
            assert not desk.taken["n/0"].refusing
            if end == "served":
                desk.engine.answered("n/1", 500, 9)
                desk.taken.clear()
                await until(lambda: len(desk.taken) == 2)
                assert desk.taken["n/1"].refusing
                desk.engine.answered("n/1", 200, 9)
            else:
                desk.clock.at += 1.1
            await until(lambda: not desk.taken["n/1"].refusing)

    desk.run(test)


def test_a_rank_that_cannot_be_followed_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(monkeypatch, [source(0, "unusable"), source(1)])

    async def test() -> None:
        await until(lambda: "cannot connect" in caplog.text)
        assert set(desk.engine.endpoints) == {"n/0", "n/1"}

    desk.run(test)


@pytest.mark.parametrize("silence", [UsageError("start it with events"), []], ids=["raised", "no source"])
def test_an_engine_that_says_it_publishes_nothing_is_served_by_history_until_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silence: Any
) -> None:
    desk = Desk(monkeypatch, silence)
    monkeypatch.setattr(ranks, "ASK_AGAIN_S", 0.001)
    prompt = list(range(33))

    async def test() -> None:
        await until(lambda: desk.asked > 3)
        assert desk.states() == {"n/0": "silent"}
        told = [event for event in desk.node.events() if isinstance(event, ResidencyChanged)]
        assert [event.state for event in told] == ["silent"]
        option = "start it with"
        assert option in told[0].reason
        assert caplog.text.count(option) == 1, "it is asked again and again, and said once"
        for matched in (0, 32):  # one served prompt is enough
            decision = desk.node.route(prompt, 100.0)
            assert decision.matched_tokens == matched
            desk.node.report(decision, Outcome.served(), 100.0)
        desk.told = [source(0)]
        await until(lambda: len(desk.running()) == 1)
        assert desk.states() == {"n/0": "silent"}, "until it speaks"
        desk.events.made[0].say(EngineBatch((BlocksStored((1,), None, tuple(range(90, 106)), 16),)))
        assert desk.states() == {"n/0": "exact"}
        assert desk.node.route(prompt, 100.0).matched_tokens == 0

    desk.run(test)


def test_an_engine_that_cannot_tell_is_asked_again_and_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(monkeypatch, [replace_discovered(source(0))])
    monkeypatch.setattr(ranks, "ASK_AGAIN_S", 0.001)

    async def test() -> None:
        await until(lambda: desk.asked > 3)
        assert desk.states() == {"n/0": "exact"}
        assert caplog.text.count("give engine.events") == 1
        desk.told = [source(0)]
        await until(lambda: len(desk.running()) == 1)

    desk.run(test)


def stored_at(rank: int) -> EngineBatch:
    return EngineBatch((BlocksStored((1, 2), None, tuple(range(32)), 16),), rank)


def test_an_engine_that_comes_back_with_other_ranks_and_ports_is_followed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch, [source(0), source(1)])
    blocks = {"n/0": 2, "n/1": 2}

    def held() -> dict[str, int]:
        return {row.endpoint: row.blocks for row in desk.node.stats(100.0).endpoints}

    async def test() -> None:
        await until(lambda: len(desk.running()) == 2)
        for rank, follower in enumerate(desk.events.made):
            follower.say(stored_at(rank))
        assert held() == blocks
        moved = source(1)._replace(endpoint="tcp://*:7000")
        desk.told = [source(0), moved, source(2)]
        desk.events.made[0].say(EngineBatch((StreamRestarted(),)))
        await until(lambda: set(desk.running()) == {source(0), moved, source(2)})
        assert len(desk.events.made) == 4, "what has not changed is followed on"
        assert held() == {"n/0": 0, "n/1": 0, "n/2": 0}, "a new stream begins with a replay of all"
        desk.events.made[2].say(stored_at(1))
        desk.told = [moved]
        desk.events.made[2].say(EngineBatch((StreamRestarted(),), 1))
        await until(lambda: desk.running() == [moved])
        assert desk.engine.endpoints == {"n/1": 1}
        desk.told = [source(0), moved]
        desk.events.made[2].say(EngineBatch((StreamRestarted(),), 1))
        await until(lambda: set(desk.running()) == {source(0), moved})
        assert set(held()) == {"n/0", "n/1"}, "a rank may come back"
        desk.node._check()

    desk.run(test)


def test_it_is_asked_when_a_stream_is_not_connected_and_when_the_engine_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch, [source(0)])

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        asked = desk.asked
        desk.polled = {0: LoadReport()}
        await until(lambda: desk.asked == asked + 1)
        desk.polled = {}
        await until(lambda: not desk.engine._up)
        desk.polled = {0: LoadReport(running=1)}
        await until(lambda: desk.asked == asked + 2)
        await until(lambda: desk.taken["n/0"].running == 1)
        assert len(desk.loads.made) <= 2
        monkeypatch.setattr(ranks, "ASK_AGAIN_S", 0.001)
        desk.polled = {}  # wakes the wait, which then takes the shorter time
        await until(lambda: not desk.engine._up)
        desk.polled = {0: LoadReport()}
        await until(lambda: desk.asked == asked + 3)
        reads = desk.reads
        await until(lambda: desk.reads > reads + 20)
        assert desk.asked == asked + 3, "connected: nothing to ask"
        desk.events.made[0].connected = False
        await until(lambda: desk.asked > asked + 6)
        assert len(desk.events.made) == 1, "it told the same: nothing changes"
        desk.told = UsageError("events are off now")
        await until(lambda: not desk.running())
        assert desk.states() == {"n/0": "silent"}

    desk.run(test)


def test_an_engine_that_is_gone_refuses_and_one_that_is_slow_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0)])

    async def slow() -> bool:
        asked.append(True)
        return False

    asked: list[bool] = []

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        assert not desk.taken, "one that is starting is no engine that was lost"
        desk.polled = {0: LoadReport(running=1)}
        await until(lambda: "n/0" in desk.taken)
        with monkeypatch.context() as patch:
            patch.setattr(desk.engine, "_gone", slow)
            desk.polled = {}
            await until(lambda: len(asked) > 1)
            assert not desk.taken["n/0"].refusing
        await until(lambda: desk.taken["n/0"].refusing)
        assert desk.taken["n/0"].reason == attach.GONE
        desk.polled = {0: LoadReport()}
        await until(lambda: not desk.taken["n/0"].refusing)

    desk.run(test)


def test_what_was_guessed_of_an_engine_without_events_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [])

    async def test() -> None:
        desk.polled = {0: LoadReport(running=1)}
        await until(lambda: desk.states() == {"n/0": "silent"} and "n/0" in desk.taken)
        desk.node.report(desk.node.route(list(range(33)), 100.0), Outcome.served(), 100.0)
        assert desk.node.residency("n/0").canonical_blocks == 2
        desk.polled = {}
        await until(lambda: desk.node.residency("n/0").canonical_blocks == 0)
        assert desk.states() == {"n/0": "silent"}

    desk.run(test)


def test_a_socket_of_this_nodes_own_is_not_taken_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    connects = source(0)._replace(endpoint="tcp://127.0.0.1:5557")
    desk = Desk(monkeypatch, [connects])

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        desk.told = [connects._replace(bind=True)]  # somebody listens there: this node
        desk.events.made[0].say(EngineBatch((StreamRestarted(),)))
        await until(lambda: desk.asked > 1)
        desk.told = [source(1)]
        desk.events.made[0].say(EngineBatch((StreamRestarted(),)))
        await until(lambda: desk.running() == [source(1)])
        assert len(desk.events.made) == 2

    desk.run(test)


def test_a_stream_that_lost_removals_is_read_anew_once_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0)])

    def lose(first: int) -> None:
        """Three blocks in a cache of two."""
        handles = tuple(range(first, first + 3))
        desk.events.made[0].say(EngineBatch((BlocksStored(handles, None, tuple(range(first, first + 48)), 16),)))

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        desk.polled = {0: LoadReport(capacity_tokens=32)}
        await until(lambda: desk.taken.get("n/0", LoadReport()).capacity_tokens == 32)
        lose(100)
        follower = desk.events.made[0]
        assert follower.resyncs == 1
        assert desk.states() == {"n/0": "partial"}
        follower.say(EngineBatch((StreamRestarted(),)))
        assert desk.states() == {"n/0": "exact"}
        lose(200)
        assert follower.resyncs == 1, "not again so soon"
        desk.clock.at += attach.RESYNC_PAUSE_S
        follower.say(EngineBatch((StreamRestarted(),)))
        lose(300)
        assert follower.resyncs == 2
        (row,) = desk.node.stats(desk.clock.at).endpoints
        assert row.inflated == 3

    desk.run(test)


def replace_discovered(one: EventSource) -> EventSource:
    return one._replace(discovered=False)


def test_configured_events_need_no_answer_and_name_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [], events="tcp://*:5557", replay="tcp://*:5567", topic="kv", ranks=2, bind=True)

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        first, second = (follower.source for follower in desk.events.made)
        assert (first.endpoint, first.replay_endpoint, first.rank) == ("tcp://*:5557", "tcp://*:5567", 0)
        assert (second.endpoint, second.replay_endpoint, second.rank) == ("tcp://*:5558", "tcp://*:5568", 1)
        assert first.bind is second.bind is True
        assert (first.topic, first.host) == ("kv", "127.0.0.1")

    desk.run(test)


def test_a_request_names_its_rank_as_the_engine_wants_it() -> None:
    headers, body = by_header([("a", "b"), (RANK_HEADER, "9")], b"{}", 1)
    assert (headers, body) == ([("a", "b"), (RANK_HEADER, "1")], b"{}")
    body = b'{"prompt": [1,2], "seed": 123456789012345678901234567890, "temperature": 0.10, "routed_dp_rank": 7}'
    headers, aimed = by_field([("a", "b")], body, 1)
    assert headers == [("a", "b")]
    assert json.loads(aimed) == {**json.loads(body), RANK_FIELD: 1}
    assert b"123456789012345678901234567890" in aimed
    assert b"0.10" in aimed


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_an_engine_with_one_rank_need_not_know_the_word(kind: str) -> None:
    node = Node("n", Domain(model="m", tokenizer="t"), rng=random.Random(0), now=0.0)
    engine = Attachment(node, EngineConfig(url="http://e", kind=kind), "", 0.0)
    assert engine.aimed("n/0", [("a", "b")], b"{}") == ([("a", "b")], b"{}")
