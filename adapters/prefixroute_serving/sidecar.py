"""The process beside each engine: an OpenAI-compatible door that sends each prompt where its prefix is cached.

    prefixroute serve CONFIG.json

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
| GET /prefixroute/domain, /prefixroute/udp | what `prefixroute doctor` asks, see `doctor_host.py` |
| GET /health | 200 while this sidecar serves |
| anything else | the engine's own answer |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prefixroute_lan4.measure import quantile
from starlette.types import Receive, Scope, Send

from prefixroute import Decision, EndpointStats, FairQueue, Node
from prefixroute.aio import Driver
from prefixroute.errors import UsageError
from prefixroute.events import NodeEvent

from .attach.attachment import Attachment
from .callers import UNTRUSTED_SALT, Caller, Callers, Refused
from .carried_tokens import TOKENS_HEADER, Carrier
from .client import KEEPALIVE_S, Client, HttpError
from .door import Gone, body_of, error_reply, headers_of, path_of, send_reply, unless_gone
from .exchange import BUDGET_HEADER, HOP_HEADER, Call, Exchange, Site, budget_of, declined_reply
from .introspection import Echo, WallClock
from .local_tokenizer import OwnTokenizer
from .pages import pages_of, request_headers
from .prompts import TOKENIZE_TIMEOUT_S, Prompt, PromptReader, read_body
from .sidecar_config import GOOD_SECRET_BYTES, SidecarConfig, load_config, make_policy
from .sockets import open_gossip, open_listener
from .turns import Gate

log = logging.getLogger("prefixroute.sidecar")

_KEPT_DECISIONS = 256
_KEPT_TIMES = 100_000
_ROUTED = {"/v1/completions": False, "/v1/chat/completions": True}
"""Path -> whether it is a chat."""
_JSON_HEADERS = (("content-type", "application/json"),)


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
            secrets=config.secret_bytes,
        )
        self.secrets = config.secret_bytes
        self.engine = Attachment(self.node, config.engine, config.public_url, now)
        for peer in config.peers:
            self.node.add_peer(peer.node, address=peer.gossip.pair, now=now)
        self._explained: deque[Decision] = deque(maxlen=_KEPT_DECISIONS)
        self._decision_us: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._began = now
        self.wall_clock = WallClock()
        self._pages = pages_of(self)

    # --- life ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Sidecar]:
        """Gossip, follow the engine and probe its load until the block ends; UsageError when a port is taken."""
        config = self.config
        own = OwnTokenizer(config.engine.tokenizer_file) if config.engine.tokenizer_file else None
        self.transport = await open_gossip(config.gossip)
        self.echo = Echo(self.transport, self.secrets)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S)
        async with (
            httpx.AsyncClient(limits=limits, trust_env=False) as self.http,
            Client() as client,
            Driver(self.node, self.echo, on_event=_log_event, clock=time.monotonic) as driver,
        ):
            self.driver = driver
            self.engine.connect(self.http, driver)
            domain, tenants = config.prefix_domain, config.tenants
            gate = Gate(tenants, driver.now) if tenants is not None and tenants.header and tenants.fair else None
            carrier, callers = Carrier(domain, self.secrets), Callers(domain, tenants, self.secrets)
            hosts = frozenset(config.forward_hosts)
            self._site = Site(
                self.node, driver.now, client, self.engine, config.timeouts, carrier, callers, gate, hosts
            )
            self._prompts = PromptReader(self._tokenize, config.domain.model, own)
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

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Authenticate with these from now on, everywhere: the first signs, each is good. UsageError as the node's."""
        self.node.set_secrets(secrets)
        self.secrets = self.echo.secrets = tuple(secrets)
        for seals in (self._site.carrier.seals, self._site.callers.seals):
            seals.set_secrets(secrets)

    # --- requests ------------------------------------------------------------------------------------------

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: the two routed paths here, all others in `pages`."""
        chat = _ROUTED.get(scope.get("path", ""))
        if chat is None or scope["type"] != "http" or scope["method"] != "POST":
            await self._pages(scope, receive, send)
            return
        with contextlib.suppress(Gone):
            body = await body_of(receive)
            await unless_gone(receive, self._route(scope, body, chat, send))

    async def _route(self, scope: Scope, body: bytes, chat: bool, send: Send) -> None:
        headers = headers_of(scope)
        told = dict(headers)
        forwarded = HOP_HEADER in told
        carried = self._site.carrier.unpack(body, told.get(TOKENS_HEADER) if forwarded else None)
        try:
            request = read_body(carried.body)
            caller = self._site.callers.identify(headers, forwarded, carried.body, request)
        except Refused as refused:
            self._site.count("refused: tenant")
            await send_reply(send, refused.reply)
            return
        except ValueError as error:
            await send_reply(send, error_reply(400, str(error)))
            return
        prompt = await self._prompts.read(request, chat, carried.tokens, caller.salt)
        decision = self._decide(prompt, caller, forwarded, budget_of(told.get(BUDGET_HEADER)))
        if decision.declined:
            # Of the rank that would be quickest: whichever one was asked is no better.
            load = self.node.load(decision.target, self.driver.now())
            await send_reply(send, declined_reply(load, decision.matched_tokens))
            return
        sent_on = request_headers(headers)
        carry = prompt.tokens if prompt.was_text else None  # ids are read as quickly as they are proved
        streamed, (tenant, body, salt, *_) = bool(request.stream), caller
        call = Call(path_of(scope), body, sent_on, streamed, forwarded, carry, tenant, salt)
        await Exchange(self._site, call, decision).respond(send)

    async def _tokenize(self, body: bytes) -> bytes | None:
        """The engine's answer to what a text's tokens are."""
        url, connect_s = self.config.engine.url, self.config.timeouts.connect_s
        try:
            reply = await self._site.client.post(
                url, "/tokenize", _JSON_HEADERS, body, connect_s=connect_s, read_s=TOKENIZE_TIMEOUT_S
            )
            with contextlib.closing(reply):
                read = await reply.read()
        except HttpError:
            return None
        return read if reply.status == 200 else None

    def _decide(self, prompt: Prompt, caller: Caller, forwarded: bool, budget_s: float) -> Decision:
        # Unrouted means that nothing leaves, whatever happens: push-back and failures would else send work away.
        stays = forwarded or caller.stays or self.config.policy == "none"
        gate = self._site.gate
        if forwarded and gate is not None:
            budget_s += gate.slack_s(caller.tenant)
        began = time.perf_counter_ns()
        decision = self.node.route(
            prompt.tokens if prompt.tokens is not None and caller.matches else array("I"),
            self.driver.now(),
            namespace=prompt.namespace,
            forwarded=stays,
            budget_s=budget_s if forwarded else inf,
            tenant=caller.tenant,
        )
        if caller.stays and not forwarded:
            self._site.count("untrusted salts")
            decision = decision._replace(reason=UNTRUSTED_SALT)
        self.driver.wake()  # what is served here is news for the others
        if not forwarded:
            self._decision_us.append((time.perf_counter_ns() - began) / 1e3)
            self._explained.append(decision)
        return decision

    # --- introspection -------------------------------------------------------------------------------------

    def explained(self, last: int) -> list[Decision]:
        """The last decisions, oldest first."""
        return list(self._explained)[-last:] if last > 0 else []

    @property
    def queues(self) -> dict[str, FairQueue]:
        """The fair queues before the local engine, by endpoint; none where tenants take no turns."""
        return self._site.gate.queues if self._site.gate is not None else {}

    def fairness(self) -> dict[str, Any]:
        """What waits for its turn, by endpoint, JSON-able."""
        return self._site.gate.stats() if self._site.gate is not None else {}

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
            "fairness": self.fairness(),
            "decisions": decisions,
            "gossip": {
                "bytes_sent": self.transport.bytes_sent,
                "datagrams_sent": self.transport.datagrams_sent,
                "bytes_per_s": self.transport.bytes_sent / seconds,
            },
            "engine_events": self.engine.stats(),
            "state": {
                **state._asdict(),
                "endpoints": [_endpoint(row) for row in state.endpoints],
                "round_trips": [way._asdict() for way in state.round_trips],
                "tenants": [row._asdict() for row in state.tenants],
            },
        }


def _endpoint(row: EndpointStats) -> dict[str, Any]:
    return {**row._asdict(), "accuracy": {**row.accuracy._asdict(), "compared": row.accuracy.compared}}


def _complain(task: asyncio.Task[None]) -> None:
    """A background task has no other way to tell that it failed."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s", task.exception())


def _log_event(event: NodeEvent) -> None:
    log.info("%s", event)


def _read_secrets_anew(sidecar: Sidecar, path: Path) -> None:
    """Take the secrets of a configuration file that was changed; everything else in it waits for a restart."""
    try:
        config = load_config(path)
        sidecar.set_secrets(config.secret_bytes)
    except UsageError as error:
        log.error("the secrets stay as they are: %s", error)
    else:
        log.info("secrets read from %s: the first of %d signs", path, len(config.secret_bytes))


def reread_on_sighup(sidecar: Sidecar, path: Path) -> None:
    """Let a SIGHUP to this process read the secrets anew."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_secrets_anew, sidecar, path)


def _warn_of_weak(config: SidecarConfig) -> None:
    short = [len(secret) for secret in config.secret_bytes if len(secret) < GOOD_SECRET_BYTES]
    if short:
        log.warning("a secret of %d bytes: who hears one datagram can guess it; see docs/security.md", min(short))


async def serve(config: SidecarConfig, path: Path | None = None) -> None:
    """Serve until SIGINT or SIGTERM; SIGHUP reads the secrets at `path` anew. UsageError for an unusable address."""
    sidecar = Sidecar(config)
    _warn_of_weak(config)
    with open_listener(config.http) as listener:
        async with sidecar.running():
            if path is not None:
                reread_on_sighup(sidecar, path)
            settings = uvicorn.Config(
                sidecar.app,
                interface="asgi3",
                proxy_headers=False,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
                timeout_keep_alive=75,
            )
            await uvicorn.Server(settings).serve(sockets=[listener])


def run(path: Path) -> int:
    """Serve what the configuration at `path` says until told to stop. Raises `UsageError` for a bad one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = load_config(path)
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(config, path))
    else:
        uvloop.run(serve(config, path))
    return 0
