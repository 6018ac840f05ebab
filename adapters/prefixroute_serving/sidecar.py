"""The process beside each engine: an OpenAI-compatible server that sends each prompt where its prefix is cached.

    prefixroute serve CONFIG.json

Rules:
1. The node decides; the sidecar only carries: requests to engines, datagrams to peers, events and load to the node.
2. The sidecar passes a request that it cannot read to its own engine untouched. Everything that depends on the engine,
   ranks included, is in `attach`; calls that empty the engine's cache are known by their paths.
3. All state lives in one event loop: nothing here is shared between threads.

| path | answer |
|---|---|
| POST /v1/completions, /v1/chat/completions | routed |
| GET /prefixroute/explain?last=N | the last N decisions (default 1), every term of every candidate; format=text |
| GET /prefixroute/stats | counters, gossip volume, decision times, what is known of each peer |
| GET /metrics | the same for Prometheus |
| GET /prefixroute/domain, /prefixroute/udp | what `prefixroute doctor` asks, see `introspection` |
| GET /health | 200 while this sidecar serves |
| anything else | the engine's own answer |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from array import array
from collections.abc import AsyncIterator
from math import inf

import httpx
from starlette.types import Receive, Scope, Send

from prefixroute import Decision, Node
from prefixroute.aio import Driver
from prefixroute.events import NodeEvent

from .attach import Attachment
from .callers import UNTRUSTED_SALT, Caller, CallerRefused, Callers
from .carried_tokens import TokenCarrier
from .door import Gone, body_of, error_reply, headers_of, path_of, send_reply, unless_gone
from .exchange import Exchange
from .headers import BUDGET_HEADER, HOP_HEADER, TOKENS_HEADER, read_budget, sent_on
from .http_client import KEEPALIVE_S, HttpClient, HttpError
from .introspection import Echo, WallClock
from .local_tokenizer import OwnTokenizer
from .pages import pages_of
from .prompts import TOKENIZE_TIMEOUT_S, PromptTokenizer, RoutedPrompt, read_body
from .sidecar_config import SidecarConfig, make_policy
from .site import Site
from .sockets import open_gossip
from .turns import Turns
from .upstream import OutgoingRequest, declined_reply

log = logging.getLogger("prefixroute.sidecar")

_ROUTED = {"/v1/completions": False, "/v1/chat/completions": True}
"""Path -> whether it is a chat."""
_JSON_HEADERS = (("content-type", "application/json"),)


class Sidecar:
    """One node beside one engine. `site` and `driver` are there while it runs."""

    site: Site
    driver: Driver

    def __init__(self, config: SidecarConfig) -> None:
        self.config = config
        self._began = now = time.monotonic()
        self.node = Node(
            config.node,
            config.prefix_domain,
            rng=random.Random(),
            now=now,
            settings=config.node_settings,
            policy=make_policy(config.policy),
            secrets=config.secret_bytes,
        )
        self.engine = Attachment(self.node, config.engine, config.public_url, now)
        self._wall_clock = WallClock()
        for peer in config.peers:
            self.node.add_peer(peer.node, address=peer.gossip.pair, now=now)

    # --- start and end -------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        """Gossip, follow the engine and probe its load until the block ends; UsageError when a port is taken."""
        config = self.config
        own = OwnTokenizer(config.engine.tokenizer_file) if config.engine.tokenizer_file else None
        transport = await open_gossip(config.gossip)
        echo = Echo(transport, config.secret_bytes)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S)
        async with (
            httpx.AsyncClient(limits=limits, trust_env=False) as http,
            HttpClient() as client,
            Driver(self.node, echo, on_event=_log_event, clock=time.monotonic) as driver,
        ):
            self.driver = driver
            self.engine.connect(http, driver)
            domain, tenants, secrets = config.prefix_domain, config.tenants, config.secret_bytes
            take_turns = tenants is not None and tenants.header and tenants.fair
            self.site = Site(
                config=config,
                node=self.node,
                now=driver.now,
                engine=self.engine,
                client=client,
                http=http,
                transport=transport,
                echo=echo,
                wall_clock=self._wall_clock,
                carrier=TokenCarrier(domain, secrets),
                callers=Callers(domain, tenants, secrets),
                turns=Turns(tenants, driver.now) if tenants is not None and take_turns else None,
                began=self._began,
                hosts=frozenset(config.forward_hosts),
            )
            self._pages = pages_of(self.site)
            self._prompts = PromptTokenizer(self._tokenize, config.domain.model, own)
            tasks = [asyncio.create_task(work) for work in (*self.engine.work(), driver.wait())]
            for task in tasks:
                task.add_done_callback(_complain)
            try:
                yield self.site
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await driver.leave()

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
        """Read a request, decide where it is served, and have it answered."""
        site, headers = self.site, headers_of(scope)
        told = dict(headers)
        forwarded = HOP_HEADER in told
        carried = site.carrier.unpack(body, told.get(TOKENS_HEADER) if forwarded else None)
        try:
            request = read_body(carried.body)
            caller = site.callers.identify(headers, forwarded, carried.body, request)
        except CallerRefused as refused:
            site.count("refused: tenant")
            await send_reply(send, refused.reply)
            return
        except ValueError as error:
            await send_reply(send, error_reply(400, str(error)))
            return
        prompt = await self._prompts.read(request, chat, carried.tokens, caller.salt)
        decision = self._decide(prompt, caller, forwarded, read_budget(told.get(BUDGET_HEADER)))
        if decision.declined:
            # The reply carries the load of the quickest rank, since no other rank would have been better.
            load = self.node.load(decision.target, site.now())
            await send_reply(send, declined_reply(load, decision.matched_tokens))
            return
        carry = prompt.tokens if prompt.was_text else None  # reading ids takes no longer than their proof
        outgoing = OutgoingRequest(
            path_of(scope),
            caller.body,
            sent_on(headers),
            bool(request.stream),
            forwarded,
            carry,
            caller.tenant,
            caller.salt,
        )
        await Exchange(site, outgoing, decision).respond(send)

    def _decide(self, prompt: RoutedPrompt, caller: Caller, forwarded: bool, budget_s: float) -> Decision:
        site = self.site
        # With the policy "none" no request leaves this node; push-back and failures would otherwise send work away.
        stays = forwarded or caller.stays or self.config.policy == "none"
        if forwarded and site.turns is not None:
            budget_s += site.turns.slack_s(caller.tenant)
        began = time.perf_counter_ns()
        decision = self.node.route(
            prompt.tokens if prompt.tokens is not None and caller.matches else array("I"),
            site.now(),
            namespace=prompt.namespace,
            forwarded=stays,
            budget_s=budget_s if forwarded else inf,
            tenant=caller.tenant,
        )
        if caller.stays and not forwarded:
            site.count("untrusted salts")
            decision = decision._replace(reason=UNTRUSTED_SALT)
        self.driver.wake()  # a request served here is news for the peers
        if not forwarded:
            site.log.add(decision, (time.perf_counter_ns() - began) / 1e3)
        return decision

    async def _tokenize(self, body: bytes) -> bytes | None:
        """Ask the engine for the tokens of a text; None when it gives none."""
        url, connect_s = self.config.engine.url, self.config.timeouts.connect_s
        try:
            reply = await self.site.client.post(
                url, "/tokenize", _JSON_HEADERS, body, connect_s=connect_s, read_s=TOKENIZE_TIMEOUT_S
            )
            with contextlib.closing(reply):
                read = await reply.read()
        except HttpError:
            return None
        return read if reply.status == 200 else None


def _complain(task: asyncio.Task[None]) -> None:
    """Log the failure of a background task, which nobody awaits."""
    if not task.cancelled() and task.exception() is not None:
        log.error("%s", task.exception())


def _log_event(event: NodeEvent) -> None:
    log.info("%s", event)
