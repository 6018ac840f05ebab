"""An upstream (the local engine, or a peer's sidecar): the request to it, and its answer up to the first whole event.

Rules:
1. The first event decides what a stream's answer means: an engine that streams may answer 200 and refuse in the first
   event, as SGLang does when its queue is full. Such an event counts as the status that it names.
2. Nothing here is sent to a client.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from prefixroute import LoadReport, Outcome

from .answer_streams import EventCutter, cached_tokens, read_event
from .attach.kinds import without_rank
from .door import JSON, Reply, error_reply
from .headers import (
    BUDGET_HEADER,
    DECLINED_HEADER,
    HOP_HEADER,
    LOAD_HEADER,
    TARGET_HEADER,
    TENANT_HEADER,
    TOKENS_HEADER,
    budget_text,
    load_text,
    read_held_tokens,
    read_load,
)
from .http_client import IncomingReply
from .site import Site

EVENT_STREAM: Final = "text/event-stream"


class AttemptFailed(Exception):  # noqa: N818 - the outcome of one attempt, not an error of the program
    """One engine did not answer; the client gets `reply` if no other engine answers either."""

    def __init__(self, outcome: Outcome, what: str, reply: Reply) -> None:
        super().__init__(what)
        self.outcome = outcome
        self.reply = reply


class OutgoingRequest(NamedTuple):
    """A client's request as it is sent on.

    `forwarded`: it came from a peer. `tokens` are carried along to a peer, so that the peer need not tokenize the
    prompt again; they are None if they are unknown, or as quick to read as to carry. `tenant` and `salt` are its
    caller's, "" for none; peers get them, since the body is salted already.
    """

    path: str
    body: bytes
    headers: Sequence[tuple[str, str]]
    streamed: bool
    forwarded: bool
    tokens: array[int] | None
    tenant: str = ""
    salt: str = ""


class BegunAnswer(NamedTuple):
    """The begun answer of an upstream: a whole body, or a stream's first events and the cutter of the later ones.

    `status` is the HTTP status that the answer means. `served_by` is the endpoint that gave it: a peer may have chosen
    another of its ranks than the one that was asked.
    """

    target: str
    served_by: str
    upstream: IncomingReply
    status: int
    media_type: str
    body: bytes = b""
    events: list[bytes] | None = None
    cutter: EventCutter | None = None


# --- questions ---------------------------------------------------------------------------------------------


async def ask_engine(site: Site, request: OutgoingRequest, endpoint: str) -> IncomingReply:
    """Send a request to the local engine's rank of `endpoint`. Raises HttpError."""
    engine = site.engine
    headers, body = engine.aimed(endpoint, request.headers, request.body)
    connect_s = site.config.timeouts.connect_s
    return await site.client.post(engine.config.url, request.path, headers, body, connect_s=connect_s)


async def ask_peer(site: Site, request: OutgoingRequest, endpoint: str, budget_s: float) -> IncomingReply:
    """Forward a request to the sidecar of a peer's endpoint, which declines if it would take longer than `budget_s`.

    Raises HttpError, or ValueError for an address that prompts may not be sent to.
    """
    timeouts, body = site.config.timeouts, request.body
    headers = [*without_rank(request.headers), (HOP_HEADER, "1")]
    if budget_s < inf:
        headers.append((BUDGET_HEADER, budget_text(budget_s)))
    if request.tenant or request.salt:
        proof = site.callers.prove(request.tenant, body)
        headers += [(TENANT_HEADER, proof)] if proof else []
    peer = endpoint.partition("/")[0]
    if peer in site.readers:
        body, told = site.carrier.pack(body, request.tokens)
        headers += [(TOKENS_HEADER, told)] if told else []
    patience_s = timeouts.stream_s if request.streamed else timeouts.whole_s
    url = allowed(site.node.endpoint_url(endpoint), site.hosts)
    reply = await site.client.post(url, request.path, headers, body, connect_s=timeouts.connect_s, read_s=patience_s)
    # A peer without this header may be of an older version, which cannot read a body with tokens behind the JSON.
    (site.readers.add if TOKENS_HEADER in reply.headers else site.readers.discard)(peer)
    return reply


def allowed(url: str, hosts: frozenset[str]) -> str:
    """Return a peer's address, which came by gossip, if prompts may be sent there; ValueError if not."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or (hosts and parts.hostname not in hosts):
        raise ValueError(f"prompts are not sent to {url[:100]!r}")
    return url


# --- answers -----------------------------------------------------------------------------------------------


async def begin(target: str, upstream: IncomingReply) -> BegunAnswer:
    """Read an answer up to its first whole event, or to its end when it is no stream.

    Raises AttemptFailed when it is a stream without an event, ValueError when its first event has no end.
    """
    served_by = upstream.headers.get(TARGET_HEADER, target)
    if served_by.partition("/")[0] != target.partition("/")[0]:
        served_by = target
    media_type = upstream.headers.get("content-type", "")
    if not media_type.startswith(EVENT_STREAM):
        return BegunAnswer(target, served_by, upstream, upstream.status, media_type, await upstream.read())
    cutter = EventCutter()
    while data := await upstream.chunk():
        events = cutter.feed(data)
        if not events:
            continue
        first = read_event(events[0])
        if not first.error:
            return BegunAnswer(target, served_by, upstream, upstream.status, media_type, events=events, cutter=cutter)
        upstream.close()
        told = events[0].strip().removeprefix(b"data:").strip()
        return BegunAnswer(target, served_by, upstream, first.status, JSON, told)
    raise failed(Outcome.failed("empty stream"), "the engine sent an empty stream", 502)


def check_answered(answer: BegunAnswer) -> BegunAnswer:
    """Return the answer of an upstream that served; AttemptFailed when it declines, refuses or fails."""
    headers, status = answer.upstream.headers, answer.status
    if status == 503 and DECLINED_HEADER in headers:
        outcome = Outcome.declined(read_load(headers), read_held_tokens(headers))
        raise failed(outcome, f"{answer.target} is busier than it seemed", 503)
    if status >= 500:
        what = f"status {status}"
        raise AttemptFailed(outcome_of(status, what), what, Reply(status, answer.body, answer.media_type))
    return answer


def declined_reply(load: LoadReport, matched_tokens: int) -> Reply:
    """Return the reply to a peer whose prompt would take longer here than its budget."""
    reply = error_reply(503, "it would take longer here than the budget")
    told = (
        (DECLINED_HEADER, str(matched_tokens)),
        (LOAD_HEADER, load_text(load)),
        (TOKENS_HEADER, "read"),
    )
    return reply._replace(headers=told)


def outcome_of(status: int, what: str) -> Outcome:
    """Return the outcome of an attempt that got a server error."""
    return Outcome.refused(what) if status == 503 else Outcome.failed(what)


def failed(outcome: Outcome, what: str, status: int) -> AttemptFailed:
    """Return the failure of an attempt without an answer, with the reply that the client would get."""
    return AttemptFailed(outcome, what, error_reply(status, what))


def cached_in_body(answer: BegunAnswer) -> int | None:
    """Return the reused prompt tokens that an unstreamed answer reports, None if it reports none."""
    if answer.status != 200:
        return None
    try:
        body = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return cached_tokens(body.get("usage")) if isinstance(body, dict) else None
