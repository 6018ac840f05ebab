"""The followers of both engines on real sockets, against a stand-in that speaks their wire in the same process."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import prefixroute_sglang
import prefixroute_vllm
import pytest
import zmq
import zmq.asyncio
from prefixroute_zmq import EventSource
from publishing import Seen, engine, free_port, payload, run, running, until

from prefixroute import Domain, Residency
from prefixroute.errors import UsageError
from prefixroute.events import EngineBatch


@pytest.fixture(params=[prefixroute_vllm, prefixroute_sglang], ids=["vllm", "sglang"])
def adapter(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def source(tmp_path: Path) -> EventSource:
    return EventSource(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")


# --- streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic_in_replay", [True, False], ids=["4-frame answers", "3-frame answers"])
def test_a_late_joiner_gets_the_history_then_the_live_stream(
    adapter: Any, source: EventSource, topic_in_replay: bool
) -> None:
    async def test() -> None:
        seen = Seen()
        source_with_topic = source._replace(topic="kv@n0@m")
        live, replay = source.endpoint, source.replay_endpoint
        async with engine(live, replay, topic=b"kv@n0@m", topic_in_replay=topic_in_replay) as publisher:
            for seq in range(3):
                await publisher.publish(payload(0, seq))
            follower = adapter.Follower(source_with_topic, seen)
            async with running(follower):
                await publisher.subscribed()
                await seen.until(0, 1, 2)
                await publisher.publish(payload(0, 3))
                await seen.until(0, 1, 2, 3)
                await until(lambda: not follower.stats().replaying)
                assert follower._sockets is not None
                assert follower._sockets.replay is None
        stats = follower.stats()
        assert publisher.requests[0] == [b"", bytes(8)]
        assert (stats.last_seq, stats.batches, stats.connections) == (3, 4, 1)
        assert (stats.gaps, stats.restarts, stats.decode_errors, stats.foreign) == (0, 0, {}, 0)
        assert stats.replayed >= 3

    run(test)


def test_a_lost_message_is_replayed_in_its_place(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(source, seen)
        async with engine(source.endpoint, source.replay_endpoint) as publisher, running(follower):
            await publisher.subscribed()
            await until(lambda: not follower.stats().replaying and follower.stats().connections == 1)
            for seq, lost in enumerate([False, False, True, True, False]):
                await publisher.publish(payload(0, seq), lost=lost)
            await seen.until(0, 1, 2, 3, 4)
            assert publisher.requests[-1] == [b"", struct.pack(">Q", 1)]
            assert follower.stats().gaps == 0

    run(test)


@pytest.mark.parametrize("count", [1, 2, 5], ids=["fewer", "as many", "more"])
def test_an_engine_that_restarts_unseen_is_followed_into_its_new_life(
    adapter: Any, source: EventSource, count: int
) -> None:
    """Messages sent before the subscription returns are lost, and their numbers look like those of the old life."""

    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(source, seen)
        async with running(follower):
            async with engine(source.endpoint, source.replay_endpoint) as old:
                await old.subscribed()
                for seq in range(2):
                    await old.publish(payload(0, seq))
                await seen.until(0, 1)
                await until(lambda: not follower.stats().replaying)
            async with engine(source.endpoint, source.replay_endpoint) as new:
                for seq in range(count):
                    await new.publish(payload(1, seq), lost=True)
                await new.subscribed()
                await new.publish(payload(1, count))
                await seen.until(0, 1, "X", *range(100, 101 + count))
                assert follower.stats().restarts == 1

    run(test)


def test_a_view_that_proved_wrong_is_read_anew(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()

        def take(batch: EngineBatch) -> None:
            seen(batch)
            if len(seen) == 3:
                follower.resync()

        follower = adapter.Follower(source, take)
        async with engine(source.endpoint, source.replay_endpoint) as publisher, running(follower):
            await publisher.subscribed()
            await until(lambda: follower.stats().connected and not follower.stats().replaying)
            for seq in range(3):
                await publisher.publish(payload(0, seq))
            await seen.until(0, 1, 2, "X", 0, 1, 2)
            await publisher.publish(payload(0, 3))
            await seen.until(0, 1, 2, "X", 0, 1, 2, 3)
            assert publisher.requests[-1] == [b"", bytes(8)]
            assert (follower.stats().resyncs, follower.stats().restarts, follower.stats().gaps) == (1, 0, 0)

    run(test)


def test_a_stream_that_lost_removals_is_found_out_and_read_anew(adapter: Any, source: EventSource) -> None:
    """Messages of a cache of four blocks arrive without their removals; the engine's buffer has them whole."""
    capacity, prompts = 4, 7

    def steps(seq: int, whole: bool) -> bytes:
        tokens = list(range(100 * seq, 100 * seq + 32))
        evicted = [["BlockRemoved", [10 * seq - 20, 10 * seq - 19], "GPU"]] if whole and seq >= capacity // 2 else []
        stored = ["BlockStored", [10 * seq, 10 * seq + 1], None, tokens, 16, None, "GPU"]
        return msgspec.msgpack.encode([float(seq), [*evicted, stored], 0])

    async def test() -> None:
        residency = Residency(Domain("m", "t"), capacity_tokens=16 * capacity)

        def take(batch: EngineBatch) -> None:
            before = residency.counts.inflated
            residency.apply(batch)
            if residency.counts.inflated != before:
                follower.resync()

        follower = adapter.Follower(source, take)
        async with engine(source.endpoint, source.replay_endpoint) as publisher, running(follower):
            await publisher.subscribed()
            await until(lambda: follower.stats().connected and not follower.stats().replaying)
            for seq in range(prompts):
                publisher.buffer.append((seq, steps(seq, whole=True)))
                frames = [b"", struct.pack(">Q", seq), steps(seq, whole=seq != capacity // 2)]
                await publisher.pub.send_multipart(frames)
            await until(lambda: follower.stats().resyncs == 1 and not follower.stats().replaying)
            await until(lambda: follower.stats().last_seq == prompts - 1)
            truth = Residency(Domain("m", "t"))
            for seq in range(prompts):
                truth.apply(adapter.decode_batch(steps(seq, whole=True)))
            assert set(residency.keys()) == set(truth.keys())
            assert residency.canonical_blocks == capacity
            assert residency.confidence == 1.0
            assert not residency.partial
            residency._check()

    run(test)


def test_it_tells_whether_a_publisher_is_there(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        follower = adapter.Follower(source, Seen())
        assert not follower.stats().connected
        async with running(follower):
            async with engine(source.endpoint, source.replay_endpoint):
                await until(lambda: follower.stats().connected)
            await until(lambda: not follower.stats().connected)
            async with engine(source.endpoint, source.replay_endpoint):
                await until(lambda: follower.stats().connected)
        assert not follower.stats().connected

    run(test)


def test_a_history_longer_than_the_buffer_is_declared(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        async with engine(source.endpoint, source.replay_endpoint, buffer_steps=5) as publisher:
            for seq in range(21):
                await publisher.publish(payload(0, seq))
            async with running(adapter.Follower(source, seen)):
                await seen.until("G16", 16, 17, 18, 19, 20)

    run(test)


def test_a_gap_without_a_replay_endpoint_is_declared(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        async with (
            engine(source.endpoint) as publisher,
            running(adapter.Follower(source._replace(replay_endpoint=None), seen)),
        ):
            await publisher.subscribed()
            for seq, lost in enumerate([False, True, True, True, True, True, False]):
                await publisher.publish(payload(0, seq), lost=lost)
            await seen.until(0, "G5", 6)

    run(test)


def test_a_replay_that_never_comes_is_given_up(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(source, seen, replay_timeout_s=0.05)
        async with engine(source.endpoint, source.replay_endpoint) as publisher, running(follower):
            publisher.answering = False
            await publisher.subscribed()
            await until(lambda: follower.stats().replay_timeouts == 1)
            for seq, lost in enumerate([False, True, False]):
                await publisher.publish(payload(0, seq), lost=lost)
            await seen.until(0, "G1", 2)
            publisher.answering = True
            for seq, lost in enumerate([False, True, False], start=3):
                await publisher.publish(payload(0, seq), lost=lost)
            await seen.until(0, "G1", 2, 3, 4, 5)

    run(test)


def test_a_long_history_arrives_whole_through_a_small_high_water_mark(adapter: Any, source: EventSource) -> None:
    """Before 0.33 the engine's ROUTER drops what exceeds 1,000 messages; the history comes in parts then."""

    async def test() -> None:
        seen = Seen()
        async with engine(source.endpoint, source.replay_endpoint) as publisher:
            publisher.buffer = [(seq, payload(0, seq)) for seq in range(5000)]
            async with running(adapter.Follower(source, seen)):
                await seen.until(*range(5000))

    run(test)


def test_what_cannot_be_read_is_counted_and_keeps_its_place(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(source, seen)
        async with engine(source.endpoint, source.replay_endpoint) as publisher, running(follower):
            await publisher.subscribed()
            await publisher.publish(payload(0, 0))
            await publisher.publish(b"\xc1")
            await publisher.pub.send_multipart([b"", b"short", payload(0, 9)])
            await publisher.pub.send_multipart([b"alone"])
            await publisher.publish(msgspec.msgpack.encode([5.0, [["BlockRemoved", [2]], ["New"]], 0]))
            await seen.until(0, "G1", 2)
            stats = follower.stats()
            assert stats.decode_errors["frames"] == 2
            assert stats.decode_errors["malformed"] >= 1
            assert stats.unknown_events >= 1
            assert stats.last_seq == 2

    run(test)


def test_messages_of_another_rank_are_dropped_and_counted(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(source._replace(replay_endpoint=None), seen)
        async with engine(source.endpoint) as publisher, running(follower):
            await publisher.subscribed()
            for seq in (0, 1):
                for rank in (3, 1):
                    await publisher.pub.send_multipart([b"", struct.pack(">Q", seq), payload(0, seq, rank)])
            await until(lambda: follower.stats().messages == 4)
            await seen.until(0, 1)
            assert follower.stats().foreign == 2

    run(test)


# --- sockets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", [True, False], ids=["engine binds", "engine connects"])
def test_one_side_binds_and_the_other_connects(adapter: Any, bind: bool) -> None:
    async def test() -> None:
        port, replay_port = free_port(), free_port()
        endpoint = f"tcp://*:{port}" if bind else f"tcp://127.0.0.1:{port}"
        theirs = f"tcp://127.0.0.1:{port}"
        seen = Seen()
        follower = adapter.Follower(EventSource(endpoint, f"tcp://*:{replay_port}"), seen)
        async with engine(theirs, f"tcp://127.0.0.1:{replay_port}", bind=bind) as publisher, running(follower):
            await publisher.subscribed()
            await publisher.publish(payload(0, 0))
            await seen.until(0)

    run(test)


def test_an_engine_in_the_same_process_shares_its_context(adapter: Any) -> None:
    async def test() -> None:
        seen = Seen()
        context = zmq.asyncio.Context()
        follower = adapter.Follower(EventSource("inproc://live", "inproc://replay"), seen, context=context)
        async with engine("inproc://live", "inproc://replay", context=context) as publisher:
            await publisher.publish(payload(0, 0))
            async with running(follower):
                await publisher.subscribed()
                await seen.until(0)
                await publisher.publish(payload(0, 1))
                await seen.until(0, 1)
        assert all(made.closed for made in list(context._sockets))
        context.destroy(linger=0)

    run(test)


def test_cancelling_closes_everything_and_the_follower_can_run_again(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(source, seen)
        async with engine(source.endpoint, source.replay_endpoint) as publisher:
            async with running(follower) as task:
                await publisher.subscribed()
                await publisher.publish(payload(0, 0))
                await seen.until(0)
            assert task.cancelled()
            assert await publisher.pub.recv() == b"\x00"
            await publisher.publish(payload(0, 1), lost=True)
            async with running(follower):
                await publisher.subscribed()
                await publisher.publish(payload(0, 2))
                await seen.until(0, 1, 2)

    run(test)


def test_what_the_callback_raises_ends_the_run(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        def refuse(batch: EngineBatch) -> None:
            raise LookupError("mine")

        async with engine(source.endpoint, source.replay_endpoint) as publisher:
            await publisher.publish(payload(0, 0))
            with pytest.raises(LookupError, match="mine"):
                await adapter.Follower(source, refuse).run()

    run(test)


def test_endpoints_that_cannot_be_used_are_the_callers_fault(adapter: Any) -> None:
    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(UsageError, match="cannot bind"):
                await adapter.Follower(EventSource(f"tcp://127.0.0.1:{taken.getsockname()[1]}"), Seen()).run()
        with pytest.raises(UsageError, match="cannot connect"):
            await adapter.Follower(EventSource("tcp://*:notaport"), Seen()).run()
        with pytest.raises(UsageError, match="discover"):
            adapter.Follower(EventSource("tcp://*:0"), Seen())

    run(test)


def test_a_follower_runs_once_at_a_time(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        follower = adapter.Follower(source, Seen())
        async with running(follower):
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="runs already"):
                await follower.run()

    run(test)


def test_requests_without_any_event_make_a_stream_silent(adapter: Any, source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = adapter.Follower(source, seen, silent_after=2)
        for tokens in (20, 4096, 20):
            follower.note_finished(tokens)
        assert not follower.stats().silent
        follower.note_finished(4096)
        assert follower.stats().silent
        async with engine(source.endpoint, source.replay_endpoint) as publisher, running(follower):
            await publisher.subscribed()
            await publisher.publish(payload(0, 0))
            await seen.until(0)
        assert not follower.stats().silent

    run(test)
