"""Answers for which an engine read no cache: known by their request, and held against nobody."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prefixroute_serving.cache_reads import reads_cache
from sidecar_pair import PREFIX, NodeUnderTest, Pair, one_engine, run_pair
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixroute.emulator import EmulatedEngine


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sockets, whose paths must be short."""
    return tmp_path_factory.mktemp("s")


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, True),
        ({"echo": False, "logprobs": 5, "prompt_logprobs": None, "n": 1, "temperature": 0.3, "user": "u"}, True),
        ({"return_logprob": False, "logprob_start_len": -1, "top_logprobs": 2, "logprobs": True}, True),
        ({"mystery": None}, True),
        ({"echo": True}, False),
        ({"echo": 1}, False),
        ({"prompt_logprobs": 1}, False),
        ({"prompt_logprobs": 0}, False),
        ({"return_logprob": True, "logprob_start_len": 0}, False),
        ({"logprob_start_len": 0}, False),
        ({"input_embeds": [[0.1]]}, False),
        ({"truncate_prompt_tokens": 5}, False),
        ({"mystery": 1}, False),
        ({"mystery": False}, False),
        ({"n": 2}, False),
        ({"vllm_xargs": {"skip_reading_prefix_cache": True}}, False),
    ],
)
def test_what_shows_the_prompt_or_is_not_known_does_not_say_what_was_held(fields: dict[str, Any], reads: bool) -> None:
    assert reads_cache(msgspec.json.encode({"model": "m", "prompt": "p", "max_tokens": 1, **fields})) is reads


@pytest.mark.parametrize(("fields", "reads"), [({"mystery": 1}, True), ({"echo": True}, False), ({"n": 2}, False)])
def test_where_nothing_was_predicted_a_field_that_is_not_known_does_no_harm(
    fields: dict[str, Any], reads: bool
) -> None:
    assert reads_cache(msgspec.json.encode({"prompt": "p", **fields}), strict=False) is reads


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":', b"\xff", b'{"model": ' + b"[" * 100_000])
def test_what_is_no_request_says_nothing(body: bytes) -> None:
    assert not reads_cache(body)


class Echoing:
    """An engine that computes the whole prompt for some requests, and says so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; what the emulated engine does not know is taken out first."""
        if scope["type"] != "http" or scope["path"] != "/v1/completions":
            await self._app(scope, receive, send)
            return
        body = msgspec.json.decode((await receive())["body"])
        odd = [body.pop(name) for name in ("echo", "prompt_logprobs", "mystery") if name in body]
        pending: list[Message] = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

        async def again() -> Message:
            return pending.pop() if pending else await receive()

        async def told(message: Message) -> None:
            if odd and message["type"] == "http.response.start":
                message["headers"] = [row for row in message["headers"] if row[0] != b"content-length"]
            elif odd and message.get("body"):
                answer = msgspec.json.decode(message["body"])
                answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
                message["body"] = msgspec.json.encode(answer)
            await send(message)

        await self._app(scope, again, told)


async def echoing(stack: contextlib.AsyncExitStack, name: str, folder: Path) -> tuple[EmulatedEngine, ASGIApp]:
    engine, app = await one_engine(stack, name, folder)
    return engine, Echoing(app)


def confidences(nodes: tuple[NodeUnderTest, ...], endpoint: str) -> list[float]:
    """What each node believes of an endpoint, without what the way there takes."""
    return [node.sidecar.node._table.fleet.standings[endpoint].trust for node in nodes]


@pytest.mark.parametrize("fields", [{"echo": True, "prompt_logprobs": 1}, {"mystery": 1}], ids=["echo", "unknown"])
@pytest.mark.parametrize("k", [3, 12])
def test_a_client_cannot_switch_routing_off(folder: Path, k: int, fields: dict[str, object]) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        nodes = (pair.one, pair.two)
        for _ in range(k):
            answer = await pair.ask(pair.one, PREFIX, tokens=1, **fields)
            assert answer.status_code == 200
            assert answer.headers["x-prefixroute-target"] == "node-2/0"
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            await pair.known(PREFIX)
        assert confidences(nodes, "node-2/0") == [1.0, 1.0]
        assert pair.one.sidecar.site.counts["answers without the cache"] == k
        plain = await pair.ask(pair.one, PREFIX, tokens=1)
        assert plain.headers["x-prefixroute-target"] == "node-2/0"
        assert plain.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    run_pair(test, folder, make_engine=echoing, patience_s=30.0)
