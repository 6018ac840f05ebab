"""All paths of a sidecar but the two routed ones: pages about the sidecar, and calls passed through to the engine.

Rule: no prompt is routed here, so convenience comes before speed.
"""

from __future__ import annotations

from typing import Final

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prefixroute import metrics
from prefixroute.errors import UsageError

from .door import JSON, error_reply, headers_of, response_of
from .headers import sent_on
from .introspection import describe
from .sidecar_stats import fairness, site_stats
from .site import Site

_PASSED_TIMEOUT_S: Final = 30.0

_SAFE: Final = frozenset(("/tokenize", "/detokenize"))
"""POSTs that compute no prompt; with tenants only these and calls that empty the cache are passed to the engine."""


def pages_of(site: Site) -> Starlette:
    """The application of these paths."""
    pages = _Pages(site)
    return Starlette(
        routes=[
            Route("/prefixroute/explain", pages.explain),
            Route("/prefixroute/stats", pages.stats),
            Route("/prefixroute/domain", pages.domain),
            Route("/prefixroute/udp", pages.udp),
            Route("/metrics", pages.metrics),
            Route("/health", pages.health),
            Route("/{path:path}", pages.pass_through, methods=["GET", "POST", "DELETE", "PUT"]),
        ]
    )


class _Pages:
    def __init__(self, site: Site) -> None:
        self._site = site

    async def explain(self, request: Request) -> Response:
        try:
            last = int(request.query_params.get("last", "1"))
        except ValueError:
            return response_of(error_reply(400, "last must be a whole number"))
        node = self._site.node
        explanations = [node.explain(decision) for decision in self._site.log.last(last)]
        if request.query_params.get("format") == "text":
            return PlainTextResponse("\n\n".join(explanation.text() for explanation in explanations) + "\n")
        told: dict[str, object] = {"decisions": [explanation.to_dict() for explanation in explanations]}
        if self._site.queues:
            told["fairness"] = fairness(self._site)
        return _json(told)

    async def stats(self, request: Request) -> Response:
        return _json(site_stats(self._site, samples=request.query_params.get("samples") == "1"))

    async def metrics(self, request: Request) -> Response:
        body = metrics.render(self._site.node, self._site.now(), self._site.queues)
        return Response(body, media_type="text/plain; version=0.0.4")

    async def domain(self, request: Request) -> Response:
        site = self._site
        challenge = request.query_params.get("challenge", "")
        try:
            told = describe(site.config.prefix_domain, challenge, site.wall_clock, site.secrets)
        except UsageError as error:
            return response_of(error_reply(400, str(error)))
        return _json({"node": site.config.node, **told})

    async def udp(self, request: Request) -> Response:
        asked, site = request.query_params, self._site
        address = next((peer.gossip.pair for peer in site.config.peers if peer.node == asked.get("peer")), None)
        if address is None:
            return response_of(error_reply(404, "peer must be one of the configuration's"))
        try:
            size, count, patience_s = int(asked["bytes"]), int(asked["count"]), float(asked["patience_s"])
            carried = await site.echo.probe(address, size, count, patience_s)
        except (KeyError, ValueError) as error:  # UsageError is one
            return response_of(error_reply(400, f"bytes, count and patience_s are needed: {error}"))
        return _json(carried._asdict())

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok", "node": self._site.config.node})

    async def pass_through(self, request: Request) -> Response:
        """Pass a request to the engine and return its answer; a call that empties the cache counts at once."""
        engine = self._site.engine
        path, body = request.url.path, await request.body()
        before = engine.before_call(path)
        if self._site.config.tells_tenants and not (
            request.method in ("GET", "HEAD") or before is not None or path in _SAFE
        ):
            what = f"{path} is not kept apart by tenant, so it is not passed on: ask the engine itself"
            return response_of(error_reply(403, what, "permission_error"))
        url = httpx.URL(engine.config.url + path, query=request.url.query.encode())
        headers = sent_on(headers_of(request.scope))
        try:
            reply = await self._site.http.request(
                request.method, url, content=body, headers=headers, timeout=_PASSED_TIMEOUT_S
            )
        except httpx.HTTPError as error:
            return response_of(error_reply(502, f"the engine does not answer: {error}"))
        if before is not None and reply.is_success:
            engine.called(path, request.query_params, body, reply.content, before)
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
