"""The follower on a recorded stream of vLLM; where vLLM publishes. What both engines share is in test_zmq_follow."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefixroute_vllm import EventSource, Follower, decode_batch, discover, reports_on_request
from prefixroute_zmq.address import Address, endpoint_of_rank, live_address, replay_address
from publishing import engine, free_port, run, running, until

from prefixroute.errors import UsageError
from prefixroute.events import EngineBatch

DATA = Path(__file__).parents[1] / "data" / "vllm_events"


@pytest.fixture
def source(tmp_path: Path) -> EventSource:
    return EventSource(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")


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


def test_an_address_that_the_system_chose_is_bound_by_the_engine() -> None:
    """Told for ``tcp://*:0``: it reads like one to connect to, but somebody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        (source,) = ask(answering(200, json.dumps({"0": CONFIG | {"endpoint": told}})))
    assert (source.endpoint, source.bind) == (told, True)
    (source,) = ask(answering(200, json.dumps({"0": CONFIG | {"endpoint": told}})))
    assert source.bind is None, "nobody listens: the engine connects"


@pytest.mark.parametrize(
    ("status", "body", "can"),
    [
        (200, '{"version":"0.32.0"}', True),
        (200, '{"version":"0.30.0rc1+cpu"}', True),
        (200, '{"version":"1.0"}', True),
        (200, '{"version":"0.29.1"}', False),
        (200, '{"version":"dev"}', False),
        (200, '{"version":32}', False),
        (200, "[]", False),
        (404, "", False),
    ],
)
def test_only_engines_that_name_whose_report_it_is_are_asked_for_one(status: int, body: str, can: bool) -> None:
    async def asked() -> bool:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
        async with httpx.AsyncClient(transport=transport) as client:
            return await reports_on_request("http://10.0.0.7:8000/", client=client)

    assert asyncio.run(asked()) is can


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
