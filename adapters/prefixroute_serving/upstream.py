"""The answer of an upstream (an engine, or a peer's sidecar), read up to its first whole event.

Rules:
1. A stream is known by its first event: an engine that streams may answer 200 and refuse in the first event, as
   SGLang does when its queue is full. Such an event counts as the status that it names.
2. Nothing here is sent to a client.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from prefixroute import Outcome

from .door import JSON, Reply, error_reply
from .headers import DECLINED_HEADER, TARGET_HEADER, read_held_tokens, read_load
from .http_client import IncomingReply
from .streams import EventCutter, cached_tokens, read_event

EVENT_STREAM: Final = "text/event-stream"


class AttemptFailed(Exception):  # noqa: N818 - the outcome of one attempt, not an error of the program
    """One engine did not answer; `reply` is what to tell the client if no other one does either."""

    def __init__(self, outcome: Outcome, what: str, reply: Reply) -> None:
        super().__init__(what)
        self.outcome = outcome
        self.reply = reply


class BegunAnswer(NamedTuple):
    """An upstream that has begun to answer: a whole body, or a stream's first events and what cuts the others.

    `status` is what the answer means, `served_by` the endpoint that gave it: a peer may have taken another of its
    ranks than the one that was asked.
    """

    target: str
    served_by: str
    upstream: IncomingReply
    status: int
    media_type: str
    body: bytes = b""
    events: list[bytes] | None = None
    cutter: EventCutter | None = None


async def begin(target: str, upstream: IncomingReply) -> BegunAnswer:
    """Read an answer up to its first whole event, or whole when it is no stream.

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
    """The answer, if it is one; AttemptFailed when the upstream declines, refuses or fails."""
    headers, status = answer.upstream.headers, answer.status
    if status == 503 and DECLINED_HEADER in headers:
        outcome = Outcome.declined(read_load(headers), read_held_tokens(headers))
        raise failed(outcome, f"{answer.target} is busier than it seemed", 503)
    if status >= 500:
        what = f"status {status}"
        raise AttemptFailed(outcome_of(status, what), what, Reply(status, answer.body, answer.media_type))
    return answer


def outcome_of(status: int, what: str) -> Outcome:
    """How an attempt ended that got an error of the server's."""
    return Outcome.refused(what) if status == 503 else Outcome.failed(what)


def failed(outcome: Outcome, what: str, status: int) -> AttemptFailed:
    """An attempt that ended without an answer, and what the client would be told."""
    return AttemptFailed(outcome, what, error_reply(status, what))


def cached_in_body(answer: BegunAnswer) -> int | None:
    """The reused prompt tokens that an unstreamed answer tells."""
    if answer.status != 200:
        return None
    try:
        body = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    return cached_tokens(body.get("usage")) if isinstance(body, dict) else None
