"""The follower on real sockets, against a stand-in that speaks vLLM's wire in the same process; and discovery."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from prefixroute_vllm import EventSource, Follower, decode_batch, discover
from prefixroute_vllm.discovery import Address, endpoint_of_rank, live_address, replay_address

from prefixroute.errors import UsageError
from prefixroute.events import BlocksRemoved, EngineBatch, StreamGap, StreamRestarted

DATA = Path(__file__).parent / "data" / "vllm_events"
END = b"\xff" * 8


def payload(life: int, seq: int, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1000.0 * life + seq, [["BlockRemoved", [100 * life + seq]]], rank])


def told(batch: EngineBatch) -> str:
    """`3` for message 3 of the first life, `103` for that of the second, `X` for a clear, `G2` for a gap of two."""
    event = batch.events[0]
    if isinstance(event, StreamGap):
        return f"G{event.missing}"
    if isinstance(event, StreamRestarted):
        return "X"
    assert isinstance(event, BlocksRemoved)
    return str(event.handles[0])


class Engine:
    """Publishes as vLLM does. XPUB is PUB that lets a test see the subscription, so that no test has to sleep."""

    def __init__(
        self,
        live: str,
        replay: str | None = None,
        *,
        bind: bool = True,
        topic: bytes = b"",
        topic_in_replay: bool = True,
        buffer_steps: int = 10_000,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.own = None if context else zmq.asyncio.Context()
        context = context or self.own
        assert context is not None
        self.topic, self.topic_in_replay, self.buffer_steps = topic, topic_in_replay, buffer_steps
        self.buffer: list[tuple[int, bytes]] = []
        self.requests: list[list[bytes]] = []
        self.answering = True
        self.pub = context.socket(zmq.XPUB)
        self.pub.bind(live) if bind else self.pub.connect(live)
        self.router = context.socket(zmq.ROUTER) if replay else None
        self.task: asyncio.Task[None] | None = None
        if self.router is not None:
            self.router.bind(replay)
            self.task = asyncio.get_running_loop().create_task(self.serve(self.router))

    async def serve(self, router: Any) -> None:
        while True:
            client, *request = await router.recv_multipart()
            self.requests.append(request)
            if len(request) != 2 or not self.answering:
                continue
            (start,) = struct.unpack(">Q", request[1])
            topic = [self.topic] if self.topic_in_replay else []
            for seq, data in self.buffer[-self.buffer_steps :]:
                if seq >= start:
                    await router.send_multipart([client, b"", *topic, struct.pack(">Q", seq), data])
            await router.send_multipart([client, b"", *([b""] if self.topic_in_replay else []), END, b""])

    async def subscribed(self) -> None:
        assert await self.pub.recv() == b"\x01" + self.topic

    async def publish(self, data: bytes, *, lost: bool = False) -> None:
        seq = len(self.buffer)
        self.buffer.append((seq, data))
        if not lost:
            await self.pub.send_multipart([self.topic, struct.pack(">Q", seq), data])

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        if self.router is not None:
            self.router.close(linger=0)
        self.pub.close(linger=0)
        if self.own is not None:
            self.own.destroy(linger=0)


async def until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), deadline_s)


class Seen(list[str]):
    def __call__(self, batch: EngineBatch) -> None:
        self.append(told(batch))

    async def until(self, *expected: object) -> None:
        wanted = [str(word) for word in expected]
        try:
            await until(lambda: len(self) >= len(wanted))
        finally:
            assert self == wanted


@contextlib.asynccontextmanager
async def running(follower: Follower) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(follower.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def engine(*args: Any, **kwargs: Any) -> AsyncIterator[Engine]:
    made = Engine(*args, **kwargs)
    try:
        yield made
    finally:
        await made.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(body())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def source(tmp_path: Path) -> EventSource:
    return EventSource(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")


# --- streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic_in_replay", [True, False], ids=["4-frame answers", "3-frame answers"])
def test_a_late_joiner_gets_the_history_then_the_live_stream(source: EventSource, topic_in_replay: bool) -> None:
    async def test() -> None:
        seen = Seen()
        source_with_topic = source._replace(topic="kv@n0@m")
        live, replay = source.endpoint, source.replay_endpoint
        async with engine(live, replay, topic=b"kv@n0@m", topic_in_replay=topic_in_replay) as vllm:
            for seq in range(3):
                await vllm.publish(payload(0, seq))
            follower = Follower(source_with_topic, seen)
            async with running(follower):
                await vllm.subscribed()
                await seen.until(0, 1, 2)
                await vllm.publish(payload(0, 3))
                await seen.until(0, 1, 2, 3)
                await until(lambda: not follower.stats().replaying)
                assert follower._sockets is not None
                assert follower._sockets.replay is None
        stats = follower.stats()
        assert vllm.requests[0] == [b"", bytes(8)]
        assert (stats.last_seq, stats.batches, stats.connections) == (3, 4, 1)
        assert (stats.gaps, stats.restarts, stats.decode_errors, stats.foreign) == (0, 0, {}, 0)
        assert stats.replayed >= 3

    run(test)


def test_a_lost_message_is_replayed_in_its_place(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = Follower(source, seen)
        async with engine(source.endpoint, source.replay_endpoint) as vllm, running(follower):
            await vllm.subscribed()
            await until(lambda: not follower.stats().replaying and follower.stats().connections == 1)
            for seq, lost in enumerate([False, False, True, True, False]):
                await vllm.publish(payload(0, seq), lost=lost)
            await seen.until(0, 1, 2, 3, 4)
            assert vllm.requests[-1] == [b"", struct.pack(">Q", 1)]
            assert follower.stats().gaps == 0

    run(test)


@pytest.mark.parametrize("count", [1, 2, 5], ids=["fewer", "as many", "more"])
def test_an_engine_that_restarts_unseen_is_followed_into_its_new_life(source: EventSource, count: int) -> None:
    """Messages sent before the subscription returns are lost, and their numbers look like those of the old life."""

    async def test() -> None:
        seen = Seen()
        follower = Follower(source, seen)
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


def test_a_history_longer_than_the_buffer_is_declared(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        async with engine(source.endpoint, source.replay_endpoint, buffer_steps=5) as vllm:
            for seq in range(21):
                await vllm.publish(payload(0, seq))
            async with running(Follower(source, seen)):
                await seen.until("G16", 16, 17, 18, 19, 20)

    run(test)


def test_a_gap_without_a_replay_endpoint_is_declared(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        async with engine(source.endpoint) as vllm, running(Follower(source._replace(replay_endpoint=None), seen)):
            await vllm.subscribed()
            for seq, lost in enumerate([False, True, True, True, True, True, False]):
                await vllm.publish(payload(0, seq), lost=lost)
            await seen.until(0, "G5", 6)

    run(test)


def test_a_replay_that_never_comes_is_given_up(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = Follower(source, seen, replay_timeout_s=0.05)
        async with engine(source.endpoint, source.replay_endpoint) as vllm, running(follower):
            vllm.answering = False
            await vllm.subscribed()
            await until(lambda: follower.stats().replay_timeouts == 1)
            for seq, lost in enumerate([False, True, False]):
                await vllm.publish(payload(0, seq), lost=lost)
            await seen.until(0, "G1", 2)
            vllm.answering = True
            for seq, lost in enumerate([False, True, False], start=3):
                await vllm.publish(payload(0, seq), lost=lost)
            await seen.until(0, "G1", 2, 3, 4, 5)

    run(test)


def test_a_long_history_arrives_whole_through_a_small_high_water_mark(source: EventSource) -> None:
    """Before 0.33 the engine's ROUTER drops what exceeds 1,000 messages; the history comes in parts then."""

    async def test() -> None:
        seen = Seen()
        async with engine(source.endpoint, source.replay_endpoint) as vllm:
            vllm.buffer = [(seq, payload(0, seq)) for seq in range(5000)]
            async with running(Follower(source, seen)):
                await seen.until(*range(5000))

    run(test)


def test_recorded_streams_come_through_as_they_were_decoded(source: EventSource) -> None:
    async def test() -> None:
        for folder in ("v0.32.0_bs32_sha256", "v0.32.0_bs128_sha256cbor_bytes_lora", "v0.32.0_bs32_hybrid_gemma3"):
            payloads = [path.read_bytes() for path in sorted((DATA / folder).glob("*.msgpack"))]
            batches: list[EngineBatch] = []
            async with (
                engine(source.endpoint, source.replay_endpoint) as vllm,
                running(Follower(source, batches.append)),
            ):
                await vllm.subscribed()
                for data in payloads:
                    await vllm.publish(data)
                await until(lambda batches=batches, payloads=payloads: len(batches) >= len(payloads))  # type: ignore[misc]
            assert batches == [decode_batch(data) for data in payloads]

    run(test)


def test_what_cannot_be_read_is_counted_and_keeps_its_place(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = Follower(source, seen)
        async with engine(source.endpoint, source.replay_endpoint) as vllm, running(follower):
            await vllm.subscribed()
            await vllm.publish(payload(0, 0))
            await vllm.publish(b"\xc1")
            await vllm.pub.send_multipart([b"", b"short", payload(0, 9)])
            await vllm.pub.send_multipart([b"alone"])
            await vllm.publish(msgspec.msgpack.encode([5.0, [["BlockRemoved", [2]], ["New"]], 0]))
            await seen.until(0, "G1", 2)
            stats = follower.stats()
            assert stats.decode_errors["frames"] == 2
            assert stats.decode_errors["malformed"] >= 1
            assert stats.unknown_events >= 1
            assert stats.last_seq == 2

    run(test)


def test_messages_of_another_rank_are_dropped_and_counted(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = Follower(source._replace(replay_endpoint=None), seen)
        async with engine(source.endpoint) as vllm, running(follower):
            await vllm.subscribed()
            for seq in (0, 1):
                for rank in (3, 1):
                    await vllm.pub.send_multipart([b"", struct.pack(">Q", seq), payload(0, seq, rank)])
            await until(lambda: follower.stats().messages == 4)
            await seen.until(0, 1)
            assert follower.stats().foreign == 2

    run(test)


# --- sockets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", [True, False], ids=["engine binds", "engine connects"])
def test_one_side_binds_and_the_other_connects(bind: bool) -> None:
    async def test() -> None:
        port, replay_port = free_port(), free_port()
        endpoint = f"tcp://*:{port}" if bind else f"tcp://127.0.0.1:{port}"
        theirs = f"tcp://127.0.0.1:{port}"
        seen = Seen()
        follower = Follower(EventSource(endpoint, f"tcp://*:{replay_port}"), seen)
        async with engine(theirs, f"tcp://127.0.0.1:{replay_port}", bind=bind) as vllm, running(follower):
            await vllm.subscribed()
            await vllm.publish(payload(0, 0))
            await seen.until(0)

    run(test)


def test_an_engine_in_the_same_process_shares_its_context() -> None:
    async def test() -> None:
        seen = Seen()
        context = zmq.asyncio.Context()
        follower = Follower(EventSource("inproc://live", "inproc://replay"), seen, context=context)
        async with engine("inproc://live", "inproc://replay", context=context) as vllm:
            await vllm.publish(payload(0, 0))
            async with running(follower):
                await vllm.subscribed()
                await seen.until(0)
                await vllm.publish(payload(0, 1))
                await seen.until(0, 1)
        assert all(made.closed for made in list(context._sockets))
        context.destroy(linger=0)

    run(test)


def test_cancelling_closes_everything_and_the_follower_can_run_again(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = Follower(source, seen)
        async with engine(source.endpoint, source.replay_endpoint) as vllm:
            async with running(follower) as task:
                await vllm.subscribed()
                await vllm.publish(payload(0, 0))
                await seen.until(0)
            assert task.cancelled()
            assert await vllm.pub.recv() == b"\x00"
            await vllm.publish(payload(0, 1), lost=True)
            async with running(follower):
                await vllm.subscribed()
                await vllm.publish(payload(0, 2))
                await seen.until(0, 1, 2)

    run(test)


def test_what_the_callback_raises_ends_the_run(source: EventSource) -> None:
    async def test() -> None:
        def refuse(batch: EngineBatch) -> None:
            raise LookupError("mine")

        async with engine(source.endpoint, source.replay_endpoint) as vllm:
            await vllm.publish(payload(0, 0))
            with pytest.raises(LookupError, match="mine"):
                await Follower(source, refuse).run()

    run(test)


def test_endpoints_that_cannot_be_used_are_the_callers_fault() -> None:
    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(UsageError, match="cannot bind"):
                await Follower(EventSource(f"tcp://127.0.0.1:{taken.getsockname()[1]}"), Seen()).run()
        with pytest.raises(UsageError, match="cannot connect"):
            await Follower(EventSource("tcp://*:notaport"), Seen()).run()
        with pytest.raises(UsageError, match="discover"):
            Follower(EventSource("tcp://*:0"), Seen())

    run(test)


def test_a_follower_runs_once_at_a_time(source: EventSource) -> None:
    async def test() -> None:
        follower = Follower(source, Seen())
        async with running(follower):
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="runs already"):
                await follower.run()

    run(test)


def test_requests_without_any_event_make_a_stream_silent(source: EventSource) -> None:
    async def test() -> None:
        seen = Seen()
        follower = Follower(source, seen, silent_after=2)
        for tokens in (20, 4096, 20):
            follower.note_finished(tokens)
        assert not follower.stats().silent
        follower.note_finished(4096)
        assert follower.stats().silent
        async with engine(source.endpoint, source.replay_endpoint) as vllm, running(follower):
            await vllm.subscribed()
            await vllm.publish(payload(0, 0))
            await seen.until(0)
        assert not follower.stats().silent

    run(test)


# --- addresses and discovery -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", Address("tcp://10.0.0.7:5557", False)),
        ("tcp://[::]:5557", Address("tcp://10.0.0.7:5557", False)),
        ("tcp://[fe80::1]:5557", Address("tcp://[fe80::1]:5557", False)),
        ("tcp://127.0.0.1:5557", Address("tcp://127.0.0.1:5557", True)),
        ("tcp://0.0.0.0:5557", Address("tcp://0.0.0.0:5557", True)),
        ("tcp://router:5557", Address("tcp://router:5557", True)),
        ("ipc:///run/kv.ipc", Address("ipc:///run/kv.ipc", False)),
        ("inproc://kv", Address("inproc://kv", False)),
    ],
)
def test_the_bind_rule_is_mirrored(endpoint: str, expected: Address) -> None:
    assert live_address(endpoint, "10.0.0.7") == expected


def test_the_replay_socket_is_always_connected_to() -> None:
    assert replay_address("tcp://0.0.0.0:5558", "10.0.0.7") == Address("tcp://10.0.0.7:5558", False)
    assert replay_address("tcp://127.0.0.1:5558") == Address("tcp://127.0.0.1:5558", False)
    assert replay_address("tcp://*:5558", "fd00::7") == Address("tcp://[fd00::7]:5558", False)


def test_ports_of_ranks_are_base_plus_rank() -> None:
    assert endpoint_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of_rank("ipc:///run/kv", 0) == "ipc:///run/kv"
    with pytest.raises(UsageError, match="tcp"):
        endpoint_of_rank("ipc:///run/kv", 1)
    with pytest.raises(UsageError, match="discover"):
        endpoint_of_rank("tcp://*:0", 1)


def answering(status: int, body: bytes | str) -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://10.0.0.7:8000/kv_event_sources"
        return httpx.Response(status, content=body)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle))


def ask(client: httpx.AsyncClient, **configured: Any) -> list[EventSource]:
    async def body() -> list[EventSource]:
        async with client:
            return await discover("http://10.0.0.7:8000/", client=client, **configured)

    return asyncio.run(body())


CONFIG = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5658", "replay_endpoint": "tcp://*:5668",
          "buffer_steps": 500, "hwm": 100000, "max_queue_size": 100000, "topic": "kv"}  # fmt: skip


def test_the_engine_names_its_sources() -> None:
    other = CONFIG | {"endpoint": "tcp://*:5657", "replay_endpoint": None, "buffer_steps": None}
    assert ask(answering(200, json.dumps({"1": CONFIG, "0": other})), ranks=7) == [
        EventSource("tcp://*:5657", None, "kv", 0, "10.0.0.7", discovered=True),
        EventSource("tcp://*:5658", "tcp://*:5668", "kv", 1, "10.0.0.7", 500, discovered=True),
    ]


@pytest.mark.parametrize(
    "entry",
    [CONFIG | {"publisher": "null"}, CONFIG | {"enable_kv_cache_events": False}, CONFIG | {"endpoint": 7}, None, []],
)
def test_an_engine_that_publishes_nothing_has_no_source(entry: object) -> None:
    assert ask(answering(200, json.dumps({"0": entry}))) == []
    assert ask(answering(200, json.dumps({"zero": CONFIG}))) == []


@pytest.mark.parametrize(
    ("status", "body"), [(404, "{}"), (500, ""), (200, "<html>"), (200, "[]"), (200, b" " * (2 << 20))]
)
def test_an_engine_that_cannot_tell_has_its_ranks_computed(status: int, body: bytes | str) -> None:
    sources = ask(answering(status, body), replay_endpoint="tcp://*:5567", topic="t", ranks=2)
    assert sources == [
        EventSource("tcp://*:5557", "tcp://*:5567", "t", 0, "10.0.0.7"),
        EventSource("tcp://*:5558", "tcp://*:5568", "t", 1, "10.0.0.7"),
    ]


def test_an_engine_that_cannot_be_reached_has_its_ranks_computed() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert asyncio.run(discover(url)) == [EventSource()]
    with pytest.raises(UsageError, match="base_url"):
        asyncio.run(discover("127.0.0.1:8000"))
