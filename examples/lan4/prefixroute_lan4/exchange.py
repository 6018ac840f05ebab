"""One request, from its decision to its last byte, over as many engines as it takes.

Rules:
1. A request crosses at most one hop: what is sent to a peer carries `HOP_HEADER`, and is served there, refused, or
   handed back: the first attempt carries a budget, and a peer that would need longer declines, at once and once.
2. Nothing is sent to the client before an engine's first event is here, so until then a failure costs time only:
   the next fallback is asked, the local engine last.
3. After that a broken stream goes on from another engine under the rules of `sse.StreamLedger`.
4. Every attempt ends in exactly one `node.report`.
5. A peer with several endpoints (ranks) chooses among them itself. What its answer tells counts for the endpoint that
   was asked only if that one served.

| upstream | outcome | then |
|---|---|---|
| cannot connect, connection breaks, status 5xx | failed | next fallback |
| status 503 | refused | next fallback |
| status 503 with `DECLINED_HEADER` | declined | wherever is best now |
| too slow | timed out | next fallback |
| 200 | served | passed to the client |
| any other status | cancelled | passed to the client, whose mistake it is |
| a stream whose first event is an error | as the status that it names | as above |
| client went away | cancelled | upstream closed |
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import httpx
import msgspec
from starlette.responses import Response, StreamingResponse

from prefixroute import Decision, LoadReport, Node, Outcome, OutcomeKind

from .attach import Attachment
from .config import TimeoutConfig
from .kinds import without_rank
from .sse import Diverged, StreamLedger, UpstreamBroke
from .upstream import (
    DECLINED_HEADER,
    LOAD_HEADER,
    TARGET_HEADER,
    Answer,
    AttemptFailed,
    begin,
    cached_in_body,
    check_answered,
    error_reply,
    events_of,
    failed,
    load_of,
    outcome_of,
)

HOP_HEADER = "x-prefixroute-hop"
BUDGET_HEADER = "x-prefixroute-budget-ms"
REASON_HEADER = "x-prefixroute-reason"
MATCHED_HEADER = "x-prefixroute-matched"

_KEPT_REPLY_HEADERS = ("x-request-id", "retry-after")


@dataclass(slots=True)
class Site:
    """What all exchanges of a sidecar share: the node, its clock, the local engine, and how to reach others."""

    node: Node
    now: Callable[[], float]
    client: httpx.AsyncClient
    engine: Attachment
    timeouts: TimeoutConfig
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def endpoints(self) -> Mapping[str, int]:
        """The local endpoints, and the rank of each."""
        return self.engine.endpoints

    def count(self, what: str) -> None:
        """One more of `what`, for the statistics."""
        self.counts[what] = self.counts.get(what, 0) + 1


class Call(NamedTuple):
    """A client's request as it is sent on. `forwarded`: it came from a peer."""

    path: str
    body: bytes
    headers: Sequence[tuple[str, str]]
    streamed: bool
    forwarded: bool


class Exchange:
    """One request under one decision."""

    def __init__(self, site: Site, call: Call, decision: Decision) -> None:
        self._site = site
        self._call = call
        self._decision = decision
        self._began = time.perf_counter()
        self._ttft_s: float | None = None
        self._target: str | None = decision.target
        self._budget_s = decision.budget_s
        self._settled = False

    async def respond(self) -> Response:
        """The answer of the first engine that gives one; an error reply when all have failed."""
        try:
            answer, sorry = await self._open_next()
            if answer is None:
                return sorry
            if answer.chunks is None:
                self._report_served(answer, cached_in_body(answer))
                return Response(answer.body, answer.status, self._headers(answer))
            return StreamingResponse(self._stream(answer), 200, self._headers(answer))
        except BaseException:
            self._cancel()
            raise

    # --- attempts ------------------------------------------------------------------------------------------

    async def _open_next(self) -> tuple[Answer | None, Response]:
        """Ask the current target, then its fallbacks; the last failure's reply when none is left."""
        reply = error_reply(502, "no engine answered")
        while self._target is not None:
            try:
                return await self._open(self._target), reply
            except AttemptFailed as failure:
                reply = failure.reply
                self._report_failure(failure.outcome)
        return None, reply

    async def _open(self, target: str) -> Answer:
        """Send the request to `target` and wait for its first event."""
        response: httpx.Response | None = None
        try:
            response = await self._site.client.send(self._request(target), stream=True)
            answer = await begin(target, response)
            self._note_status(target, answer.status)
            return check_answered(answer)
        except httpx.TimeoutException as error:
            await _close(response)
            raise failed(Outcome.timed_out(), f"{target} timed out ({type(error).__name__})", 504) from error
        except (httpx.HTTPError, ValueError) as error:
            await _close(response)
            raise failed(Outcome.failed(_describe(error)), f"{target}: {_describe(error)}", 502) from error
        except BaseException:
            await _close(response)
            raise

    def _note_status(self, target: str, status: int) -> None:
        if target in self._site.endpoints:
            self._site.engine.answered(target, status, self._decision.prompt_tokens)

    def _request(self, target: str) -> httpx.Request:
        site, call = self._site, self._call
        local = target in site.endpoints
        if local:
            url = site.engine.config.url
            headers, body = site.engine.aimed(target, call.headers, call.body)
            timeout = httpx.Timeout(None, connect=site.timeouts.connect_s)
        else:
            url = site.node.endpoint_url(target)
            headers, body = [*without_rank(call.headers), (HOP_HEADER, "1")], call.body
            if self._budget_s < inf:
                headers.append((BUDGET_HEADER, f"{1000 * self._budget_s:.3f}"))
            patience = site.timeouts.stream_s if call.streamed else site.timeouts.whole_s
            timeout = httpx.Timeout(patience, connect=site.timeouts.connect_s)
        site.count("local" if local else "forwarded")
        return site.client.build_request("POST", url + call.path, content=body, headers=headers, timeout=timeout)

    # --- streams -------------------------------------------------------------------------------------------

    async def _stream(self, answer: Answer) -> AsyncIterator[bytes]:
        """Pass events on, from the next fallback when an upstream dies, until the answer is whole."""
        ledger = StreamLedger()
        current: Answer | None = answer
        try:
            while current is not None:
                try:
                    async for event in events_of(current):
                        kept = ledger.accept(event)
                        if ledger.text or ledger.done:
                            self._note_first_token()
                        if kept is not None:
                            yield kept
                    if ledger.done:
                        self._report_served(current, ledger.cached_tokens)
                        return
                    outcome = Outcome.failed("the stream ended early")
                except httpx.TimeoutException:
                    outcome = Outcome.timed_out()
                except UpstreamBroke as error:
                    self._note_status(current.target, error.status)
                    outcome = outcome_of(error.status, _describe(error))
                except (httpx.HTTPError, ValueError) as error:
                    outcome = Outcome.failed(_describe(error))
                finally:
                    await _close(current.response)
                self._report_failure(outcome)
                self._site.count("resumed")
                current, _ = await self._open_next()
                ledger.restart()
            yield _error_event("no engine could finish the answer")
        except Diverged as error:
            self._site.count("diverged")
            if current is not None:
                await _close(current.response)
            yield _error_event(f"the answer was broken off: {error}")
        finally:
            self._cancel()

    def _note_first_token(self) -> None:
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._began
            self._site.node.first_token(self._decision, self._site.now())

    # --- reports -------------------------------------------------------------------------------------------

    def _report_served(self, answer: Answer, cached: int | None) -> None:
        if answer.status == 200:
            asked = answer.served_by == answer.target
            load = None if answer.target in self._site.endpoints or not asked else load_of(answer.response)
            self._report(Outcome.served(cached_tokens=cached if asked else None, ttft_s=self._ttft_s, load=load))
            self._settled = True
        else:
            self._cancel()  # the client's own mistake: nothing was computed, nothing is cached

    def _report_failure(self, outcome: Outcome) -> None:
        self._site.count("handed back" if outcome.kind is OutcomeKind.DECLINED else "failed attempts")
        # The next attempt keeps the request, and is not charged the time of this one.
        self._budget_s = inf
        self._began = time.perf_counter()
        self._target = self._report(outcome)
        self._settled = self._target is None

    def _cancel(self) -> None:
        """Report a request that nobody waits for any more; nothing when it has been settled."""
        if not self._settled:
            self._settled = True
            self._report(Outcome.cancelled())

    def _report(self, outcome: Outcome) -> str | None:
        return self._site.node.report(self._decision, outcome, self._site.now(), endpoint=self._target)

    def _headers(self, answer: Answer) -> dict[str, str]:
        site, decision, told = self._site, self._decision, answer.response.headers
        headers = {name: told[name] for name in _KEPT_REPLY_HEADERS if name in told}
        headers["content-type"] = answer.media_type
        headers[TARGET_HEADER] = answer.served_by
        headers[REASON_HEADER] = _header_text(decision.reason)
        headers[MATCHED_HEADER] = str(decision.matched_tokens)
        if self._call.forwarded and answer.target in site.endpoints:
            headers[LOAD_HEADER] = _header_text(dump_load(site.node.load(answer.target, site.now())))
        return headers


def dump_load(load: LoadReport) -> str:
    """A load report as one line of JSON, for a reply header."""
    return msgspec.json.encode(load).decode()


def declined_reply(load: LoadReport, matched_tokens: int) -> Response:
    """What a peer is told whose prompt would take longer here than its budget."""
    reply = error_reply(503, "it would take longer here than the budget")
    reply.headers[DECLINED_HEADER] = str(matched_tokens)
    reply.headers[LOAD_HEADER] = _header_text(dump_load(load))
    return reply


def budget_of(text: str | None) -> float:
    """The budget in seconds that a forward carries; infinite when it carries none that can be read."""
    try:
        budget_s = float(text or "inf") / 1000
    except ValueError:
        return inf
    return budget_s if budget_s >= 0 else inf


async def _close(response: httpx.Response | None) -> None:
    if response is not None:
        await response.aclose()


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def _header_text(text: str) -> str:
    """Fit for a header: printable ASCII."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def _error_event(message: str) -> bytes:
    body = {"error": {"message": message, "type": "upstream_error", "code": 502}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
