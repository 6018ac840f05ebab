"""The emulated engine's HTTP face: vLLM's routes, as a Starlette application.

| route | answer |
|---|---|
| POST /v1/completions, /v1/chat/completions | an answer, or a stream of server-sent events |
| POST /tokenize | count, max_model_len, tokens |
| GET /v1/models, /health, /metrics, /load, /kv_event_sources, /version | as vLLM |
| POST /reset_prefix_cache | ``{"success": bool}``, false while blocks are in use |

Rules:
1. A client that disconnects, or a handler that is cancelled, ends its request and frees the request's blocks.
2. Every error is JSON in vLLM's shape, whatever went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from prefixroute.emulator import metrics_page, protocol
from prefixroute.emulator.answer import Answer
from prefixroute.emulator.emulator_config import EngineConfig
from prefixroute.emulator.engine_driver import EngineDriver, Generation
from prefixroute.emulator.protocol import ApiCall, ApiError, ApiReply, Json
from prefixroute.emulator.scheduler import FINISHED, Busy

MAX_BODY_BYTES = 64 * 1024 * 1024
"""The largest request body in bytes; a larger one is answered with 413."""

VERSION = "0.32.0+prefixroute.emulator"
"""The answer of /version: the vLLM version whose behaviour is imitated."""

Parse = Callable[[Json, EngineConfig], ApiCall]
"""Reads a request's body."""


def build_app(engine: EngineDriver) -> Starlette:
    """The application of one engine; it does not start or stop the engine."""
    routes = _Routes(engine)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/reset_prefix_cache", routes.reset_prefix_cache, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/load", routes.load),
            Route("/kv_event_sources", routes.kv_event_sources),
            Route("/version", routes.version),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _server_error},
    )


class _Routes:
    def __init__(self, engine: EngineDriver) -> None:
        self._engine = engine

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, protocol.parse_completion, "cmpl")

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, protocol.parse_chat, "chatcmpl")

    async def _generate(
        self, request: Request, parse: Callable[[Json, EngineConfig], ApiCall], prefix: str
    ) -> Response:
        call = parse(protocol.parse_body(await _body(request)), self._engine.config)
        answer = Answer(call.prompt, self._engine.config.weights_seed)
        try:
            generation = self._engine.submit(call, answer)
        except Busy as busy:
            raise ApiError(503, str(busy)) from None
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        reply = ApiReply(f"{prefix}-{request_id}", int(time.time()), call, answer)
        if call.stream:
            return _TokenStream(self._engine, generation, reply)
        async with _watched(self._engine, generation, request.receive):
            output = await generation.next()
            while not output.last:
                output = await generation.next()
        if output.state != FINISHED:
            raise ApiError(503, "the request was cancelled before it was finished")
        return _json(protocol.whole_answer(reply, output.tokens, generation.sequence.cached_tokens))

    async def tokenize(self, request: Request) -> Response:
        body = protocol.parse_body(await _body(request))
        tokens = protocol.parse_tokenize(body, self._engine.config)
        length = self._engine.config.context_length
        return _json({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def reset_prefix_cache(self, request: Request) -> Response:
        return _json({"success": self._engine.reset_prefix_cache()})

    async def models(self, request: Request) -> Response:
        config = self._engine.config
        common = {"object": "model", "created": 0, "owned_by": "prefixroute"}
        length = config.context_length
        data = [{"id": config.model, **common, "root": config.model, "parent": None, "max_model_len": length}]
        data += [
            {"id": name, **common, "root": name, "parent": config.model, "max_model_len": None}
            for name in config.lora_modules
        ]
        return _json({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.running else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._engine.metrics(), media_type=metrics_page.CONTENT_TYPE)

    async def load(self, request: Request) -> Response:
        load = self._engine.load()
        return _json({"server_load": load.running + load.waiting})

    async def kv_event_sources(self, request: Request) -> Response:
        return _json(self._engine.kv_event_sources())

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})


class _TokenStream(Response):
    """A stream of server-sent events. As with vLLM the head is sent at once, the first event after prefill."""

    def __init__(self, engine: EngineDriver, generation: Generation, reply: ApiReply) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._engine = engine
        self._generation = generation
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watched(self._engine, self._generation, receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncIterator[bytes]:
        reply, sent = self._reply, 0
        while True:
            output = await self._generation.next()
            finished = output.state == FINISHED
            if output.last and not finished:
                return
            if sent == 0 and reply.call.chat:
                yield protocol.role_chunk(reply)
            yield protocol.token_chunk(reply, sent, output.tokens, "length" if finished else None)
            sent = output.tokens
            if finished:
                break
        if reply.call.include_usage:
            yield protocol.usage_chunk(reply, sent, self._generation.sequence.cached_tokens)
        yield protocol.DONE


@contextlib.asynccontextmanager
async def _watched(engine: EngineDriver, generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Inside this context a client's disconnect cancels the request; so does leaving the context before its end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        engine.cancel(generation)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        engine.cancel(generation)
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body(), error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json(ApiError(error.status_code, error.detail).body(), error.status_code)


async def _server_error(request: Request, error: Exception) -> Response:
    return _json(ApiError(500, f"{type(error).__name__}: {error}").body(), 500)
