"""Whose message it is: whole topics, several publishers on one socket, and streams from which nothing comes."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import prefixroute_sglang
import prefixroute_vllm
import pytest
import zmq
from prefixroute_streams.silence import LONG_PROMPT_TOKENS, Silence
from prefixroute_streams.topics import MOST_TOPICS, OTHER, TopicFilter, matches
from prefixroute_streams.trouble import MIXED_FROM, troubles
from prefixroute_zmq import EventSource
from prefixroute_zmq.follow import StreamFollower
from publishing import Publisher, Seen, engine, free_port, payload, run, running, until


@pytest.fixture(params=[prefixroute_vllm, prefixroute_sglang], ids=["vllm", "sglang"])
def adapter(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- the filter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "topic", "right"),
    [
        ("", "", True),
        ("", "kv@n1@m", True),
        ("kv@n1", "kv@n1", True),
        ("kv@n1", "kv@n1@m", True),
        ("kv@n1", "kv@n10@m", False),
        ("kv@n1", "kv@n1-canary@m", False),
        ("kv@n1", "kv@n1.local@m", False),
        ("kv@10.0.0.1", "kv@10.0.0.1:8000@m", True),
        ("kv@10.0.0.1", "kv@10.0.0.10:8000@m", False),
        ("kv@", "kv@n10@m", True),
        ("kv@n1@m", "kv@n1", False),
        ("kv@n1@m", "kv@n1@m2", False),
        ("kv@n1@m", "", False),
    ],
)
def test_a_topic_is_compared_whole(wanted: str, topic: str, right: bool) -> None:
    assert matches(wanted.encode(), topic.encode()) is right


def test_the_first_topic_that_matches_is_the_streams_until_its_publisher_is_gone() -> None:
    topics = TopicFilter("kv@n1")
    assert not topics.admits(b"kv@n10@m")
    assert topics.admits(b"kv@n1@m")
    assert not topics.admits(b"kv@n1@other")
    assert topics.admits(b"kv@n1@m")
    topics.forget()
    assert topics.admits(b"kv@n1@other")
    assert topics.foreign == {"kv@n10@m": 1, "kv@n1@other": 1}


def test_topics_of_a_stranger_are_counted_in_bounded_memory() -> None:
    topics = TopicFilter("mine")
    for i in range(3 * MOST_TOPICS):
        assert not topics.admits(b"\xff%d" % i)
    assert len(topics.foreign) == MOST_TOPICS + 1
    assert topics.foreign[OTHER] == 2 * MOST_TOPICS
    assert sum(topics.foreign.values()) == 3 * MOST_TOPICS


@contextlib.asynccontextmanager
async def bound(follower: StreamFollower) -> AsyncIterator[None]:
    """Run a follower that binds. Who connects to a free port before that may be connected to herself."""
    async with running(follower):
        await until(lambda: follower._sockets is not None)
        yield


# --- several engines at one socket -------------------------------------------------------------------------


def test_of_two_engines_at_one_bound_socket_only_the_wanted_one_is_applied(adapter: Any) -> None:
    """Fifty batches of each, in turn: `kv@n10@m` passes ZeroMQ's filter for `kv@n1` (kthena#1527)."""

    async def test() -> None:
        port = free_port()
        seen = Seen()
        follower = adapter.Follower(EventSource(f"tcp://127.0.0.1:{port}", topic="kv@n1"), seen)
        theirs = f"tcp://127.0.0.1:{port}"
        own_engine = engine(theirs, bind=False, topic=b"kv@n1@m")
        other = engine(theirs, bind=False, topic=b"kv@n10@m")
        async with bound(follower), own_engine as own, other as foreign:
            for publisher in (foreign, own):
                assert await publisher.pub.recv() == b"\x01kv@n1"
            await until(lambda: follower.stats().publishers == 2)
            for i in range(50):
                await foreign.publish(payload(7, i))
                await own.publish(payload(0, i))
            await until(lambda: follower.stats().messages == 100)
            # Whoever connects second may be the own engine that came back: without replays that is a gap.
            await until(lambda: "49" in seen)
            assert [word for word in seen if word != "G0"] == [str(i) for i in range(50)]
            stats = follower.stats()
        assert (stats.restarts, stats.missing) == (0, 0)
        assert stats.foreign_topics == {"kv@n10@m": 50}
        assert (stats.publishers, stats.mixed) == (2, 0)
        (told,) = troubles(stats._asdict())
        assert told.harmless
        assert "'kv@n10@m' (50)" in told.what

    run(test)


def test_two_engines_under_one_topic_are_complained_about(adapter: Any) -> None:
    async def test() -> None:
        port = free_port()
        theirs = f"tcp://127.0.0.1:{port}"
        follower = adapter.Follower(EventSource(theirs), lambda _: None)
        async with bound(follower), engine(theirs, bind=False) as one, engine(theirs, bind=False) as two:
            await one.subscribed()
            await two.subscribed()
            await until(lambda: follower.stats().publishers == 2)
            for seq in range(4):
                for life, publisher in enumerate((one, two)):
                    before = follower.stats().messages
                    await publisher.publish(payload(life, seq))
                    await until(lambda before=before: follower.stats().messages == before + 1)
            stats = follower.stats()
        assert stats.mixed >= MIXED_FROM
        assert [told.kind for told in troubles(stats._asdict())] == ["mixed"]

    run(test)


def test_an_engine_that_comes_back_under_another_topic_is_followed(adapter: Any) -> None:
    async def test() -> None:
        port = free_port()
        theirs = f"tcp://127.0.0.1:{port}"
        seen = Seen()
        follower = adapter.Follower(EventSource(theirs), seen)
        async with bound(follower):
            async with engine(theirs, bind=False, topic=b"kv@a@m") as first:
                assert await first.pub.recv() == b"\x01"
                await first.publish(payload(0, 0))
                await seen.until(0)
            await until(lambda: follower.stats().publishers == 0)
            async with engine(theirs, bind=False, topic=b"kv@b@m") as second:
                assert await second.pub.recv() == b"\x01"
                await second.publish(payload(1, 0))
                await until(lambda: "100" in seen)
        assert follower.stats().foreign_topics == {}

    run(test)


def test_a_replay_of_another_engine_is_not_applied(adapter: Any, tmp_path: Any) -> None:
    """A replay port is often a copy of the neighbour's: the history would be that of another cache."""

    async def test() -> None:
        seen = Seen()
        source = EventSource(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay", topic="kv@n1@m")
        own = Publisher(source.endpoint, topic=b"kv@n1@m")
        neighbour = Publisher(f"ipc://{tmp_path}/other", source.replay_endpoint, topic=b"kv@n2@m")
        try:
            for seq in range(3):
                await neighbour.publish(payload(9, seq))
            follower = adapter.Follower(source, seen)
            async with running(follower):
                await own.subscribed()
                await until(lambda: not follower.stats().replaying and follower.stats().replays == 1)
                await own.publish(payload(0, 0))
                await until(lambda: "0" in seen)
            assert not [word for word in seen if word.startswith("90")]
            assert follower.stats().foreign_topics == {"kv@n2@m": 3}
        finally:
            await own.close()
            await neighbour.close()

    run(test)


def test_a_load_of_another_topic_is_not_taken() -> None:
    async def test() -> None:
        port = free_port()
        source = EventSource(f"tcp://*:{port}", topic="load@n1")
        taken: list[int] = []
        follower = prefixroute_sglang.LoadFollower(source, lambda rank, _: taken.append(rank))
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as pub:
            pub.bind(f"tcp://127.0.0.1:{port}")
            task = asyncio.ensure_future(follower.run())
            try:
                await pub.recv()
                await pub.send_multipart([b"load@n10", b"\x90"])
                await pub.send_multipart([b"load@n1", b"\x90"])
                await until(lambda: follower.stats().messages == 2)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        assert follower.stats().foreign == 1
        assert sum(follower.stats().decode_errors.values()) == 1
        assert taken == []

    run(test)


# --- silence -----------------------------------------------------------------------------------------------


def test_what_was_cached_needs_no_event() -> None:
    silence = Silence(2)
    for _ in range(5):
        silence.finished(8000, 8000 - LONG_PROMPT_TOKENS + 1)
    assert not silence.silent
    silence.finished(8000, 8000 - LONG_PROMPT_TOKENS)
    silence.finished(LONG_PROMPT_TOKENS, 0)
    assert silence.silent
    assert [told.kind for told in troubles({"silent": True})] == ["silent"]


def test_a_stream_that_spoke_once_may_fall_silent(adapter: Any, tmp_path: Any) -> None:
    """Its publisher's thread dies, the engine serves on: "has it ever spoken" would never find out."""

    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(EventSource(f"ipc://{tmp_path}/live"), seen, silent_after=2)
        async with engine(f"ipc://{tmp_path}/live") as publisher, running(follower):
            await publisher.subscribed()
            follower.note_finished(4096)
            await publisher.publish(payload(0, 0))
            await seen.until(0)
            follower.note_finished(4096)
            assert not follower.stats().silent
            follower.note_finished(4096, cached_tokens=4000)
            assert not follower.stats().silent
            follower.note_finished(4096)
            assert follower.stats().silent
            await publisher.publish(payload(0, 1))
            await seen.until(0, 1)
            assert not follower.stats().silent

    run(test)


def test_foreign_messages_do_not_end_a_silence(adapter: Any, tmp_path: Any) -> None:
    async def test() -> None:
        live = f"ipc://{tmp_path}/live"
        follower = adapter.Follower(EventSource(live, topic="kv@n1"), lambda _: None, silent_after=1)
        async with engine(live, topic=b"kv@n10") as publisher, running(follower):
            assert await publisher.pub.recv() == b"\x01kv@n1"
            follower.note_finished(4096)
            await publisher.pub.send_multipart([b"kv@n10", struct.pack(">Q", 0), payload(0, 0)])
            await until(lambda: follower.stats().messages == 1)
            assert follower.stats().silent

    run(test)
