"""The follower on recorded streams of SGLang, its lives and both replay framings; where SGLang publishes."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import sglang_streams as recorded
from prefixroute_sglang import EventSource, Follower, Published, decode_batch, describe, discover, discover_load
from prefixroute_sglang.discovery import HOW_TO_PUBLISH
from prefixroute_zmq.address import Address, live_address
from publishing import engine, free_port, run, running, until

from prefixroute import Domain, Residency
from prefixroute.errors import UsageError
from prefixroute.events import BlocksCleared, EngineBatch, StreamGap, StreamRestarted

FRAMINGS = pytest.mark.parametrize("topic_in_replay", [True, False], ids=["0.5.22", "0.5.21"])
CLEAR = {"type": "AllBlocksCleared"}


@pytest.fixture
def source(tmp_path: Path) -> EventSource:
    return EventSource(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay", "kv")


def batch(ts: float, *events: object, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def stored(first: int, page: int = -1) -> dict[str, object]:
    """One page of 16 tokens at the root."""
    return {
        "type": "BlockStored",
        "block_hashes": [page],
        "parent_block_hash": None,
        "token_ids": list(range(first, first + 16)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
    }


class Mirror:
    """A residency, and the kinds of the events that came to it."""

    def __init__(self) -> None:
        self.residency = Residency(Domain("m", "t", 16))
        self.batches: list[EngineBatch] = []

    def __call__(self, batch: EngineBatch) -> None:
        self.batches.append(batch)
        self.residency.apply(batch)

    @property
    def kinds(self) -> list[type]:
        return [type(event) for batch in self.batches for event in batch.events]


# --- streams -----------------------------------------------------------------------------------------------


@FRAMINGS
@pytest.mark.parametrize("name", ["zmq_frames_p16", "unified_rust_p16", "radix_p1", "legacy_0.5.18_p16"])
def test_recorded_streams_come_through_a_lossy_socket_as_they_were_decoded(
    source: EventSource, topic_in_replay: bool, name: str
) -> None:
    """Half of it is history, a third of the rest is lost on the way."""

    async def test() -> None:
        payloads, mirror = recorded.payloads(name), Mirror()
        half = len(payloads) // 2
        follower = Follower(source, mirror)
        async with engine(
            source.endpoint, source.replay_endpoint, topic=b"kv", topic_in_replay=topic_in_replay
        ) as sglang:
            for data in payloads[:half]:
                await sglang.publish(data)
            async with running(follower):
                await sglang.subscribed()
                await until(lambda: len(mirror.batches) == half and not follower.stats().replaying)
                for number, data in enumerate(payloads[half:], start=half):
                    await sglang.publish(data, lost=number % 3 == 0 and number < len(payloads) - 1)
                await until(lambda: len(mirror.batches) == len(payloads))
        assert mirror.batches == [decode_batch(data) for data in payloads]
        assert sglang.requests[0] == [b"", bytes(8)]
        assert (follower.stats().gaps, follower.stats().unknown_events, follower.stats().decode_errors) == (0, 0, {})

    run(test)


@FRAMINGS
def test_a_subscriber_that_was_there_first_gets_the_message_it_missed(
    source: EventSource, topic_in_replay: bool
) -> None:
    """The first message of a life is sent before the subscription is back: only a replay brings it."""

    async def test() -> None:
        mirror = Mirror()
        async with running(Follower(source, mirror)):
            await asyncio.sleep(0)
            async with engine(
                source.endpoint, source.replay_endpoint, topic=b"kv", topic_in_replay=topic_in_replay
            ) as sglang:
                await sglang.publish(batch(1.0, CLEAR), lost=True)
                await sglang.subscribed()
                await sglang.publish(batch(2.0, stored(0)))
                await until(lambda: len(mirror.batches) == 2)
        assert [type(event) for event in mirror.batches[0].events] == [BlocksCleared]
        assert (mirror.residency.partial, mirror.residency.canonical_blocks) == (False, 1)

    run(test)


@FRAMINGS
@pytest.mark.parametrize("more", [0, 3], ids=["fewer than before", "more than before"])
def test_a_restarted_engine_has_an_empty_cache_until_it_says_otherwise(
    source: EventSource, topic_in_replay: bool, more: int
) -> None:
    async def test() -> None:
        mirror = Mirror()
        made: dict[str, Any] = {"topic": b"kv", "topic_in_replay": topic_in_replay}
        async with running(Follower(source, mirror)):
            async with engine(source.endpoint, source.replay_endpoint, **made) as old:
                await old.publish(batch(1.0, CLEAR))
                await old.subscribed()
                await old.publish(batch(2.0, stored(0, -5)))
                await old.publish(batch(3.0, stored(100, -6)))
                await until(lambda: mirror.residency.canonical_blocks == 2)
            async with engine(source.endpoint, source.replay_endpoint, **made) as new:
                await new.publish(batch(11.0, CLEAR), lost=True)
                for number in range(more):
                    await new.publish(batch(12.0 + number, stored(1000 * number, 7 + number)), lost=True)
                await new.subscribed()
                await new.publish(batch(20.0, stored(9000, 77)))
                await until(lambda: mirror.residency.counts.stored == 3 + more)
        assert mirror.kinds.count(StreamRestarted) == 1
        assert StreamGap not in mirror.kinds
        assert (mirror.residency.canonical_blocks, mirror.residency.partial) == (1 + more, False)
        mirror.residency._check()

    run(test)


def test_a_history_that_cannot_be_had_is_in_doubt_until_the_next_flush(source: EventSource) -> None:
    async def test() -> None:
        mirror = Mirror()
        async with engine(source.endpoint, topic=b"kv") as sglang:
            await sglang.publish(batch(1.0, CLEAR), lost=True)
            await sglang.publish(batch(2.0, stored(0)), lost=True)
            async with running(Follower(source._replace(replay_endpoint=None), mirror)):
                await sglang.subscribed()
                await sglang.publish(batch(3.0, stored(100, 6)))
                await until(lambda: mirror.residency.counts.stored == 1)
                assert mirror.residency.partial
                await sglang.publish(batch(4.0, CLEAR))
                await until(lambda: mirror.residency.counts.clears == 1)
                assert not mirror.residency.partial

    run(test)


def test_a_bad_event_costs_neither_its_batch_nor_the_order(source: EventSource) -> None:
    async def test() -> None:
        mirror = Mirror()
        follower = Follower(source, mirror)
        async with engine(source.endpoint, source.replay_endpoint, topic=b"kv") as sglang, running(follower):
            await sglang.subscribed()
            await sglang.publish(
                batch(1.0, CLEAR, {"type": "BlockMoved"}, stored(0, 1), ["BlockRemoved"], stored(50, 2))
            )
            await sglang.publish(b"\xc1")
            await sglang.publish(batch(3.0, stored(100, 3)))
            await until(lambda: mirror.residency.counts.stored == 3)
        assert follower.stats().unknown_events >= 2
        assert follower.stats().decode_errors["malformed"] >= 1
        assert (mirror.residency.counts.gaps, mirror.residency.canonical_blocks) == (1, 3)

    run(test)


# --- addresses and discovery -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "bind", "expected"),
    [
        ("tcp://*:5557", None, Address("tcp://10.0.0.7:5557", False)),
        ("tcp://[::]:5557", None, Address("tcp://10.0.0.7:5557", False)),
        ("tcp://0.0.0.0:5557", None, Address("tcp://10.0.0.7:5557", False)),  # vLLM connects
        ("ipc:///run/kv", None, Address("ipc:///run/kv", False)),
        ("tcp://router:5557", None, Address("tcp://router:5557", True)),
        ("tcp://router:5557", False, Address("tcp://router:5557", True)),
        ("tcp://10.0.0.7:5557", True, Address("tcp://10.0.0.7:5557", False)),
        ("ipc:///run/kv", False, Address("ipc:///run/kv", True)),
    ],
)
def test_the_bind_rule_is_mirrored(endpoint: str, bind: bool | None, expected: Address) -> None:
    follower = Follower(EventSource(endpoint, host="10.0.0.7", bind=bind), lambda batch: None)
    assert follower._live == expected
    if endpoint == "tcp://0.0.0.0:5557":
        assert live_address(endpoint, "10.0.0.7") == Address(endpoint, True)


TOLD = json.loads((recorded.DATA / "server_p16.json").read_text())["kv_events"]
DP = TOLD | {
    "dp_size": 2,
    "endpoint_port_base": 5657,
    "replay_endpoint_port_base": 5667,
    "load_endpoint_port_base": 5677,
}


def answering(body: object, paths: tuple[str, ...] = ("/server_info",)) -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path not in paths:
            return httpx.Response(404)
        assert (request.url.host, request.url.port) == ("10.0.0.7", 30000)
        return httpx.Response(200, json=body)

    return httpx.AsyncClient(transport=httpx.MockTransport(handle))


def ask(question: Any, client: httpx.AsyncClient, **configured: Any) -> Any:
    async def body() -> Any:
        async with client:
            return await question("http://10.0.0.7:30000/", client=client, **configured)

    return asyncio.run(body())


def test_what_a_real_server_told() -> None:
    """The ports that the recorded server named, on the host of its URL; the load port is read, not derived."""
    found = ask(describe, answering({"kv_events": TOLD, "page_size": 16}))
    assert found == Published(
        "zmq",
        [EventSource("tcp://*:38798", "tcp://*:38799", "kv", 0, "10.0.0.7", discovered=True)],
        [EventSource("tcp://*:38800", None, "load", 0, "10.0.0.7", discovered=True, bind=True)],
        16,
    )
    assert Follower(found.events[0], lambda batch: None)._live == Address("tcp://10.0.0.7:38798", False)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_each_rank_has_ports_of_its_own(path: str) -> None:
    events = ask(discover, answering({"kv_events": DP}, (path,)), endpoint="tcp://*:1", ranks=7)
    assert [(s.rank, s.endpoint, s.replay_endpoint) for s in events] == [
        (0, "tcp://*:5657", "tcp://*:5667"),
        (1, "tcp://*:5658", "tcp://*:5668"),
    ]
    loads = ask(discover_load, answering({"kv_events": DP}, (path,)))
    assert [(s.rank, s.endpoint, s.topic) for s in loads] == [(0, "tcp://*:5677", "load"), (1, "tcp://*:5678", "load")]


@pytest.mark.parametrize(
    ("changed", "endpoint", "replay"),
    [
        ({"endpoint_host": "0.0.0.0"}, "tcp://0.0.0.0:38798", "tcp://*:38799"),
        ({"endpoint_host": "::"}, "tcp://[::]:38798", "tcp://*:38799"),
        ({"endpoint_host": "router"}, "tcp://router:38798", "tcp://*:38799"),
        ({"replay_endpoint_port_base": None}, "tcp://*:38798", None),
        ({"topic": None, "load_topic": 7, "load_endpoint_port_base": None}, "tcp://*:38798", "tcp://*:38799"),
    ],
)
def test_hosts_and_missing_ports(changed: dict[str, object], endpoint: str, replay: str | None) -> None:
    found = ask(describe, answering({"kv_events": TOLD | changed}))
    assert [(s.endpoint, s.replay_endpoint) for s in found.events] == [(endpoint, replay)]
    if "topic" in changed:
        assert (found.events[0].topic, found.load) == ("", [])


def test_an_address_where_somebody_listens_is_bound_by_the_engine() -> None:
    """With a host and `"bind": true` the engine tells no more than with a host that it connects to."""
    client_asks = {"kv_events": TOLD | {"endpoint_host": "127.0.0.1", "endpoint_port_base": free_port()}}
    assert [source.bind for source in ask(discover, answering(client_asks))] == [None]
    assert [source.bind for source in ask(discover, answering(client_asks), bind=True)] == [True]
    with socket.socket() as engine_socket:
        engine_socket.bind(("127.0.0.1", 0))
        engine_socket.listen()
        client_asks["kv_events"]["endpoint_port_base"] = engine_socket.getsockname()[1]
        (source,) = ask(discover, answering(client_asks))
        assert not Follower(source, lambda batch: None)._live.bind
        (source,) = ask(discover, answering(client_asks), bind=False)
        assert Follower(source, lambda batch: None)._live.bind


def test_an_engine_that_publishes_nothing_says_how_to_start_it() -> None:
    with pytest.raises(UsageError, match="--kv-events-config") as caught:
        ask(discover, answering({"kv_events": None}))
    assert HOW_TO_PUBLISH in str(caught.value)
    assert ask(discover_load, answering({"kv_events": None})) == []
    # An endpoint that is not tcp is not told: then the caller's word counts.
    sources = ask(discover, answering({"kv_events": None}), endpoint="ipc:///run/kv", replay_endpoint="ipc:///run/r")
    assert sources == [EventSource("ipc:///run/kv", "ipc:///run/r", host="10.0.0.7")]


def test_a_publisher_inside_the_process_has_no_socket_but_its_load_has() -> None:
    """The answer then names an event port that nobody binds."""
    with pytest.raises(UsageError, match="'mine', not zmq"):
        ask(discover, answering({"kv_events": TOLD | {"publisher": "mine"}}))
    assert len(ask(discover_load, answering({"kv_events": TOLD | {"publisher": "mine"}}))) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"page_size": 16},
        {"kv_events": 7},
        {"kv_events": TOLD | {"dp_size": 0}},
        {"kv_events": TOLD | {"dp_size": 10**9}},
        {"kv_events": TOLD | {"publisher": None}},
        {"kv_events": TOLD | {"endpoint_port_base": 70000}},
        {"kv_events": TOLD | {"endpoint_port_base": True}},
        {"kv_events": TOLD | {"endpoint_host": ""}},
        [],
        None,
    ],
)
def test_an_engine_that_cannot_tell_is_taken_at_the_callers_word(body: object) -> None:
    assert ask(describe, answering(body)) is None
    configured = {"endpoint": "tcp://*:5657", "replay_endpoint": "tcp://*:5667", "topic": "t", "ranks": 2}
    assert ask(discover, answering(body), **configured) == [
        EventSource("tcp://*:5657", "tcp://*:5667", "t", 0, "10.0.0.7"),
        EventSource("tcp://*:5658", "tcp://*:5668", "t", 1, "10.0.0.7"),
    ]
    assert ask(discover_load, answering(body)) == []


def test_an_engine_that_cannot_be_reached_is_taken_at_the_callers_word() -> None:
    assert asyncio.run(discover(f"http://127.0.0.1:{free_port()}")) == [EventSource()]
    for url in ("127.0.0.1:30000", "http://[::1"):
        with pytest.raises(UsageError, match="base_url"):
            asyncio.run(discover(url))
