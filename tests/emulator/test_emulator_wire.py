"""The emulated engine's event wire over real ZeroMQ sockets, decoded without the emulator's own types."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from prefixroute.emulator import Batch, BlockStored, EmulatedEngine, EngineConfig, KvEventsConfig, ServiceModel
from prefixroute.emulator.event_socket import EventPublisher, binds
from prefixroute.errors import UsageError

END = b"\xff" * 8

Sockets = Callable[[int], zmq.asyncio.Socket]


@asynccontextmanager
async def sockets() -> AsyncIterator[Sockets]:
    """A factory of sockets that are closed at the end."""
    context = zmq.asyncio.Context()
    opened: list[zmq.asyncio.Socket] = []

    def make(kind: int) -> zmq.asyncio.Socket:
        opened.append(context.socket(kind))
        return opened[-1]

    try:
        yield make
    finally:
        for socket in opened:
            socket.close(linger=0)
        context.term()


def events(**fields: Any) -> KvEventsConfig:
    fields = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://127.0.0.1:0", **fields}
    return KvEventsConfig(enable_kv_cache_events=True, **fields)


def batch(number: int) -> Batch:
    return Batch(float(number), [BlockStored((number,), None, (1, 2), 2, None, "GPU", None)])


def run(main: Callable[[Sockets], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with sockets() as make:
            await main(make)

    asyncio.run(whole())


async def subscribe(make: Sockets, publisher: EventPublisher, topic: bytes = b"") -> zmq.asyncio.Socket:
    """A subscriber whose subscription has arrived: probes are lost to replay, so they cost no number."""
    sub = make(zmq.SUB)
    sub.subscribe(topic)
    sub.connect(publisher.config.endpoint)
    await until_heard(publisher, sub, topic)
    return sub


async def until_heard(publisher: EventPublisher, sub: zmq.asyncio.Socket, topic: bytes) -> None:
    assert publisher._pub is not None
    while not await sub.poll(10):
        publisher._pub.send_multipart((topic, b"probe"))
    await drain(sub)


async def drain(sub: zmq.asyncio.Socket) -> None:
    while await sub.poll(50):
        await sub.recv_multipart()


async def replay(make: Sockets, publisher: EventPublisher, start: int) -> list[list[bytes]]:
    """All answers to one replay request, without the end marker, which is checked."""
    dealer = make(zmq.DEALER)
    assert publisher.config.replay_endpoint is not None
    dealer.connect(publisher.config.replay_endpoint)
    await dealer.send_multipart((b"", start.to_bytes(8, "big")))
    answers = []
    while True:
        frames = await dealer.recv_multipart()
        if frames[2] == END:
            assert frames == [b"", b"", END, b""]
            return answers
        assert frames[0] == b"" and len(frames) == 4
        answers.append(frames[1:])


def test_live_message_has_topic_sequence_and_a_batch_of_maps() -> None:
    async def main(make: Sockets) -> None:
        publisher = EventPublisher(events(topic="kv@n0@m"))
        await publisher.start()
        sub = await subscribe(make, publisher, b"kv@n0@m")
        for number in range(3):
            publisher.publish(batch(number))
        for number in range(3):
            topic, sequence, payload = await sub.recv_multipart()
            assert (topic, sequence) == (b"kv@n0@m", number.to_bytes(8, "big"))
            ts, [event], rank = msgspec.msgpack.decode(payload)
            assert (ts, rank) == (float(number), 0)
            assert event == {
                "type": "BlockStored",
                "block_hashes": [number],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        await publisher.stop()

    run(main)


def test_replay_gives_the_batches_from_the_asked_one_on_and_an_end_marker() -> None:
    async def main(make: Sockets) -> None:
        publisher = EventPublisher(events(topic="t"))
        await publisher.start()
        assert await replay(make, publisher, 0) == []
        for number in range(6):
            publisher.publish(batch(number))
        for start in (0, 4, 6, 1000):
            answers = await replay(make, publisher, start)
            assert [int.from_bytes(frames[1], "big") for frames in answers] == list(range(start, 6))
            assert all(frames[0] == b"t" for frames in answers)
        await publisher.stop()

    run(main)


def test_replay_is_truncated_silently_to_the_buffer() -> None:
    async def main(make: Sockets) -> None:
        publisher = EventPublisher(events(buffer_steps=5))
        await publisher.start()
        for number in range(21):
            publisher.publish(batch(number))
        assert publisher.published == 21
        answers = await replay(make, publisher, 0)
        assert [int.from_bytes(frames[1], "big") for frames in answers] == list(range(16, 21))
        await publisher.stop()

    run(main)


def test_replay_request_of_another_shape_is_dropped_and_the_next_is_answered() -> None:
    async def main(make: Sockets) -> None:
        publisher = EventPublisher(events())
        await publisher.start()
        publisher.publish(batch(0))
        dealer = make(zmq.DEALER)
        assert publisher.config.replay_endpoint is not None
        dealer.connect(publisher.config.replay_endpoint)
        for frames in ((b"0",), (b"", b"0", b"0"), (b"", b"123456789"), (b"", (0).to_bytes(8, "big"))):
            await dealer.send_multipart(frames)
        assert (await dealer.recv_multipart())[2] == (0).to_bytes(8, "big")
        assert (await dealer.recv_multipart())[2] == END
        assert not await dealer.poll(50)
        await publisher.stop()

    run(main)


def test_lost_live_batches_leave_a_gap_that_replay_fills() -> None:
    async def main(make: Sockets) -> None:
        publisher = EventPublisher(events())
        await publisher.start()
        sub = await subscribe(make, publisher)
        publisher.lose_live(2)
        for number in range(4):
            publisher.publish(batch(number))
        seen = [int.from_bytes((await sub.recv_multipart())[1], "big") for _ in range(2)]
        assert seen == [2, 3]
        assert len(await replay(make, publisher, 0)) == 4
        await publisher.stop()

    run(main)


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://0.0.0.0:5557", False),
    ],
)
def test_endpoint_decides_who_binds(endpoint: str, bound: bool) -> None:
    assert binds(endpoint) is bound


def test_concrete_tcp_endpoint_makes_the_engine_connect_to_the_consumer() -> None:
    async def main(make: Sockets) -> None:
        sub = make(zmq.SUB)
        sub.subscribe(b"")
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        publisher = EventPublisher(events(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None))
        await publisher.start()
        await until_heard(publisher, sub, b"")
        publisher.publish(batch(7))
        assert (await sub.recv_multipart())[1] == (0).to_bytes(8, "big")
        await publisher.stop()

    run(main)


def test_ipc_endpoints_are_bound(tmp_path: Path) -> None:
    async def main(make: Sockets) -> None:
        config = events(endpoint=f"ipc://{tmp_path}/kv", replay_endpoint=f"ipc://{tmp_path}/replay")
        publisher = EventPublisher(config)
        await publisher.start()
        sub = await subscribe(make, publisher)
        publisher.publish(batch(0))
        assert len(await sub.recv_multipart()) == 3
        assert len(await replay(make, publisher, 0)) == 1
        await publisher.stop()

    run(main)


def test_inproc_endpoint_is_reached_through_the_shared_context() -> None:
    async def main() -> None:
        publisher = EventPublisher(events(endpoint="inproc://emulator-test", replay_endpoint=None))
        await publisher.start()
        sub = zmq.asyncio.Context.shadow(zmq.Context.instance()).socket(zmq.SUB)
        sub.subscribe(b"")
        sub.connect("inproc://emulator-test")
        await until_heard(publisher, sub, b"")
        publisher.publish(batch(0))
        assert len(await sub.recv_multipart()) == 3
        sub.close(linger=0)
        await publisher.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields", [{"endpoint": "ipc:///no/such/folder/x"}, {"replay_endpoint": "nonsense"}, {"endpoint": "tcp://*:x"}]
)
def test_endpoint_that_cannot_be_used_is_the_callers_error(fields: dict[str, str]) -> None:
    async def main() -> None:
        engine = EmulatedEngine(EngineConfig(kv_events=events(**fields)))
        with pytest.raises(UsageError, match="event endpoint"):
            await engine.start()
        await engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{"publisher": "null"}, {"enable_kv_cache_events": False}])
def test_nothing_is_opened_or_numbered_when_events_are_off(fields: dict[str, Any]) -> None:
    async def main() -> None:
        config = msgspec.structs.replace(events(), **fields)
        publisher = EventPublisher(config)
        await publisher.start()
        publisher.publish(batch(0))
        assert publisher.published == 0 and publisher.config == config
        await publisher.stop()

    asyncio.run(main())


@pytest.mark.parametrize("byte_hashes", [False, True])
def test_mirror_of_the_live_stream_and_of_the_replay_equals_the_true_content(byte_hashes: bool) -> None:
    rng = random.Random(5)
    config = EngineConfig(
        block_size=4,
        capacity_blocks=40,
        service=ServiceModel(1e6, 1e-5, 1e-5),
        byte_hashes=byte_hashes,
        kv_events=events(),
    )

    def requests() -> list[dict[str, Any]]:
        return [
            {
                "prompt": [rng.randrange(3)] * rng.randrange(1, 60) + [rng.randrange(4)] * rng.randrange(9),
                "max_tokens": rng.randrange(1, 20),
                "stream": rng.random() < 0.5,
                "cache_salt": rng.choice([None, "a"]),
            }
            for _ in range(80)
        ]

    async def main(make: Sockets) -> None:
        async with EmulatedEngine(config) as engine:
            sub = await subscribe(make, engine.publisher)
            transport = httpx.ASGITransport(engine.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                posts = (client.post("/v1/completions", json=body) for body in requests())
                assert {reply.status_code for reply in await asyncio.gather(*posts)} == {200}
                assert (await client.post("/reset_prefix_cache")).json()["success"]
                posts = (client.post("/v1/completions", json=body) for body in requests())
                await asyncio.gather(*posts)
                # Evictions of the last decode steps leave with the next step that ends: end one.
                await client.post("/v1/completions", json={"prompt": [9], "max_tokens": 1})
            count = engine.publisher.published
            live = [await sub.recv_multipart() for _ in range(count)]
            replayed = await replay(make, engine.publisher, 0)
            assert live == replayed
            assert [int.from_bytes(frames[1], "big") for frames in live] == list(range(count))
            content, kinds = mirror(live, config.capacity_blocks)
            assert content == engine.cache.contents()
            assert kinds["BlockRemoved"] > 50 and kinds["AllBlocksCleared"] == 1
            assert all(isinstance(handle, bytes) is byte_hashes for handle in content)

    run(main)


def mirror(messages: list[list[bytes]], capacity: int) -> tuple[Counter[object], Counter[str]]:
    """What a consumer that counts copies believes at the end, and how many events of each type it saw."""
    content: Counter[object] = Counter()
    kinds: Counter[str] = Counter()
    last_ts = 0.0
    for _, _, payload in messages:
        ts, batch_events, _ = msgspec.msgpack.decode(payload)
        assert ts >= last_ts
        last_ts = ts
        for event in batch_events:
            kinds[event["type"]] += 1
            if event["type"] == "BlockStored":
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                assert event["parent_block_hash"] is None or content[event["parent_block_hash"]] > 0
                content.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                content.subtract(event["block_hashes"])
                assert all(content[handle] >= 0 for handle in event["block_hashes"])
            else:
                content.clear()
        assert sum(content.values()) <= capacity
    return +content, kinds
