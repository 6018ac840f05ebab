"""Load and capacity from a vLLM metrics page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixroute_vllm import LoadProbe
from prefixroute_vllm.probe import load_reports, parse_samples

from prefixroute.load import LoadReport

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="discard_all"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.5e+06
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="400",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1001",sliding_window="None"} 1.0
"""

BUSY = LoadReport(running=2, waiting=3, kv_used=0.25, capacity_tokens=399 * 32)
ASLEEP = LoadReport(capacity_tokens=16_000, refusing=True, reason="asleep (discard_all)", asleep=True)


def test_a_page_gives_a_report_for_each_rank() -> None:
    assert load_reports(PAGE) == {0: BUSY, 1: ASLEEP}


@pytest.mark.parametrize(
    ("states", "refusing", "asleep"),
    [
        ({"awake": 1, "weights_offloaded": 0, "discard_all": 0}, False, False),
        ({"awake": 0, "weights_offloaded": 1, "discard_all": 0}, True, True),
        ({"discard_all": 1, "weights_offloaded": 0, "awake": 0}, True, True),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 0}, True, False),  # level 0: paused, the cache kept
        ({}, False, False),
    ],
)
def test_an_engine_that_is_not_awake_refuses_and_only_real_sleep_drops_the_cache(
    states: dict[str, int], refusing: bool, asleep: bool
) -> None:
    lines = [f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {on}' for name, on in states.items()]
    report = load_reports("\n".join(["vllm:num_requests_running 0", *lines]))[0]
    assert (report.refusing, report.asleep) == (refusing, asleep)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm:num_requests_running 4", LoadReport(running=4)),
        ("vllm:num_requests_running{} 4 1795957357000", LoadReport(running=4)),
        ("vllm:num_requests_waiting 7.0", LoadReport(waiting=7)),
        ("vllm:num_requests_waiting 1e300", LoadReport(waiting=1 << 32)),
        ("vllm:gpu_cache_usage_perc 0.5", LoadReport(kv_used=0.5)),  # until 0.11
        ("vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.25", LoadReport(kv_used=0.25)),
        ("vllm:kv_cache_usage_perc 1.5", LoadReport(kv_used=1.0)),
        (r'vllm:num_requests_running{model_name="a\"}, {b\\",engine="0"} 1', LoadReport(running=1)),
    ],
)
def test_a_single_line(line: str, expected: LoadReport) -> None:
    assert load_reports(line) == {0: expected}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "<html>busy</html>",
        "vllm:num_requests_running",
        "vllm:num_requests_running NaN",
        "vllm:num_requests_running +Inf",
        "vllm:num_requests_running -1",
        "vllm:num_requests_running many",
        'vllm:num_requests_running{engine="x"} 1',
        'vllm:num_requests_running{engine="-1"} 1',
        "other:num_requests_running 1",
        'vllm:cache_config_info{block_size="32",num_gpu_blocks="400"} 1.0',
    ],
)
def test_a_page_that_says_nothing_about_load(line: str) -> None:
    assert load_reports(line) == {}


@pytest.mark.parametrize(
    ("labels", "capacity"),
    [
        ('block_size="32",num_gpu_blocks="400"', 12_768),
        ('block_size="32",num_gpu_blocks="1"', 0),
        ('block_size="32",num_gpu_blocks="0"', 0),
        ('block_size="32",num_gpu_blocks="None"', 0),
        ('num_gpu_blocks="400"', 0),
        ('block_size="3.2",num_gpu_blocks="400"', 0),
    ],
)
def test_capacity_is_all_blocks_but_the_null_block(labels: str, capacity: int) -> None:
    page = f"vllm:num_requests_running 1\nvllm:cache_config_info{{{labels}}} 1.0"
    assert load_reports(page) == {0: LoadReport(running=1, capacity_tokens=capacity)}


@given(st.text() | st.lists(st.sampled_from(PAGE.splitlines()) | st.text(max_size=30)).map("\n".join))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_reports(page: str) -> None:
    for report in load_reports(page).values():
        assert report.running >= 0 and report.waiting >= 0 and 0 <= report.kv_used <= 1
    for sample in parse_samples(page):
        assert sample.value >= 0


# --- asking ------------------------------------------------------------------------------------------------


def read(probe_with: Callable[[httpx.AsyncClient], LoadProbe], response: httpx.Response | Exception) -> object:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://engine:8000/metrics"
        if isinstance(response, Exception):
            raise response
        return response

    async def body() -> object:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await probe_with(client).read_all()

    return asyncio.run(body())


def plain_probe(client: httpx.AsyncClient) -> LoadProbe:
    return LoadProbe("http://engine:8000/", client=client)


def test_the_probe_reads_every_rank() -> None:
    assert read(plain_probe, httpx.Response(200, text=PAGE)) == {0: BUSY, 1: ASLEEP}


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(404),
        httpx.Response(503, text=PAGE),
        httpx.Response(200, text=""),
        httpx.Response(200, content=b"\xff" * 100),
        httpx.Response(200, content=b"#" * (9 << 20)),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("nonsense"),
    ],
    ids=repr,
)
def test_an_engine_that_does_not_tell_is_none(response: httpx.Response | Exception) -> None:
    assert read(plain_probe, response) is None


def test_a_503_counts_for_a_short_time() -> None:
    now = 100.0
    probes: list[LoadProbe] = []

    def make(client: httpx.AsyncClient) -> LoadProbe:
        if not probes:
            probes.append(LoadProbe("http://engine:8000", client=client, refusing_for_s=1.0, clock=lambda: now))
        probes[0]._client = client
        return probes[0]

    def report() -> object:
        reports = read(make, httpx.Response(200, text=PAGE))
        assert isinstance(reports, dict)
        return reports[0]

    refusing = LoadReport(
        running=2, waiting=3, kv_used=0.25, capacity_tokens=399 * 32, refusing=True, reason="the engine answered 503"
    )
    assert report() == BUSY
    probes[0].note_status(503)
    assert report() == refusing
    probes[0].note_status(500)  # says nothing about admission
    now = 100.9
    assert report() == refusing
    now = 101.0
    assert report() == BUSY
    probes[0].note_status(503)
    probes[0].note_status(200)
    assert report() == BUSY


async def serve_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(PAGE)}\r\nConnection: close\r\n\r\n{PAGE}".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def test_a_probe_with_a_client_of_its_own() -> None:
    async def body() -> None:
        server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        probe = LoadProbe(f"http://127.0.0.1:{port}")
        assert await probe.read() == BUSY
        assert await probe.read(1) == ASLEEP
        assert await probe.read(2) is None
        server.close()
        await server.wait_closed()
        assert await probe.read() is None

    asyncio.run(body())


def test_label_values_are_unescaped() -> None:
    (sample,) = parse_samples(r'vllm:num_requests_running{a="x\\y\"z\n",b=""} 1')
    assert sample.labels == {"a": 'x\\y"z\n', "b": ""}
