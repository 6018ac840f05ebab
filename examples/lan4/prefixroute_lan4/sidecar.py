"""The process beside each engine: an OpenAI-compatible door that sends each prompt where its prefix is cached.

    python -m prefixroute_lan4.sidecar CONFIG.json

Rules:
1. The node decides; the sidecar only carries: requests to engines, datagrams to peers, events and load to the node.
2. What the sidecar cannot read it passes to its own engine untouched. What is the engine's, ranks and all, is in
   `attach.py`; calls that empty its cache are known from their paths.
3. All state lives in one event loop: nothing here is shared between threads.

| path | answer |
|---|---|
| POST /v1/completions, /v1/chat/completions | routed |
| GET /prefixroute/explain?last=N | the last N decisions (default 1), every term of every candidate; format=text |
| GET /prefixroute/stats | counters, gossip volume, decision times, what is known of each peer |
| GET /metrics | the same for Prometheus |
| GET /health | 200 while this sidecar serves |
| anything else | the engine's own answer |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prefixroute import Decision, EndpointStats, Node, metrics
from prefixroute.aio import Driver
from prefixroute.errors import UsageError
from prefixroute.events import NodeEvent

from .attach import Attachment
from .config import SidecarConfig, load_config, make_policy
from .exchange import BUDGET_HEADER, HOP_HEADER, Call, Exchange, Site, budget_of, declined_reply
from .measure import quantile
from .own_tokenizer import OwnTokenizer
from .sockets import open_gossip, open_listener
from .tokens import Prompt, PromptReader
from .upstream import error_reply

log = logging.getLogger("prefixroute.sidecar")

_KEPT_DECISIONS = 256
_KEPT_TIMES = 100_000
_CLIENT_GONE = 499
# Below the five seconds after which uvicorn closes an idle connection, so that none is reused while it closes.
_KEEPALIVE_S = 2.0
_DROPPED_REQUEST_HEADERS = frozenset(
    (
        *("host", "content-length", "connection", "transfer-encoding", "accept-encoding", "keep-alive"),
        *(HOP_HEADER, BUDGET_HEADER),
    )
)
_T = TypeVar("_T")


class Sidecar:
    """One node: its routing state, its connections and its HTTP application."""

    def __init__(self, config: SidecarConfig) -> None:
        self.config = config
        now = time.monotonic()
        self.node = Node(
            config.node,
            config.prefix_domain,
            rng=random.Random(),
            now=now,
            settings=config.node_settings,
            policy=make_policy(config.policy),
        )
        self.engine = Attachment(self.node, config.engine, config.public_url, now)
        for peer in config.peers:
            self.node.add_peer(peer.node, address=peer.gossip.pair, now=now)
        self._explained: deque[Decision] = deque(maxlen=_KEPT_DECISIONS)
        self._decision_us: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._began = now
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/prefixroute/explain", self._explain),
                Route("/prefixroute/stats", self._stats),
                Route("/metrics", self._metrics),
                Route("/health", self._health),
                Route("/{path:path}", self._pass_through, methods=["GET", "POST", "DELETE", "PUT"]),
            ]
        )

    # --- life ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Sidecar]:
        """Gossip, follow the engine and probe its load until the block ends; UsageError when a port is taken."""
        config = self.config
        own = OwnTokenizer(config.engine.tokenizer_file) if config.engine.tokenizer_file else None
        self.transport = await open_gossip(config.gossip)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_S)
        async with (
            httpx.AsyncClient(limits=limits, trust_env=False) as client,
            Driver(self.node, self.transport, on_event=_log_event, clock=time.monotonic) as driver,
        ):
            self.driver = driver
            self.engine.connect(client, driver)
            self._site = Site(self.node, driver.now, client, self.engine, config.timeouts)
            self._prompts = PromptReader(client, config.engine.url, config.domain.model, own)
            tasks = [asyncio.create_task(work) for work in (*self.engine.work(), driver.wait())]
            for task in tasks:
                task.add_done_callback(_complain)
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await driver.leave()

    # --- requests ------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._route(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._route(request, chat=True)

    async def _route(self, request: Request, chat: bool) -> Response:
        body = await request.body()
        try:
            payload = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            return error_reply(400, f"the body is not JSON: {error}")
        if not isinstance(payload, dict):
            return error_reply(400, "the body must be a JSON object")
        reply = await _unless_gone(request, self._answer(request, body, payload, chat))
        return reply or Response(status_code=_CLIENT_GONE)

    async def _answer(self, request: Request, body: bytes, payload: dict[str, Any], chat: bool) -> Response:
        forwarded = HOP_HEADER in request.headers
        prompt = await self._prompts.read(payload, chat)
        decision = self._decide(prompt, forwarded, budget_of(request.headers.get(BUDGET_HEADER)))
        if decision.declined:
            # Of the rank that would be quickest: whichever one was asked is no better.
            return declined_reply(self.node.load(decision.target, self.driver.now()), decision.matched_tokens)
        query = f"?{request.url.query}" if request.url.query else ""
        call = Call(request.url.path + query, body, _request_headers(request), bool(payload.get("stream")), forwarded)
        return await Exchange(self._site, call, decision).respond()

    def _decide(self, prompt: Prompt, forwarded: bool, budget_s: float) -> Decision:
        # Unrouted means that nothing leaves, whatever happens: push-back and failures would else send work away.
        stays = forwarded or self.config.policy == "none"
        began = time.perf_counter_ns()
        decision = self.node.route(
            prompt.tokens if prompt.tokens is not None else array("I"),
            self.driver.now(),
            namespace=prompt.namespace,
            forwarded=stays,
            budget_s=budget_s if forwarded else inf,
        )
        self.driver.wake()  # what is served here is news for the others
        if not forwarded:
            self._decision_us.append((time.perf_counter_ns() - began) / 1e3)
            self._explained.append(decision)
        return decision

    async def _pass_through(self, request: Request) -> Response:
        """Whatever is not routed is the engine's to answer; a call that empties its cache counts at once."""
        path, body = request.url.path, await request.body()
        before = self.engine.before_call(path)
        url = httpx.URL(self.config.engine.url + request.url.path, query=request.url.query.encode())
        try:
            reply = await self._site.client.request(
                request.method, url, content=body, headers=_request_headers(request), timeout=30.0
            )
        except httpx.HTTPError as error:
            return error_reply(502, f"the engine does not answer: {error}")
        if before is not None and reply.is_success:
            self.engine.called(path, request.query_params, body, reply.content, before)
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))

    # --- introspection -------------------------------------------------------------------------------------

    async def _explain(self, request: Request) -> Response:
        try:
            last = int(request.query_params.get("last", "1"))
        except ValueError:
            return error_reply(400, "last must be a whole number")
        decisions = list(self._explained)[-last:] if last > 0 else []
        explanations = [self.node.explain(decision) for decision in decisions]
        if request.query_params.get("format") == "text":
            return PlainTextResponse("\n\n".join(explanation.text() for explanation in explanations) + "\n")
        return _json({"decisions": [explanation.to_dict() for explanation in explanations]})

    async def _stats(self, request: Request) -> Response:
        return _json(self.stats(samples=request.query_params.get("samples") == "1"))

    def stats(self, samples: bool = False) -> dict[str, Any]:
        """Everything countable, JSON-able; with `samples` every decision time instead of two quantiles only."""
        now = self.driver.now()
        state = self.node.stats(now)
        times = list(self._decision_us)
        seconds = max(now - self._began, 1e-9)
        decisions: dict[str, Any] = {
            "count": len(times),
            "us_p50": quantile(times, 0.50),
            "us_p99": quantile(times, 0.99),
        }
        if samples:
            decisions["us"] = times
        return {
            "node": self.config.node,
            "policy": self.config.policy,
            "uptime_s": seconds,
            "requests": dict(self._site.counts),
            "decisions": decisions,
            "gossip": {
                "bytes_sent": self.transport.bytes_sent,
                "datagrams_sent": self.transport.datagrams_sent,
                "bytes_per_s": self.transport.bytes_sent / seconds,
            },
            "engine_events": self.engine.stats(),
            "state": {**state._asdict(), "endpoints": [_endpoint(row) for row in state.endpoints]},
        }

    async def _metrics(self, request: Request) -> Response:
        body = metrics.render(self.node, self.driver.now())
        return Response(body, media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok", "node": self.config.node})


def _endpoint(row: EndpointStats) -> dict[str, Any]:
    return {**row._asdict(), "accuracy": {**row.accuracy._asdict(), "compared": row.accuracy.compared}}


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _request_headers(request: Request) -> list[tuple[str, str]]:
    """The client's headers as they are sent on; the body must come back as it is, so no compression."""
    kept = [(name, value) for name, value in request.headers.items() if name not in _DROPPED_REQUEST_HEADERS]
    return [*kept, ("accept-encoding", "identity")]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | None:
    """The result of `work`, or None after cancelling it because the client went away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _complain(task: asyncio.Task[None]) -> None:
    """A background task has no other way to tell that it failed."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s", task.exception())


def _log_event(event: NodeEvent) -> None:
    log.info("%s", event)


async def serve(config: SidecarConfig) -> None:
    """Serve until SIGINT or SIGTERM; UsageError when an address cannot be used."""
    sidecar = Sidecar(config)
    with open_listener(config.http) as listener:
        async with sidecar.running():
            settings = uvicorn.Config(
                sidecar.app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
                timeout_keep_alive=75,
            )
            await uvicorn.Server(settings).serve(sockets=[listener])


def _run(config: SidecarConfig) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(config))
    else:
        uvloop.run(serve(config))


def main(argv: list[str] | None = None) -> int:
    """Run one sidecar from its configuration file; exit code 2 when that cannot be used."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m prefixroute_lan4.sidecar CONFIG.json", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = load_config(Path(arguments[0]))
        _run(config)
    except UsageError as error:
        print(f"prefixroute sidecar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
