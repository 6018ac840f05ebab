"""All paths of a sidecar but the two routed ones: what it tells of itself, and what is the engine's own to answer.

Rule: nothing here is on the way of a prompt, so convenience comes before speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prefixroute import metrics
from prefixroute.errors import UsageError

from . import introspection as doctor_host
from .callers import TENANT_HEADER
from .carried_tokens import TOKENS_HEADER
from .door import JSON, error_reply, headers_of, response_of
from .exchange import BUDGET_HEADER, HOP_HEADER

if TYPE_CHECKING:
    from .sidecar import Sidecar

_PASSED_TIMEOUT_S = 30.0
_DROPPED_REQUEST_HEADERS = frozenset(
    (
        *("host", "content-length", "connection", "transfer-encoding", "accept-encoding", "keep-alive"),
        *(HOP_HEADER, BUDGET_HEADER, TOKENS_HEADER, TENANT_HEADER),
    )
)

_SAFE = frozenset(("/tokenize", "/detokenize"))
"""What computes no prompt and may be posted where tenants are told apart, beside what empties the cache."""


def request_headers(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The client's headers as they are sent on; the body must come back as it is, so no compression."""
    kept = [header for header in headers if header[0] not in _DROPPED_REQUEST_HEADERS]
    kept.append(("accept-encoding", "identity"))
    return kept


def pages_of(sidecar: Sidecar) -> Starlette:
    """The application of these paths."""
    pages = _Pages(sidecar)
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
    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    async def explain(self, request: Request) -> Response:
        try:
            last = int(request.query_params.get("last", "1"))
        except ValueError:
            return response_of(error_reply(400, "last must be a whole number"))
        node = self._sidecar.node
        explanations = [node.explain(decision) for decision in self._sidecar.explained(last)]
        if request.query_params.get("format") == "text":
            return PlainTextResponse("\n\n".join(explanation.text() for explanation in explanations) + "\n")
        told: dict[str, object] = {"decisions": [explanation.to_dict() for explanation in explanations]}
        if self._sidecar.queues:
            told["fairness"] = self._sidecar.fairness()
        return _json(told)

    async def stats(self, request: Request) -> Response:
        return _json(self._sidecar.stats(samples=request.query_params.get("samples") == "1"))

    async def metrics(self, request: Request) -> Response:
        body = metrics.render(self._sidecar.node, self._sidecar.driver.now(), self._sidecar.queues)
        return Response(body, media_type="text/plain; version=0.0.4")

    async def domain(self, request: Request) -> Response:
        sidecar = self._sidecar
        challenge = request.query_params.get("challenge", "")
        try:
            told = doctor_host.describe(sidecar.config.prefix_domain, challenge, sidecar.wall_clock, sidecar.secrets)
        except UsageError as error:
            return response_of(error_reply(400, str(error)))
        return _json({"node": sidecar.config.node, **told})

    async def udp(self, request: Request) -> Response:
        asked, sidecar = request.query_params, self._sidecar
        address = next((peer.gossip.pair for peer in sidecar.config.peers if peer.node == asked.get("peer")), None)
        if address is None:
            return response_of(error_reply(404, "peer must be one of the configuration's"))
        try:
            size, count, patience_s = int(asked["bytes"]), int(asked["count"]), float(asked["patience_s"])
            carried = await sidecar.echo.probe(address, size, count, patience_s)
        except (KeyError, ValueError) as error:  # UsageError is one
            return response_of(error_reply(400, f"bytes, count and patience_s are needed: {error}"))
        return _json(carried._asdict())

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok", "node": self._sidecar.config.node})

    async def pass_through(self, request: Request) -> Response:
        """Whatever is not routed is the engine's to answer; a call that empties its cache counts at once."""
        engine = self._sidecar.engine
        path, body = request.url.path, await request.body()
        before = engine.before_call(path)
        if self._sidecar.config.tells_tenants and not (
            request.method in ("GET", "HEAD") or before is not None or path in _SAFE
        ):
            what = f"{path} is not kept apart by tenant, so it is not passed on: ask the engine itself"
            return response_of(error_reply(403, what, "permission_error"))
        url = httpx.URL(engine.config.url + path, query=request.url.query.encode())
        headers = request_headers(headers_of(request.scope))
        try:
            reply = await self._sidecar.http.request(
                request.method, url, content=body, headers=headers, timeout=_PASSED_TIMEOUT_S
            )
        except httpx.HTTPError as error:
            return response_of(error_reply(502, f"the engine does not answer: {error}"))
        if before is not None and reply.is_success:
            engine.called(path, request.query_params, body, reply.content, before)
        return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
