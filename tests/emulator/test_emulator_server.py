"""The emulated engine through its HTTP interface, in process: answers, streams, errors, push-back, leaving."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixroute.emulator import EmulatedEngine, EngineConfig, KvEventsConfig, Limits, ServiceModel, encode, http_app
from prefixroute.errors import UsageError

NO_TIME = ServiceModel(time_scale=0)
NEVER = ServiceModel(overhead_s=1e6)  # a prefill that does not end while a test runs

Test = Callable[[EmulatedEngine, httpx.AsyncClient], Coroutine[Any, Any, None]]


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[tuple[EmulatedEngine, httpx.AsyncClient]]:
    async with EmulatedEngine(config) as engine:
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield engine, client


def with_engine(test: Test, **options: Any) -> None:
    async def main() -> None:
        async with running(EngineConfig(**{"service": NO_TIME, **options})) as (engine, client):
            await test(engine, client)

    asyncio.run(main())


async def complete(client: httpx.AsyncClient, prompt: object, **fields: object) -> Any:
    reply = await client.post("/v1/completions", json={"prompt": prompt, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so; the test's own time limit ends a vain wait."""
    while not condition():
        await asyncio.sleep(0)


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def events_of(text: str) -> list[Any]:
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# --- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "hit"), [(300, 288), (256, 224), (31, 0)])
def test_usage_tells_the_cached_tokens_as_vllm_counts_them(tokens: int, hit: int) -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        answers = [await complete(client, list(range(tokens)), max_tokens=5) for _ in range(2)]
        assert [cached(answer) for answer in answers] == [0, hit]
        assert answers[1]["usage"] == {
            "prompt_tokens": tokens,
            "completion_tokens": 5,
            "total_tokens": tokens + 5,
            "prompt_tokens_details": {"cached_tokens": hit},
        }
        assert answers[1]["choices"][0]["finish_reason"] == "length"
        assert len(answers[1]["choices"][0]["text"].split()) == 5

    with_engine(test, block_size=32)


def test_answer_is_the_same_on_every_engine_in_every_state_and_for_text_or_ids() -> None:
    texts: list[str] = []

    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        await complete(client, list(range(50)))
        extras: list[dict[str, object]] = [{}, {"cache_salt": "x"}, {"temperature": 1.5, "seed": 7, "stop": ["a"]}]
        for prompt, extra in itertools.product(("a b c " * 30, encode("a b c " * 30)), extras):
            answer = await complete(client, prompt, max_tokens=30, **extra)
            texts.append(answer["choices"][0]["text"])

    with_engine(test)
    with_engine(test, block_size=32, capacity_blocks=7, hash_seed="other")
    assert len(texts) == 12 and len(set(texts)) == 1


def test_default_length_applies_when_a_request_has_none() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        assert (await complete(client, "hello"))["usage"]["completion_tokens"] == 7
        assert (await complete(client, list(range(97))))["usage"]["completion_tokens"] == 3

    with_engine(test, default_max_tokens=7, max_model_len=100)


def test_salts_and_adapters_do_not_share_cache() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        prompt = list(range(33))
        assert cached(await complete(client, prompt)) == 0
        for extra in ({"cache_salt": "a"}, {"model": "lo"}, {"model": "lo", "cache_salt": "a"}, {"model": "lo2"}):
            assert cached(await complete(client, prompt, **extra)) == 0
            assert cached(await complete(client, prompt, **extra)) == 32
        assert cached(await complete(client, prompt, model="m", cache_salt=None)) == 32

    with_engine(test, lora_modules=("lo", "lo2"))


def test_chat_answers_and_the_next_turn_finds_prompt_and_answer_cached() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        messages: list[Any] = [{"role": "system", "content": "be kind and brief"}]
        messages.append({"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]})
        body = {"messages": messages, "max_completion_tokens": 20}
        first = (await client.post("/v1/chat/completions", json=body)).json()
        assert first["object"] == "chat.completion"
        message = first["choices"][0]["message"]
        assert message["role"] == "assistant" and len(message["content"].split()) == 20
        messages += [message, {"role": "user", "content": "go on"}]
        second = (await client.post("/v1/chat/completions", json={"messages": messages})).json()
        # The last output token is never computed, so all before it are cached.
        assert cached(second) == first["usage"]["total_tokens"] - 1

    with_engine(test, block_size=1)


def test_completion_stream_sends_a_chunk_a_token_then_usage_then_done() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        whole = await complete(client, list(range(40)), max_tokens=4)
        body = {"prompt": list(range(40)), "max_tokens": 4, "stream": True}
        reply = await client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
        assert reply.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events_of(reply.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
        assert {chunk["id"] for chunk in [*chunks, last]} == {last["id"]}
        assert last["choices"] == [] and cached(last) == 32
        assert last["usage"]["completion_tokens"] == 4
        plain = events_of((await client.post("/v1/completions", json=body)).text)
        assert len(plain) == 4 and not any("usage" in chunk for chunk in plain)

    with_engine(test)


def test_chat_stream_opens_with_the_role_and_says_the_same_as_the_whole_answer() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        chunks = events_of((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert len(deltas) == 7
        assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

    with_engine(test)


def test_request_id_of_the_caller_becomes_the_answers() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "r1"})
        assert reply.json()["id"] == "cmpl-r1"

    with_engine(test)


# --- other routes ------------------------------------------------------------------------------------------


def test_tokenize_gives_the_ids_that_the_engine_uses() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        text = (await client.post("/tokenize", json={"prompt": "one two"})).json()
        assert text == {"count": 2, "max_model_len": 6400, "tokens": encode("one two")}
        messages = [{"role": "user", "content": "hello"}]
        chat = (await client.post("/tokenize", json={"messages": messages, "model": "m"})).json()
        assert chat["tokens"] == encode("user: hello\nassistant:")
        assert (await client.post("/tokenize", json={})).status_code == 400

    with_engine(test)


def test_metrics_count_tokens_and_name_the_capacity_with_the_null_block() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await complete(client, list(range(40)), max_tokens=3)
        text = (await client.get("/metrics")).text
        labels = '{engine="0",model_name="a \\"b\\""}'
        for line in (
            f"vllm:num_requests_running{labels} 0.0",
            f"vllm:num_requests_waiting{labels} 0.0",
            f"vllm:kv_cache_usage_perc{labels} 0.0",
            f"vllm:prefix_cache_queries_total{labels} 80.0",
            f"vllm:prefix_cache_hits_total{labels} 32.0",
            f"vllm:prompt_tokens_cached_total{labels} 32.0",
            f"vllm:generation_tokens_total{labels} 6.0",
        ):
            assert line in text.split("\n")
        info = next(line for line in text.split("\n") if line.startswith("vllm:cache_config_info{"))
        assert 'block_size="16"' in info and 'num_gpu_blocks="401"' in info

    with_engine(test, model='a "b"')


def test_metrics_are_read_by_the_prometheus_client() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        text = (await client.get("/metrics")).text
        names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
        assert {"vllm:num_requests_running", "vllm:prefix_cache_hits_total", "vllm:cache_config_info"} <= names

    with_engine(test)


def test_load_and_metrics_count_requests_that_run_and_wait() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        tasks = [asyncio.create_task(complete(client, [n] * 40)) for n in range(3)]
        await until(lambda: engine.load().waiting == 2)
        assert (await client.get("/load")).json() == {"server_load": 3}
        text = (await client.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="0",model_name="m"} 1.0' in text
        assert 'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0' in text
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0075\n' in text
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await client.get("/load")).json() == {"server_load": 1}  # its chunk is being computed

    with_engine(test, service=NEVER)


def test_models_lists_the_model_and_its_adapters() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        models = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("m", None), ("lo", "m")]
        assert models[0]["max_model_len"] == 6400

    with_engine(test, lora_modules=("lo",))


def test_health_follows_the_engines_life() -> None:
    async def main() -> None:
        engine = EmulatedEngine(EngineConfig())
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
            await engine.start()
            assert (await client.get("/health")).status_code == 200
            await engine.stop()
            await engine.stop()
            assert (await client.get("/health")).status_code == 503

    asyncio.run(main())


def test_reset_is_refused_while_a_request_runs() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        task = asyncio.create_task(complete(client, [1] * 40))
        await until(lambda: engine.load().running == 1)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": False}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with_engine(test, service=NEVER)


def test_event_sources_are_told_even_when_events_are_off() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        sources = (await client.get("/kv_event_sources")).json()
        assert list(sources) == ["0"] and sources["0"]["enable_kv_cache_events"] is False

    with_engine(test)


# --- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{not json", 400, "not valid JSON"),
        (b"", 400, "not valid JSON"),
        (b"[1]", 400, "JSON object"),
        ({}, 400, "'prompt' must be"),
        ({"prompt": 7}, 400, "'prompt' must be"),
        ({"prompt": ["a", "b"]}, 400, "'prompt' must be"),
        ({"prompt": [1, True]}, 400, "'prompt' must be"),
        ({"prompt": [1, -1]}, 400, "'prompt' must be"),
        ({"prompt": [1 << 32]}, 400, "'prompt' must be"),
        ({"prompt": [1.5]}, 400, "'prompt' must be"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [1] * 160}, 400, "maximum context length is 160"),
        ({"prompt": [1] * 100, "max_tokens": 61}, 400, "maximum context length is 160"),
        ({"prompt": "x", "max_tokens": 0}, 400, "'max_tokens' must be"),
        ({"prompt": "x", "max_tokens": "4"}, 400, "'max_tokens' must be"),
        ({"prompt": "x", "max_tokens": True}, 400, "'max_tokens' must be"),
        ({"prompt": "x", "stream": 1}, 400, "'stream' must be"),
        ({"prompt": "x", "stream_options": {}}, 400, "'stream_options'"),
        ({"prompt": "x", "stream": True, "stream_options": 4}, 400, "'stream_options'"),
        ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}, 400, "'include_usage'"),
        ({"prompt": "x", "n": 2}, 400, "'n' is not emulated"),
        ({"prompt": "x", "echo": True}, 400, "'echo' is not emulated"),
        ({"prompt": "x", "logprobs": 3}, 400, "'logprobs' is not emulated"),
        ({"prompt": "x", "cache_salt": ""}, 400, "'cache_salt'"),
        ({"prompt": "x", "cache_salt": 4}, 400, "'cache_salt'"),
        ({"prompt": "x", "model": 4}, 400, "'model' must be text"),
        ({"prompt": "x", "model": "gpt"}, 404, "does not exist"),
    ],
)
def test_wrong_completion_requests_are_told_what_is_wrong(body: Any, status: int, words: str) -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await client.post("/v1/completions", content=content)
        error = reply.json()["error"]
        assert reply.status_code == error["code"] == status
        assert words in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert engine.cache.stats().in_use == 0

    with_engine(test, capacity_blocks=10)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        ["hello"],
        [{"content": "x"}],
        [{"role": "user", "content": 4}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_wrong_messages_are_refused(messages: object) -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/chat/completions", json={"messages": messages})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"

    with_engine(test)


def test_harmless_values_and_unknown_fields_are_accepted() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        await complete(client, "x", n=1, echo=False, logprobs=None, best_of=1, model=None, user="u", vllm_xargs={})
        await complete(client, "x", model="anything")

    with_engine(test, any_model=True)


def test_unknown_routes_and_methods_get_json_errors() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        assert (await client.get("/nope")).json()["error"]["code"] == 404
        assert (await client.get("/v1/completions")).json()["error"]["code"] == 405

    with_engine(test)


def test_body_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "MAX_BODY_BYTES", 100)

    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json={"prompt": "x" * 200})
        assert reply.status_code == 413

    with_engine(test)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0},
        {"capacity_blocks": 0},
        {"model": ""},
        {"max_model_len": 6401},
        {"max_model_len": -1},
        {"default_max_tokens": 0},
    ],
)
def test_impossible_configurations_are_the_callers_error(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        EngineConfig(**options)


@pytest.mark.parametrize("text", ["{", "[]", '{"foo":1}', '{"publisher":"kafka"}', '{"buffer_steps":-1}'])
def test_wrong_event_configurations_are_the_callers_error(text: str) -> None:
    with pytest.raises(UsageError, match="kv events config"):
        KvEventsConfig.from_json(text)


# --- push-back and leaving ---------------------------------------------------------------------------------


def test_requests_past_the_queue_limit_get_503_and_are_counted() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        tasks = [asyncio.create_task(complete(client, [n] * 40)) for n in range(4)]
        await until(lambda: sum(engine.load()[:2]) == 4)
        for _ in range(2):
            reply = await client.post("/v1/completions", json={"prompt": "x"})
            assert reply.status_code == 503 and "retry-after" not in reply.headers
            assert "engine is currently busy" in reply.json()["error"]["message"]
            assert reply.json()["error"]["type"] == "ServiceUnavailableError"
        assert 'reason="max_num_queued_reqs"} 2.0' in (await client.get("/metrics")).text
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_engine(test, service=NEVER, limits=Limits(max_num_queued_reqs=4))


async def left_alone(engine: EmulatedEngine, body: dict[str, Any], leave: Awaitable[None]) -> list[Any]:
    """Post a completion over bare ASGI, disconnect when `leave` is done, and return what was sent."""
    sent: list[Any] = []
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive() -> Any:
        for message in messages:
            return message
        await leave
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await engine.app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_waiting_is_forgotten(stream: bool) -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(complete(client, [1] * 40))
        await until(lambda: engine.load().running == 1)
        body = {"prompt": [2] * 40, "stream": stream}
        await left_alone(engine, body, until(lambda: engine.load().waiting == 1))
        assert engine.load()[:2] == (1, 0)
        assert engine.counters["cancelled"] == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    with_engine(test, service=NEVER)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_decoding_frees_its_blocks(stream: bool) -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        def decoding() -> bool:
            return engine.cache.stats().in_use > 0 and engine.load().queued_tokens == 0

        body = {"prompt": [2] * 40, "stream": stream, "max_tokens": 100}
        sent = await left_alone(engine, body, until(decoding))
        assert engine.load()[:2] == (0, 0)
        assert engine.cache.stats().in_use == 0
        assert b"[DONE]" not in b"".join(message.get("body", b"") for message in sent)
        engine.cache._check()

    with_engine(test, service=ServiceModel(overhead_s=0, decode_s_per_token=1e6))


def test_stopping_the_engine_ends_what_it_serves() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": [1] * 40, "max_tokens": 9}
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        stream = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": True}))
        await until(lambda: sum(engine.load()[:2]) == 2)
        await engine.stop()
        assert (await whole).status_code == 503
        assert "[DONE]" not in (await stream).text

    with_engine(test, service=NEVER)


def test_many_requests_at_once_on_a_small_cache_are_all_served() -> None:
    async def test(engine: EmulatedEngine, client: httpx.AsyncClient) -> None:
        bodies = [{"prompt": [n % 3] * (20 + n % 7), "max_tokens": 1 + n % 5, "stream": bool(n % 2)} for n in range(60)]
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        assert [reply.status_code for reply in replies] == [200] * 60
        assert engine.load() == (0, 0, 0)
        assert engine.cache.stats().in_use == 0
        engine.cache._check()

    with_engine(
        test, block_size=4, capacity_blocks=12, service=ServiceModel(1e6, 1e-4, 1e-4), limits=Limits(max_num_seqs=3)
    )
