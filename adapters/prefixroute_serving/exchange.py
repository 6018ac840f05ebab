"""One request, from its decision to its last byte, over as many engines as it takes.

Rules:
1. A request crosses at most one hop: a forward carries `HOP_HEADER`, and the peer serves it, refuses it or hands it
   back. Only the first attempt carries a budget; a peer that would need longer declines at once.
2. Nothing is sent to the client before an engine's first event has come, so until then a failure costs only time: the
   next fallback is asked, the local engine last.
3. After the first event, a broken stream goes on from another engine under the rules of `answer_streams.StreamLedger`.
4. Every attempt ends in exactly one `node.report`.
5. A peer with several endpoints (ranks) chooses among them itself. Load and cached tokens in its answer count for the
   endpoint that was asked only if that endpoint served.

| upstream | outcome | then |
|---|---|---|
| cannot connect, connection breaks, status 5xx | failed | next fallback |
| status 503 | refused | next fallback |
| status 503 with `DECLINED_HEADER` | declined | the best target now |
| too slow | timed out | next fallback |
| 200 | served | passed to the client |
| any other status | cancelled | passed to the client, whose mistake it is |
| a stream whose first event is an error | as the status that it names | as above |
| client went away | cancelled | upstream closed |
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf

import msgspec
from starlette.types import Send

from prefixroute import Decision, Outcome, OutcomeKind

from .answer_streams import Diverged, StreamLedger, UpstreamBroke
from .cache_reads import reads_cache
from .door import Reply, begin_reply, error_reply, send_piece, send_reply
from .headers import (
    LOAD_HEADER,
    MATCHED_HEADER,
    REASON_HEADER,
    TARGET_HEADER,
    TOKENS_HEADER,
    load_text,
    printable,
    read_load,
)
from .http_client import HttpError, IncomingReply, TimedOut
from .site import Site
from .turns import Turn
from .upstream import (
    AttemptFailed,
    BegunAnswer,
    OutgoingRequest,
    ask_engine,
    ask_peer,
    begin,
    cached_in_body,
    check_answered,
    failed,
    outcome_of,
)

_KEPT_REPLY_HEADERS = ("x-request-id", "retry-after")


class Exchange:
    """One request under one decision."""

    def __init__(self, site: Site, request: OutgoingRequest, decision: Decision) -> None:
        self._site = site
        self._request = request
        self._decision = decision
        self._began = time.perf_counter()
        self._ttft_s: float | None = None
        self._target: str | None = decision.target
        self._budget_s = decision.budget_s
        self._turn: Turn | None = None
        self._settled = False

    async def respond(self, send: Send) -> None:
        """Send the answer of the first engine that gives one; an error reply when all have failed."""
        try:
            answer, sorry = await self._open_next()
            if answer is None:
                await send_reply(send, sorry)
            elif answer.cutter is None:
                self._report_served(answer, cached_in_body(answer))
                await send_reply(send, Reply(answer.status, answer.body, answer.media_type, self._headers(answer)))
            else:
                await begin_reply(send, 200, answer.media_type, self._headers(answer))
                await self._stream(answer, send)
        finally:
            self._cancel()

    # --- attempts ------------------------------------------------------------------------------------------

    async def _open_next(self) -> tuple[BegunAnswer | None, Reply]:
        """Ask the current target, then its fallbacks; return None and the last failure's reply when none is left."""
        reply = error_reply(502, "no engine answered")
        while self._target is not None:
            try:
                return await self._open(self._target), reply
            except AttemptFailed as failure:
                reply = failure.reply
                self._report_failure(failure.outcome)
        return None, reply

    async def _open(self, target: str) -> BegunAnswer:
        """Send the request to `target` and wait for its first event."""
        upstream: IncomingReply | None = None
        try:
            upstream = await self._send(target)
            answer = await begin(target, upstream)
            self._note_status(target, answer.status)
            return check_answered(answer)
        except TimedOut as error:
            _close(upstream)
            raise failed(Outcome.timed_out(), f"{target} timed out: {error}", 504) from error
        except (HttpError, ValueError) as error:
            _close(upstream)
            if target in self._site.endpoints:
                self._site.engine.doubt()
            raise failed(Outcome.failed(str(error)), f"{target}: {error}", 502) from error
        except BaseException:
            _close(upstream)
            raise

    def _note_status(self, target: str, status: int) -> None:
        if target in self._site.endpoints:
            weighed = self._decision.candidate(target)
            cached = weighed.matched_tokens if weighed else 0
            self._site.engine.answered(target, status, self._decision.prompt_tokens, cached)

    async def _send(self, target: str) -> IncomingReply:
        if target in self._site.endpoints:
            self._site.count("local")
            await self._take_turn(target)
            return await ask_engine(self._site, self._request, target)
        self._site.count("forwarded")
        return await ask_peer(self._site, self._request, target, self._budget_s)

    async def _take_turn(self, target: str) -> None:
        """Wait for the request's turn at the local engine; AttemptFailed when too many of its tenant's are waiting."""
        site, request = self._site, self._request
        if site.turns is None:
            return
        self._turn = turn = site.turns.turn(target, request.streamed)
        turn.enter(request.tenant, self._decision, target, len(request.body))
        if turn.full:
            site.count("refused: queue full")
            raise failed(Outcome.cancelled(), "too many requests of this tenant wait here", 429)
        await turn.come()

    # --- streams -------------------------------------------------------------------------------------------

    async def _stream(self, answer: BegunAnswer, send: Send) -> None:
        """Pass events on, from the next fallback when an upstream dies, until the answer is whole."""
        ledger = StreamLedger()
        current: BegunAnswer | None = answer
        try:
            while current is not None:
                outcome = await self._pass_on(current, ledger, send)
                if outcome is None:
                    self._report_served(current, ledger.cached_tokens)
                    await send_piece(send, b"", more=False)
                    return
                self._report_failure(outcome)
                self._site.count("resumed")
                current, _ = await self._open_next()
                ledger.restart()
            await send_piece(send, _error_event("no engine could finish the answer"), more=False)
        except Diverged as error:
            self._site.count("diverged")
            if current is not None:
                current.upstream.close()
            await send_piece(send, _error_event(f"the answer was broken off: {error}"), more=False)

    async def _pass_on(self, answer: BegunAnswer, ledger: StreamLedger, send: Send) -> Outcome | None:
        """Pass on one upstream's events; return how it failed, None when its answer is whole. Raises Diverged."""
        assert answer.cutter is not None
        events: Iterable[bytes] = answer.events or ()
        try:
            while True:
                passed, broken = _accepted(ledger, events)
                if self._ttft_s is None and (ledger.has_text or ledger.done):
                    self._note_first_token()
                if passed:
                    await send_piece(send, passed)
                if broken is not None:
                    raise broken
                data = await answer.upstream.chunk()
                if not data:
                    return None if ledger.done else Outcome.failed("the stream ended early")
                events = answer.cutter.feed(data)
        except TimedOut:
            return Outcome.timed_out()
        except UpstreamBroke as error:
            self._note_status(answer.target, error.status)
            return outcome_of(error.status, str(error))
        except (HttpError, ValueError) as error:
            return Outcome.failed(str(error))
        finally:
            answer.upstream.close()

    def _note_first_token(self) -> None:
        self._ttft_s = time.perf_counter() - self._began
        self._site.node.first_token(self._decision, self._site.now())
        if self._turn is not None:
            self._turn.first_token()

    # --- reports -------------------------------------------------------------------------------------------

    def _report_served(self, answer: BegunAnswer, cached: int | None) -> None:
        if answer.status == 200:
            asked = answer.served_by == answer.target
            load = None if answer.target in self._site.endpoints or not asked else read_load(answer.upstream.headers)
            told = cached if asked else None
            fair = told is None or self._is_fair(answer.target, told)
            if not fair:
                self._site.count("answers without the cache")
            self._report(Outcome.served(cached_tokens=told, ttft_s=self._ttft_s, load=load, read_cache=fair))
            self._settled = True
        else:
            self._cancel()  # the client's own mistake: nothing was computed, nothing is cached

    def _is_fair(self, target: str, cached: int) -> bool:
        """Whether an answer's count says what the cache held."""
        weighed = self._decision.candidate(target)
        predicted = weighed.matched_tokens if weighed is not None else 0
        return 0 < predicted <= cached or reads_cache(self._request.body, strict=predicted > 0)

    def _report_failure(self, outcome: Outcome) -> None:
        self._site.count("handed back" if outcome.kind is OutcomeKind.DECLINED else "failed attempts")
        # The next attempt keeps the request, and is not charged the time of this one.
        self._budget_s = inf
        self._began = time.perf_counter()
        self._target = self._report(outcome)
        self._settled = self._target is None

    def _cancel(self) -> None:
        """Report a request whose client is gone as cancelled, unless its outcome has been reported."""
        if not self._settled:
            self._settled = True
            self._report(Outcome.cancelled())

    def _report(self, outcome: Outcome) -> str | None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.over(outcome)
        return self._site.node.report(self._decision, outcome, self._site.now(), endpoint=self._target)

    def _headers(self, answer: BegunAnswer) -> tuple[tuple[str, str], ...]:
        site, decision, told = self._site, self._decision, answer.upstream.headers
        headers = [(name, told[name]) for name in _KEPT_REPLY_HEADERS if name in told]
        headers.append((TARGET_HEADER, answer.served_by))
        headers.append((REASON_HEADER, printable(decision.reason)))
        headers.append((MATCHED_HEADER, str(decision.matched_tokens)))
        if self._request.forwarded:
            headers.append((TOKENS_HEADER, "read"))
            if answer.target in site.endpoints:
                load = site.node.load(answer.target, site.now())
                headers.append((LOAD_HEADER, load_text(load)))
        return tuple(headers)


def _accepted(ledger: StreamLedger, events: Iterable[bytes]) -> tuple[bytes, Diverged | UpstreamBroke | None]:
    """Return the bytes to pass on of events that came together, and the exception that ended them early, or None."""
    passed = []
    try:
        for event in events:
            kept = ledger.accept(event)
            if kept is not None:
                passed.append(kept)
    except (Diverged, UpstreamBroke) as error:
        return b"".join(passed), error
    return b"".join(passed), None


def _close(upstream: IncomingReply | None) -> None:
    if upstream is not None:
        upstream.close()


def _error_event(message: str) -> bytes:
    body = {"error": {"message": message, "type": "upstream_error", "code": 502}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
