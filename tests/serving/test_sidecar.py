"""What a sidecar does with requests: where they go, what a fault costs, and what is told of it."""

from __future__ import annotations

import asyncio
import json
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefixroute_serving.headers import read_budget
from prefixroute_serving.sidecar_config import ZoneRuleConfig
from sidecar_pair import EXPECTED, MODEL, PREFIX, Pair, run_pair, texts, until

from prefixroute import Decision
from prefixroute.emulator.tokenizer import ChatMessage, encode, render_chat


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sockets, whose paths must be short."""
    return tmp_path_factory.mktemp("s")


def test_a_prompt_goes_once_to_the_node_that_holds_its_prefix(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        reply = await pair.ask(pair.one, PREFIX + " and then")
        assert reply.headers["x-prefixroute-target"] == "node-2/0"
        assert int(reply.headers["x-prefixroute-matched"]) > 200
        assert reply.headers["x-prefixroute-reason"]
        usage = reply.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 200
        forwarded = pair.two.sidecar_faults.calls[-1]
        assert forwarded["x-prefixroute-hop"] == "1"
        # a request that has made its hop stays, even where nothing is cached
        hopped = await pair.client.post(
            f"{pair.one.url}/v1/completions",
            json={"model": MODEL, "prompt": PREFIX, "max_tokens": 1},
            headers={"x-prefixroute-hop": "1"},
        )
        assert hopped.headers["x-prefixroute-target"] == "node-1/0"
        assert json.loads(hopped.headers["x-prefixroute-load"])["prefill_tokens_per_s"] > 0

    run_pair(test, folder)


def test_the_same_answer_comes_from_either_node_streamed_or_not_text_or_tokens(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        for prompt in (PREFIX, encode(PREFIX)):
            for node in (pair.one, pair.two):
                whole = await pair.ask(node, prompt)
                assert whole.json()["choices"][0]["text"] == EXPECTED
                streamed = await pair.ask(node, prompt, stream=True)
                assert texts(streamed.content) == EXPECTED
                assert streamed.headers["content-type"].startswith("text/event-stream")

    run_pair(test, folder)


def test_chat_is_routed_by_the_rendered_conversation(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        messages = [{"role": "user", "content": PREFIX}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4}
        first = await pair.client.post(f"{pair.two.url}/v1/chat/completions", json=body)
        await pair.known(render_chat([ChatMessage("user", PREFIX)]))
        second = await pair.client.post(f"{pair.one.url}/v1/chat/completions", json=body)
        assert second.headers["x-prefixroute-target"] == "node-2/0"
        assert int(second.headers["x-prefixroute-matched"]) > 200
        assert second.json()["choices"] == first.json()["choices"]

    run_pair(test, folder)


@pytest.mark.parametrize("fault", ["down", "status 500", "status 503", "hang", "break before the first byte"])
def test_a_peer_that_does_not_answer_costs_no_answer(folder: Path, fault: str) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        faults = pair.two.sidecar_faults
        if fault == "down":  # the engine beside it must not be: such a node says itself that it cannot serve
            await pair.two.sidecar_server.aclose()
        elif fault == "hang":
            faults.hang = True
        elif fault.startswith("status"):
            faults.status = int(fault.split()[1])
        else:
            faults.break_after = 0
        for stream in (False, True):
            reply = await pair.ask(pair.one, PREFIX, stream=stream)
            assert reply.status_code == 200
            assert reply.headers["x-prefixroute-target"] == "node-1/0"
            text = texts(reply.content) if stream else reply.json()["choices"][0]["text"]
            assert text == EXPECTED
        # Whoever went down said so: its farewell may be here before the request is.
        assert pair.one.sidecar.site.counts.get("failed attempts", 0) >= 1 or fault == "down"
        # the peer is left alone afterwards: the second request did not try it, or tried it and failed over
        assert pair.one.sidecar.site.counts["local"] == 2

    # By the times, a busy machine's round trip may be worth more than the prefill that it saves.
    run_pair(test, folder)


def test_a_peer_that_is_busier_than_it_told_hands_the_prompt_back(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        one, two = pair.one.sidecar, pair.two.sidecar
        # Bookings of node 2 that node 1 cannot know of yet: they begin when node 1 has decided.
        decide = one._decide

        def decide_first(*args: Any) -> Decision:
            decision = decide(*args)
            assert decision.target == "node-2/0"
            now = two.driver.now()
            booked.append(two.node.route(list(range(9000)), now, forwarded=True))
            return decision

        booked: list[Decision] = []
        one._decide = decide_first  # type: ignore[method-assign]
        reply = await pair.ask(pair.one, PREFIX + " and then", tokens=1)
        assert reply.status_code == 200
        assert reply.headers["x-prefixroute-target"] == "node-1/0"
        assert float(pair.two.sidecar_faults.calls[-1]["x-prefixroute-budget-ms"]) > 0
        assert one.site.counts["handed back"] == 1
        assert "failed attempts" not in one.site.counts
        assert one.node.counters["outcomes_declined"] == two.node.counters["decisions_declined"] == 1
        row = next(row for row in one.node.stats(one.driver.now()).endpoints if row.endpoint == "node-2/0")
        assert row.usable
        assert row.wait_s > 2, "its reply told"
        one._decide = decide  # type: ignore[method-assign]

    run_pair(test, folder, policy="default")


@pytest.mark.parametrize(
    ("text", "budget_s"),
    [("250", 0.25), ("0", 0.0), (None, inf), ("", inf), ("soon", inf), ("-1", inf), ("nan", inf), ("1e999", inf)],
)
def test_a_budget_that_cannot_be_read_is_none(text: str | None, budget_s: float) -> None:
    assert read_budget(text) == budget_s


@pytest.mark.parametrize("where", ["engine", "sidecar"])
@pytest.mark.parametrize("events", [1, 3])
def test_a_stream_that_breaks_goes_on_from_another_engine(folder: Path, where: str, events: int) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        faults = pair.two.engine_faults if where == "engine" else pair.two.sidecar_faults
        faults.break_after = events
        reply = await pair.ask(pair.one, PREFIX, stream=True, stream_options={"include_usage": True})
        assert reply.headers["x-prefixroute-target"] == "node-2/0"
        assert texts(reply.content) == EXPECTED
        assert pair.one.sidecar.site.counts["resumed"] == 1

    run_pair(test, folder)


def test_an_engine_that_is_down_with_no_other_that_can_help_is_an_error_not_a_hang(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        pair.one.engine_faults.status = 500
        pair.two.engine_faults.status = 500
        reply = await pair.ask(pair.one, "short")
        assert reply.status_code == 500
        pair.one.engine_faults.status = 503
        pair.two.engine_faults.status = 503
        assert (await pair.ask(pair.one, "short")).status_code == 503

    run_pair(test, folder)


def test_a_clients_mistakes_are_passed_on_and_counted_against_nobody(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        url = f"{pair.one.url}/v1/completions"
        assert (await pair.client.post(url, content=b"{nonsense")).status_code == 400
        assert (await pair.client.post(url, content=b"[1]")).status_code == 400
        assert (await pair.client.post(url, json={"model": "other", "prompt": "x"})).status_code == 404
        for body in ({"prompt": []}, {"prompt": [2**40]}, {"prompt": "x", "max_tokens": -1}, {"prompt": {"a": 1}}, {}):
            reply = await pair.client.post(url, json={"model": MODEL, **body})
            assert 400 <= reply.status_code < 500, body
            assert reply.json()["error"]["message"]
        assert "failed attempts" not in pair.one.sidecar.site.counts
        assert (await pair.ask(pair.one, "fine")).status_code == 200

    run_pair(test, folder)


def test_prompts_that_cannot_be_told_exactly_match_nothing(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        message = {"role": "user", "content": [{"type": "text", "text": PREFIX}, image]}
        body = {"model": MODEL, "messages": [message]}
        await pair.client.post(f"{pair.one.url}/v1/chat/completions", json=body)
        assert pair.one.sidecar.site.counts["local"] == 1
        assert "forwarded" not in pair.one.sidecar.site.counts

    run_pair(test, folder)


def test_a_node_whose_engine_is_down_lets_the_others_serve(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.one.engine_server.aclose()
        for stream in (False, True):
            reply = await pair.ask(pair.one, PREFIX, stream=stream)
            assert reply.headers["x-prefixroute-target"] == "node-2/0"
            assert (texts(reply.content) if stream else reply.json()["choices"][0]["text"]) == EXPECTED

    # There is nobody else to ask: a machine that is busy with other work may take its time.
    run_pair(test, folder, patience_s=10.0)


def test_without_routing_nothing_leaves_whatever_happens(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        for status in (503, 500):
            pair.one.engine_faults.status = status
            assert (await pair.ask(pair.one, PREFIX)).status_code == status
        pair.one.engine_faults.status = None
        assert (await pair.ask(pair.one, PREFIX)).headers["x-prefixroute-target"] == "node-1/0"
        assert "forwarded" not in pair.one.sidecar.site.counts

    run_pair(test, folder, policy="none")


def test_nothing_goes_where_a_zones_rule_forbids_it(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        before = len(pair.two.sidecar_faults.calls)
        assert (await pair.ask(pair.one, PREFIX)).headers["x-prefixroute-target"] == "node-1/0"
        pair.one.engine_faults.status = 503
        assert (await pair.ask(pair.one, PREFIX + " more")).status_code == 503
        assert len(pair.two.sidecar_faults.calls) == before
        node, now = pair.one.sidecar.node, pair.one.sidecar.driver.now
        await until(lambda: all(way.rtt_s is not None for way in node.stats(now()).round_trips))
        get, url = pair.client.get, pair.one.url
        (explained,) = (await get(f"{url}/prefixroute/explain")).json()["decisions"]
        assert (explained["zone"], explained["fallbacks"]) == ("eu", [])
        assert [row["zone"] for row in explained["candidates"]] == ["eu"]
        state = (await get(f"{url}/prefixroute/stats")).json()["state"]
        assert state["zone"] == "eu"
        assert {row["endpoint"]: row["zone"] for row in state["endpoints"]} == {"node-1/0": "eu", "node-2/0": "us"}
        (way,) = state["round_trips"]
        assert (way["peer"], way["zone"]) == ("node-2", "us")
        assert way["rtt_s"] > 0
        page = (await get(f"{url}/metrics")).text
        assert 'prefixroute_peer_rtt_seconds{node="node-1",peer="node-2",zone="us"}' in page
        assert "prefixroute_zone_forwards" not in page

    run_pair(test, folder, zones=(ZoneRuleConfig(source="eu", to="us", forward="never"),))


def test_a_prompt_is_tokenised_once(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        for _ in range(3):
            assert (await pair.ask(pair.one, "one two three")).status_code == 200
        assert pair.one.engine_faults.paths["/tokenize"] == 1

    run_pair(test, folder)


def test_a_forwarded_text_is_not_tokenised_again_by_a_peer_that_shares_the_secret(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        asked = pair.two.engine_faults.paths
        for tail, times in (("a", 2), ("b", 2), ("c", 2)):  # the warm-up, and the first forward, which learns
            reply = await pair.ask(pair.one, f"{PREFIX} {tail}")
            assert reply.headers["x-prefixroute-target"] == "node-2/0"
            assert reply.json()["usage"]["prompt_tokens"] == len(encode(f"{PREFIX} {tail}"))
            assert asked["/tokenize"] == times
        calls = pair.two.sidecar_faults.calls
        assert ["x-prefixroute-tokens" in call for call in calls] == [False, False, True, True]
        assert not any("x-prefixroute-tokens" in call for call in pair.two.engine_faults.calls)
        node = pair.two.sidecar.node
        rows = {row.endpoint: row.accuracy for row in node.stats(pair.two.sidecar.driver.now()).endpoints}
        assert rows["node-2/0"].high == 0
        # ids are as quickly read, so they are not carried
        await pair.ask(pair.one, encode(f"{PREFIX} d"))
        assert "x-prefixroute-tokens" not in calls[-1]

    run_pair(test, folder, secret="s")


def test_without_a_secret_no_tokens_are_carried(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        for tail in ("a", "b"):
            assert (await pair.ask(pair.one, f"{PREFIX} {tail}")).headers["x-prefixroute-target"] == "node-2/0"
        assert not any("x-prefixroute-tokens" in call for call in pair.two.sidecar_faults.calls)

    run_pair(test, folder)


def test_tokens_that_a_client_claims_are_not_believed(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        body = json.dumps({"model": MODEL, "prompt": "one two three", "max_tokens": 1}).encode()
        claimed = body + bytes(4 * 500)
        for hop in ({"x-prefixroute-hop": "1"}, {}):
            headers = {"x-prefixroute-tokens": f"{len(body)}-{'0' * 32}", **hop}
            reply = await pair.client.post(f"{pair.one.url}/v1/completions", content=claimed, headers=headers)
            assert reply.status_code == (200 if hop else 400)
        assert pair.one.engine_faults.paths["/tokenize"] == 1
        assert reply.json()["error"]["message"].startswith("the body is not JSON")

    run_pair(test, folder, secret="s")


def test_a_client_that_leaves_frees_the_engine(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        for stream in (False, True):
            body = {"model": MODEL, "prompt": PREFIX, "max_tokens": 2000, "stream": stream}
            before = pair.one.engine.counters["cancelled"]
            async with httpx.AsyncClient(trust_env=False) as client:
                url, stays = f"{pair.one.url}/v1/completions", {"x-prefixroute-hop": "1"}
                task = asyncio.create_task(client.post(url, json=body, headers=stays, timeout=60))
                await until(lambda: pair.one.engine.load().running == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(lambda before=before: pair.one.engine.counters["cancelled"] == before + 1)  # type: ignore[misc]
            await until(lambda: pair.one.engine.load().running == 0)

    run_pair(test, folder)


def test_decisions_are_explained_and_counted(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        for tail in ("a", "b", "c"):
            await pair.ask(pair.one, f"{PREFIX} {tail}")
        get = pair.client.get
        explained = (await get(f"{pair.one.url}/prefixroute/explain", params={"last": 2})).json()["decisions"]
        assert len(explained) == 2
        text = (await get(f"{pair.one.url}/prefixroute/explain", params={"format": "text"})).text
        assert "node-2/0" in text
        assert "node-1/0" in text
        assert (await get(f"{pair.one.url}/prefixroute/explain", params={"last": "x"})).status_code == 400
        assert (await get(f"{pair.one.url}/prefixroute/explain", params={"last": "0"})).json() == {"decisions": []}
        stats = (await get(f"{pair.one.url}/prefixroute/stats", params={"samples": 1})).json()
        assert stats["node"] == "node-1"
        assert stats["requests"]["forwarded"] == 3
        assert len(stats["decisions"]["us"]) == stats["decisions"]["count"] == 3
        assert stats["gossip"]["bytes_sent"] > 0
        prometheus = (await get(f"{pair.one.url}/metrics")).text
        assert "prefixroute" in prometheus
        assert (await get(f"{pair.one.url}/health")).json() == {"status": "ok", "node": "node-1"}

    run_pair(test, folder)


def test_predicted_and_reported_hits_are_compared_where_they_were_predicted(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            reply = await pair.ask(pair.one, f"{PREFIX} a", **options)
            assert reply.status_code == 200
            assert reply.headers["x-prefixroute-target"] == "node-2/0"
        for node in (pair.one, pair.two):
            stats = (await pair.client.get(f"{node.url}/prefixroute/stats")).json()
            rows = {row["endpoint"]: row["accuracy"] for row in stats["state"]["endpoints"]}
            assert rows["node-2/0"]["compared"] == (2 if node is pair.one else 3), "the warm-up was predicted at home"
            assert rows["node-2/0"]["high"] == 0
            assert rows["node-2/0"]["cached_tokens"] >= rows["node-2/0"]["predicted_tokens"] > 200
            assert rows["node-1/0"]["compared"] == 0
        page = (await pair.client.get(f"{pair.one.url}/metrics")).text
        samples = [line for line in page.splitlines() if line.startswith("prefixroute_endpoint_predictions_total")]
        assert sum(float(line.split()[-1]) for line in samples if 'endpoint="node-2/0"' in line) == 2
        assert len(samples) == 8

    run_pair(test, folder)


def test_what_is_not_routed_is_the_engines_to_answer(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        models = (await pair.client.get(f"{pair.one.url}/v1/models")).json()
        assert models["data"][0]["id"] == MODEL
        body = {"model": MODEL, "prompt": "one two"}
        tokens = (await pair.client.post(f"{pair.one.url}/tokenize", json=body)).json()["tokens"]
        assert tokens == encode("one two")
        assert (await pair.client.get(f"{pair.one.url}/nothing")).status_code == 404
        await pair.one.servers.aclose()

    run_pair(test, folder)


def error_event(status: object, kind: str) -> bytes:
    """What a streaming engine says instead of an answer."""
    error = {"object": "error", "message": "told to", "type": kind, "param": None, "code": status}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


FULL = error_event(503, "SERVICE_UNAVAILABLE")


@pytest.mark.parametrize("first", [FULL, b": keep-alive\n\n" + FULL])
def test_a_refusal_in_a_stream_is_a_refusal_before_the_client_hears_of_it(folder: Path, first: bytes) -> None:
    async def test(pair: Pair) -> None:
        one = pair.one.sidecar
        pair.one.engine_faults.first_event = first
        reply = await pair.ask(pair.one, PREFIX, stream=True)
        assert texts(reply.content) == EXPECTED
        assert one.node.counters["outcomes_refused"] == 1
        assert "outcomes_failed" not in one.node.counters
        if first == FULL:
            assert reply.headers["x-prefixroute-target"] == "node-2/0"
            assert "resumed" not in one.site.counts

    run_pair(test, folder)


def test_a_peers_engine_that_refuses_in_a_stream_costs_no_answer(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        pair.two.engine_faults.first_event = FULL
        reply = await pair.ask(pair.one, PREFIX, stream=True)
        assert reply.headers["x-prefixroute-target"] == "node-1/0"
        assert texts(reply.content) == EXPECTED
        assert pair.one.sidecar.node.counters["outcomes_refused"] == 1

    run_pair(test, folder)


@pytest.mark.parametrize(
    ("status", "told", "failures"), [(400, 400, 0), (500, 500, 2), (503, 503, 0), ("overloaded", 500, 2), (200, 500, 2)]
)
def test_an_error_as_first_event_becomes_a_status(folder: Path, status: object, told: int, failures: int) -> None:
    async def test(pair: Pair) -> None:
        for node in (pair.one, pair.two):
            node.engine_faults.first_event = error_event(status, "Told")
        reply = await pair.ask(pair.one, PREFIX, stream=True)
        assert reply.status_code == told
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["error"]["message"] == "told to"
        counters = pair.one.sidecar.node.counters
        assert counters["outcomes_failed"] == failures
        assert counters["outcomes_refused"] == (2 if status == 503 else 0)
        assert counters["outcomes_cancelled"] == (1 if status == 400 else 0)

    run_pair(test, folder)


def test_a_stream_without_an_event_is_no_answer(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        for nothing in (b"", b"data: {"):
            pair.one.engine_faults.first_event = nothing
            reply = await pair.ask(pair.one, PREFIX, stream=True)
            assert reply.headers["x-prefixroute-target"] == "node-2/0"
            assert texts(reply.content) == EXPECTED
        assert "resumed" not in pair.one.sidecar.site.counts

    run_pair(test, folder)
