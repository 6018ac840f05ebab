"""One request, from its decision to its last byte, over as many engines as it takes.

Rules:
1. A request crosses at most one hop: what is sent to a peer carries `HOP_HEADER`, and is served there, refused, or
   handed back: the first attempt carries a budget, and a peer that would need longer declines, at once and once.
2. Nothing is sent to the client before an engine's first byte is here, so until then a failure costs time only:
   the next fallback is asked, the local engine last.
3. After the first byte a broken stream goes on from another engine under the rules of `sse.StreamLedger`.
4. Every attempt ends in exactly one `node.report`.

| upstream | outcome | then |
|---|---|---|
| cannot connect, connection breaks, status 5xx | failed | next fallback |
| status 503 | refused | next fallback |
| status 503 with `DECLINED_HEADER` | declined | wherever is best now |
| too slow | timed out | next fallback |
| 200 | served | passed to the client |
| any other status | cancelled | passed to the client, whose mistake it is |
| client went away | cancelled | upstream closed |
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import httpx
import msgspec
from starlette.responses import Response, StreamingResponse

from prefixroute import Decision, LoadReport, Node, Outcome, OutcomeKind

from .config import TimeoutConfig
from .sse import Diverged, EventCutter, StreamLedger, cached_tokens

HOP_HEADER = "x-prefixroute-hop"
BUDGET_HEADER = "x-prefixroute-budget-ms"
DECLINED_HEADER = "x-prefixroute-declined"
"""With the prompt tokens that the declining peer holds."""
LOAD_HEADER = "x-prefixroute-load"
TARGET_HEADER = "x-prefixroute-target"
REASON_HEADER = "x-prefixroute-reason"
MATCHED_HEADER = "x-prefixroute-matched"

_KEPT_REPLY_HEADERS = ("content-type", "x-request-id", "retry-after")
_MAX_LOAD_HEADER = 1024


@dataclass(slots=True)
class Site:
    """What all exchanges of a sidecar share.

    `engine_answered` is told the status of every answer of the local engine, and the prompt's tokens.
    """

    node: Node
    now: Callable[[], float]
    client: httpx.AsyncClient
    endpoint: str
    engine_url: str
    timeouts: TimeoutConfig
    engine_answered: Callable[[int, int], None]
    counts: dict[str, int] = field(default_factory=dict)

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


class AttemptFailed(Exception):  # noqa: N818 - the outcome of one attempt, not an error of the program
    """One engine did not answer; `reply` is what to tell the client if no other one does either."""

    def __init__(self, outcome: Outcome, what: str, reply: Response) -> None:
        super().__init__(what)
        self.outcome = outcome
        self.reply = reply


class _Answer(NamedTuple):
    """An upstream that has begun to answer: a whole body, or a stream and its first bytes."""

    target: str
    response: httpx.Response
    body: bytes
    chunks: AsyncIterator[bytes] | None


def error_reply(status: int, message: str) -> Response:
    """An error in the shape that OpenAI's clients expect."""
    body = {"error": {"message": message, "type": "upstream_error", "code": status}}
    return Response(msgspec.json.encode(body), status, media_type="application/json")


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
            answer, failed = await self._open_next()
            if answer is None:
                return failed
            if answer.chunks is None:
                self._report_served(answer, _cached_in_body(answer))
                return Response(answer.body, answer.response.status_code, self._headers(answer))
            return StreamingResponse(self._stream(answer), 200, self._headers(answer))
        except BaseException:
            self._cancel()
            raise

    # --- attempts ------------------------------------------------------------------------------------------

    async def _open_next(self) -> tuple[_Answer | None, Response]:
        """Ask the current target, then its fallbacks; the last failure's reply when none is left."""
        reply = error_reply(502, "no engine answered")
        while self._target is not None:
            try:
                return await self._open(self._target), reply
            except AttemptFailed as failure:
                reply = failure.reply
                self._report_failure(failure.outcome)
        return None, reply

    async def _open(self, target: str) -> _Answer:
        """Send the request to `target` and wait for its first byte."""
        response: httpx.Response | None = None
        try:
            response = await self._site.client.send(self._request(target), stream=True)
            if target == self._site.endpoint:
                self._site.engine_answered(response.status_code, self._decision.prompt_tokens)
            if response.status_code == 503 and DECLINED_HEADER in response.headers:
                await _close(response)
                raise _failed(_declined_by(response), f"{target} is busier than it seemed", 503)
            if response.status_code >= 500:
                raise _failed_status(response, await response.aread())
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                body = await response.aread()
                return _Answer(target, response, body, None)
            chunks = response.aiter_raw()
            first = await chunks.__anext__()
            return _Answer(target, response, first, chunks)
        except StopAsyncIteration:
            raise _failed(Outcome.failed("empty stream"), "the engine sent an empty stream", 502) from None
        except httpx.TimeoutException as error:
            await _close(response)
            raise _failed(Outcome.timed_out(), f"{target} timed out ({type(error).__name__})", 504) from error
        except httpx.HTTPError as error:
            await _close(response)
            raise _failed(Outcome.failed(_describe(error)), f"{target}: {_describe(error)}", 502) from error
        except BaseException:
            await _close(response)
            raise

    def _request(self, target: str) -> httpx.Request:
        site, call = self._site, self._call
        headers = list(call.headers)
        local = target == site.endpoint
        if local:
            url = site.engine_url
            timeout = httpx.Timeout(None, connect=site.timeouts.connect_s)
        else:
            url = site.node.endpoint_url(target)
            headers.append((HOP_HEADER, "1"))
            if self._budget_s < inf:
                headers.append((BUDGET_HEADER, f"{1000 * self._budget_s:.3f}"))
            patience = site.timeouts.stream_s if call.streamed else site.timeouts.whole_s
            timeout = httpx.Timeout(patience, connect=site.timeouts.connect_s)
        site.count("local" if local else "forwarded")
        return site.client.build_request("POST", url + call.path, content=call.body, headers=headers, timeout=timeout)

    # --- streams -------------------------------------------------------------------------------------------

    async def _stream(self, answer: _Answer) -> AsyncIterator[bytes]:
        """Pass events on, from the next fallback when an upstream dies, until the answer is whole."""
        ledger = StreamLedger()
        current: _Answer | None = answer
        try:
            while current is not None:
                try:
                    async for event in _events(current):
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

    def _report_served(self, answer: _Answer, cached: int | None) -> None:
        if answer.response.status_code == 200:
            load = None if answer.target == self._site.endpoint else _load_of(answer.response)
            self._report(Outcome.served(cached_tokens=cached, ttft_s=self._ttft_s, load=load))
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

    def _headers(self, answer: _Answer) -> dict[str, str]:
        site, decision = self._site, self._decision
        headers = {
            name: answer.response.headers[name] for name in _KEPT_REPLY_HEADERS if name in answer.response.headers
        }
        headers[TARGET_HEADER] = answer.target
        headers[REASON_HEADER] = _header_text(decision.reason)
        headers[MATCHED_HEADER] = str(decision.matched_tokens)
        if self._call.forwarded:
            headers[LOAD_HEADER] = _header_text(dump_load(site.node.load(site.endpoint, site.now())))
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


def _declined_by(response: httpx.Response) -> Outcome:
    held = response.headers[DECLINED_HEADER]
    return Outcome.declined(_load_of(response), int(held) if held.isdecimal() and len(held) < 16 else None)


def _load_of(response: httpx.Response) -> LoadReport | None:
    """The load that a peer's reply carries; None when it carries none that can be read."""
    text = response.headers.get(LOAD_HEADER, "")
    if not text or len(text) > _MAX_LOAD_HEADER:
        return None
    try:
        return msgspec.json.decode(text, type=LoadReport)
    except (msgspec.MsgspecError, ValueError):
        return None


async def _events(answer: _Answer) -> AsyncIterator[bytes]:
    """The whole events of a stream, the first bytes included."""
    assert answer.chunks is not None
    cutter = EventCutter()
    for event in cutter.feed(answer.body):
        yield event
    async for chunk in answer.chunks:
        for event in cutter.feed(chunk):
            yield event


def _cached_in_body(answer: _Answer) -> int | None:
    """The reused prompt tokens that an unstreamed answer tells."""
    if answer.response.status_code != 200:
        return None
    try:
        body = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return cached_tokens(body.get("usage")) if isinstance(body, dict) else None


def _failed_status(response: httpx.Response, body: bytes) -> AttemptFailed:
    status = response.status_code
    what = f"status {status}"
    outcome = Outcome.refused(what) if status == 503 else Outcome.failed(what)
    reply = Response(body, status, media_type=response.headers.get("content-type"))
    return AttemptFailed(outcome, what, reply)


def _failed(outcome: Outcome, what: str, status: int) -> AttemptFailed:
    return AttemptFailed(outcome, what, error_reply(status, what))


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
