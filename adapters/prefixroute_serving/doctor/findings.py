"""The doctor's findings, one a line, and its HTTP questions, which never raise, whatever is answered.

Rule: a fault silently makes caches overlap less than they could, or mixes tenants that must stay apart. A problem that
may only cost time or memory is a warning, and does not make the examination fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from ..sidecar_config import SidecarConfig

OK: Final = "ok"
WARNING: Final = "warning"
FAULT: Final = "fault"


CONNECT_S: Final = 3.0
"""The longest wait for a connection, in seconds; a host that is gone does not even refuse a connection."""


class Finding(NamedTuple):
    """One finding: its state (OK, WARNING or FAULT), the node, what was checked, what was seen, and what to change."""

    state: str
    node: str
    check: str
    what: str
    fix: str = ""

    def line(self) -> str:
        """Return the finding as one line of text."""
        told = f"{self.state:7}  {self.node}  {self.check}: {self.what}"
        return f"{told}; {self.fix}".replace("\n", " ") if self.fix else told.replace("\n", " ")


def fault(node: str, check: str, what: str, fix: str) -> Finding:
    """A finding that makes the examination fail."""
    return Finding(FAULT, node, check, what, fix)


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether there is a fault among the findings."""
    return any(finding.state == FAULT for finding in findings)


class HttpAnswer(NamedTuple):
    """An HTTP answer: its status (0 when nothing answered), its JSON object (empty when it is none), its headers."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    text: str = ""

    @property
    def good(self) -> bool:
        """Whether it was answered with success."""
        return self.status == httpx.codes.OK


class Asker:
    """Asks over HTTP; `timeout_s` is the longest wait for an answer, in seconds."""

    def __init__(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)

    async def get(self, url: str, **query: object) -> HttpAnswer:
        """Send a GET; the values of `query` are sent as text."""
        return await self._ask("GET", url, params={name: str(value) for name, value in query.items()})

    async def post(self, url: str, body: object, headers: Sequence[tuple[str, str]] = ()) -> HttpAnswer:
        """Send a POST with a JSON body."""
        told = [("content-type", "application/json"), *headers]
        return await self._ask("POST", url, content=msgspec.json.encode(body), headers=told)

    async def _ask(self, method: str, url: str, **asked: Any) -> HttpAnswer:
        try:
            reply = await self.client.request(method, url, timeout=self._timeout, **asked)
        except (httpx.HTTPError, httpx.InvalidURL):
            return HttpAnswer(0, {}, {})
        try:
            body = msgspec.json.decode(reply.content)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            body = None
        return HttpAnswer(reply.status_code, body if isinstance(body, dict) else {}, reply.headers, reply.text)


class Visit(NamedTuple):
    """A node under examination: its sidecar's URL, its configuration where that was given, and its own answers.

    `told` is its ``/prefixroute/domain``, `stats` its ``/prefixroute/stats``; both are empty when it did not answer.
    """

    node: str
    url: str
    config: SidecarConfig | None
    told: Mapping[str, Any]
    stats: Mapping[str, Any]

    @property
    def streams(self) -> Mapping[str, Mapping[str, Any]]:
        """The state of the engine's event streams, by rank, from `stats`."""
        streams = self.stats.get("engine_events")
        return streams if isinstance(streams, dict) else {}

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """What is told of the endpoints that the node knows."""
        state = self.stats.get("state")
        rows = state.get("endpoints") if isinstance(state, dict) else None
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


async def visit(ask: Asker, node: str, url: str, config: SidecarConfig | None, challenge: str) -> Visit:
    """Ask a sidecar for its domain and its stats."""
    told = await ask.get(f"{url}/prefixroute/domain", challenge=challenge)
    stats = await ask.get(f"{url}/prefixroute/stats")
    return Visit(node, url, config, told.body if told.good else {}, stats.body if stats.good else {})
