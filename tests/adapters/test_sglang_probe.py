"""SGLang's load: pushed LoadStat messages, `/v1/loads`, the metrics page; both engines' probes as one interface."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import prefixroute_sglang
import prefixroute_vllm
import pytest
import sglang_streams as recorded
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixroute_sglang import EventSource, LoadFollower, LoadProbe, LoadStat, decode_load
from prefixroute_sglang.load_stats import MIN_RATE_TOKENS, PrefillRate, Reporter, stats_of_loads
from prefixroute_sglang.probe import load_reports
from publishing import run, running, until

from prefixroute.errors import DecodeError, UsageError
from prefixroute.load import LoadReport

encode = msgspec.msgpack.encode
SEEN = ["LoadStat", 0, 0, 0, 2048, 0, 0, 0, 1024, 244, 264336]
LOADS = json.loads((recorded.DATA / "server_p16.json").read_text())["v1_loads"]
PAGE = (recorded.DATA / "server_p16_metrics.txt").read_text()

# --- pushed ------------------------------------------------------------------------------------------------


def test_a_recorded_load_is_read_by_position() -> None:
    assert decode_load(encode(SEEN)) == LoadStat(
        capacity_tokens=2048, max_running=1024, prefilled_tokens=244, busy_us=264336
    )
    stat = decode_load(encode(["LoadStat", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    assert stat == LoadStat(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def test_only_the_first_six_elements_are_needed_and_more_are_ignored() -> None:
    assert decode_load(encode(["LoadStat", 1, 2, 3, 4, 5])) == LoadStat(1, 2, 3, 4, 5)
    assert decode_load(encode(["LoadStat", 1, 2, 3, 4, None, None])) == LoadStat(1, 2, 3, 4)
    assert decode_load(encode([*SEEN, "new", {}])) == decode_load(encode(SEEN))


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (b"\x91" * 100_000, "malformed"),
        (b"\xa2\xff\xfe", "malformed"),
        (encode(None), "shape"),
        (encode([]), "shape"),
        (encode(SEEN[:5]), "shape"),
        (encode(["LoadState", *SEEN[1:]]), "shape"),
        (encode({"type": "LoadStat"}), "shape"),
        (encode(["LoadStat", -1, 0, 0, 0, 0]), "value"),
        (encode(["LoadStat", 1.0, 0, 0, 0, 0]), "value"),
        (encode(["LoadStat", True, 0, 0, 0, 0]), "value"),
        (encode(["LoadStat", 2**63, 0, 0, 0, 0]), "value"),
    ],
)
def test_a_load_that_cannot_be_read_is_an_error_with_a_kind(payload: bytes, kind: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode_load(payload)
    assert caught.value.kind == kind


def test_a_load_becomes_a_report() -> None:
    assert Reporter().report(LoadStat(3, 2, 512, 2048, 1, 700, 1212, 64, 4000, 2_000_000)) == LoadReport(
        running=3, waiting=2, queued_tokens=700, prefill_tokens_per_s=2000.0, kv_used=0.25, capacity_tokens=2048
    )
    assert Reporter().report(LoadStat(used_tokens=9)).kv_used == 0
    assert Reporter().report(LoadStat(used_tokens=9, capacity_tokens=3)).kv_used == 1


def test_the_rate_is_that_between_readings_that_are_far_enough_apart() -> None:
    rate = PrefillRate()
    assert rate.note(MIN_RATE_TOKENS - 1, 10**6) == 0
    assert rate.note(2000, 10**6) == 2000
    assert rate.note(2500, 2 * 10**6) == 2000  # 500 tokens: a step's fixed cost would be most of it
    assert rate.note(6000, 2 * 10**6) == 4000
    assert rate.note(6000, 2 * 10**6) == 4000
    assert rate.note(9000, 2 * 10**6) == 4000  # no time has passed in which that could be
    assert rate.note(500, 10**6) == 0  # a new life
    assert rate.note(4000, 8 * 10**6) == 500
    assert rate.note(2**62, 8 * 10**6 + 1) == 0, "no engine is as fast as these totals say"


def test_each_rank_has_a_rate_of_its_own() -> None:
    reporter = Reporter()
    rates = [reporter.report(LoadStat(rank=r, prefilled_tokens=2000, busy_us=10**6 * (r + 1))) for r in (0, 1)]
    assert [report.prefill_tokens_per_s for report in rates] == [2000, 1000]


@pytest.fixture
def source(tmp_path: Path) -> EventSource:
    return EventSource(f"ipc://{tmp_path}/load", topic="load", bind=True)


def test_a_load_socket_is_followed(source: EventSource) -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.XPUB)
        socket.bind(source.endpoint)
        seen: list[tuple[int, LoadReport]] = []
        follower = LoadFollower(source, lambda rank, report: seen.append((rank, report)), clock=lambda: 7.0)
        assert follower.stats().messages == 0
        async with running(follower):
            assert await socket.recv() == b"\x01load"
            for seq, payload in enumerate([encode(SEEN), b"\xc1", encode(["LoadStat", 1, 0, 0, 2048, 3])]):
                await socket.send_multipart([b"load", struct.pack(">Q", seq), payload])
            await until(lambda: len(seen) == 2)
            with pytest.raises(UsageError, match="runs already"):
                await follower.run()
        assert [(rank, report.running, report.capacity_tokens) for rank, report in seen] == [(0, 0, 2048), (3, 1, 2048)]
        stats = follower.stats()
        assert (stats.messages, stats.decode_errors, stats.last_message_at) == (3, {"malformed": 1}, 7.0)
        # It can run again, and what the callback raises ends the run.
        async with running(follower):
            await socket.recv()
            assert await socket.recv() == b"\x01load"
            await socket.send_multipart([b"load", bytes(8), encode(SEEN)])
            await until(lambda: len(seen) == 3)
        socket.close(linger=0)
        context.destroy(linger=0)

    run(test)


def test_a_load_socket_that_cannot_be_used_is_the_callers_fault() -> None:
    with pytest.raises(UsageError, match="cannot connect"):
        asyncio.run(LoadFollower(EventSource("tcp://*:notaport", bind=True), lambda rank, report: None).run())


# --- asked -------------------------------------------------------------------------------------------------


def test_a_recorded_answer_gives_a_report_for_each_rank() -> None:
    (stat,) = stats_of_loads(LOADS)
    assert stat == LoadStat(capacity_tokens=2048, max_running=1024, prefilled_tokens=4074, busy_us=185441)
    busy = {"dp_rank": 1, "num_running_reqs": 2, "num_waiting_reqs": 3, "num_waiting_uncached_tokens": 900,
            "num_used_tokens": 512, "max_total_num_tokens": 2048}  # fmt: skip
    assert [Reporter().report(stat) for stat in stats_of_loads({"loads": [busy]})] == [
        LoadReport(running=2, waiting=3, queued_tokens=900, kv_used=0.25, capacity_tokens=2048)
    ]


@pytest.mark.parametrize("answer", [None, [], {}, {"loads": None}, {"loads": [None, 7, {}, {"dp_rank": 0}]}])
def test_an_answer_without_loads_says_nothing(answer: object) -> None:
    assert list(stats_of_loads(answer)) == []


def test_a_recorded_page_gives_a_report() -> None:
    assert load_reports(PAGE) == {0: LoadReport(kv_used=304 / 2048, capacity_tokens=2048)}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("sglang:num_running_reqs 4", {0: LoadReport(running=4)}),
        ('sglang:num_queue_reqs{dp_rank="2"} 5', {2: LoadReport(waiting=5)}),
        ('sglang:num_queue_reqs{dp_rank="x"} 5', {}),
        ("sglang:token_usage 0.5", {0: LoadReport(kv_used=0.5)}),
        ("sglang:kv_used_tokens 5\nsglang:token_usage 1.5", {0: LoadReport(kv_used=1.0)}),
        ("sglang:kv_used_tokens 5\nsglang:max_total_num_tokens 10", {0: LoadReport(kv_used=0.5, capacity_tokens=10)}),
        ("vllm:num_requests_running 4", {}),
    ],
)
def test_a_single_line(page: str, expected: dict[int, LoadReport]) -> None:
    assert load_reports(page) == expected


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
LOAD = st.dictionaries(st.sampled_from(sorted(LOADS["loads"][0])), SCALARS)


@given(st.lists(LOAD | SCALARS, max_size=3), st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_answer_gives_reports(loads: list[object], page: str) -> None:
    reporter = Reporter()
    for report in [*map(reporter.report, stats_of_loads({"loads": loads})), *load_reports(page).values()]:
        assert report.running >= 0 and report.prefill_tokens_per_s >= 0 and 0 <= report.kv_used <= 1


Answers = dict[str, httpx.Response | Exception]


def read(make: Callable[[httpx.AsyncClient], Any], answers: Answers, times: int = 1) -> list[Any]:
    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers.get(request.url.path, httpx.Response(404))
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, content=answer.content)

    async def body() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            probe = make(client)
            return [await probe.read_all() for _ in range(times)]

    return asyncio.run(body())


def plain(client: httpx.AsyncClient) -> LoadProbe:
    return LoadProbe("http://engine:30000/", client=client)


def test_loads_are_preferred_to_the_page() -> None:
    answers: Answers = {"/v1/loads": httpx.Response(200, json=LOADS), "/metrics": httpx.Response(200, text=PAGE)}
    (reports,) = read(plain, answers)
    assert reports[0].prefill_tokens_per_s == pytest.approx(4074 / 0.185441)
    assert (reports[0].kv_used, reports[0].capacity_tokens) == (0.0, 2048)


@pytest.mark.parametrize(
    "loads", [httpx.Response(404), httpx.Response(200, text="<html>"), httpx.ReadTimeout("slow")], ids=repr
)
def test_the_page_is_asked_when_loads_are_not_told(loads: httpx.Response | Exception) -> None:
    (reports,) = read(plain, {"/v1/loads": loads, "/metrics": httpx.Response(200, text=PAGE)})
    assert reports == {0: LoadReport(kv_used=304 / 2048, capacity_tokens=2048)}


def test_the_prefill_rate_is_that_between_two_readings() -> None:
    def loads(tokens: int, busy_us: int) -> httpx.Response:
        load = LOADS["loads"][0] | {"total_prefill_uncached_tokens": tokens, "total_prefill_busy_us": busy_us}
        return httpx.Response(200, json={"loads": [load]})

    answers: Answers = {"/v1/loads": loads(10_000, 10**6)}
    probes: list[LoadProbe] = []

    def make(client: httpx.AsyncClient) -> LoadProbe:
        probes.append(probes[0] if probes else plain(client))
        probes[0]._client = client
        return probes[0]

    rates = []
    for tokens, busy_us in ((10_000, 10**6), (20_000, 6 * 10**6)):
        answers["/v1/loads"] = loads(tokens, busy_us)
        rates.append(read(make, answers)[0][0].prefill_tokens_per_s)
    assert rates == [10_000, 2_000]


# --- one interface, two engines ----------------------------------------------------------------------------

VLLM_PAGE = 'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 0\n'
SGLANG_LOADS = {"loads": [{"dp_rank": 0, "num_running_reqs": 2}, {"dp_rank": 1, "num_running_reqs": 0}]}
ENGINES = [
    (prefixroute_vllm, "/metrics", httpx.Response(200, text=VLLM_PAGE)),
    (prefixroute_sglang, "/v1/loads", httpx.Response(200, json=SGLANG_LOADS)),
]


@pytest.mark.parametrize(("adapter", "path", "busy"), ENGINES, ids=["vllm", "sglang"])
class TestLoadProbe:
    def test_every_rank_is_reported(self, adapter: Any, path: str, busy: httpx.Response) -> None:
        (reports,) = read(lambda client: adapter.LoadProbe("http://e:1", client=client), {path: busy})
        assert reports == {0: LoadReport(running=2), 1: LoadReport()}

    @pytest.mark.parametrize(
        "answer",
        [
            httpx.Response(404),
            httpx.Response(503, text=VLLM_PAGE),
            httpx.Response(200, text=""),
            httpx.Response(200, content=b"\xff" * 100),
            httpx.Response(200, content=b"#" * (9 << 20)),
            httpx.ConnectError("refused"),
            httpx.ReadTimeout("slow"),
            httpx.RemoteProtocolError("nonsense"),
        ],
        ids=repr,
    )
    def test_an_engine_that_does_not_tell_is_none(
        self, adapter: Any, path: str, busy: httpx.Response, answer: httpx.Response | Exception
    ) -> None:
        answers: Answers = {"/metrics": answer, "/v1/loads": answer}
        assert read(lambda client: adapter.LoadProbe("http://e:1", client=client), answers) == [None]

    def test_a_503_counts_for_a_short_time(self, adapter: Any, path: str, busy: httpx.Response) -> None:
        now = 100.0
        probes: list[Any] = []

        def make(client: httpx.AsyncClient) -> Any:
            if not probes:
                probes.append(adapter.LoadProbe("http://e:1", refusing_for_s=1.0, clock=lambda: now))
            probes[0]._client = client
            return probes[0]

        def refusing() -> bool:
            return read(make, {path: busy})[0][0].refusing  # type: ignore[no-any-return]

        assert not refusing()
        probes[0].note_status(503)
        probes[0].note_status(500)  # says nothing about admission
        assert refusing()
        assert read(make, {path: busy})[0][0].reason == "the engine answered 503"
        now = 101.0
        assert not refusing()
        probes[0].note_status(503)
        probes[0].note_status(200)
        assert not refusing()
