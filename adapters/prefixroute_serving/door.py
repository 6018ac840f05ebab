"""HTTP for the two routed paths, straight on ASGI: a request's body, a reply, and whether the client is still there.

Rules:
1. There is no framework here: its routing, request and response objects cost as much as the decision. All other paths
   use one (`pages.py`).
2. When a client goes away its request is cancelled, whatever it is waiting for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

JSON = "application/json"


class Gone(Exception):  # noqa: N818 - what clients do, not an error
    """The client went away."""


class Reply(NamedTuple):
    """A whole answer; `headers` beside its media type."""

    status: int
    body: bytes
    media_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


def error_reply(status: int, message: str, kind: str = "upstream_error") -> Reply:
    """An error in the shape that OpenAI's clients expect."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    return Reply(status, msgspec.json.encode(body))


def response_of(reply: Reply) -> Response:
    """Return a reply as a response for Starlette's routes."""
    return Response(reply.body, reply.status, dict(reply.headers), reply.media_type or None)


def headers_of(scope: Scope) -> list[tuple[str, str]]:
    """A request's headers; their names are in lower case."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


def path_of(scope: Scope) -> str:
    """A request's path and query."""
    query = scope["query_string"].decode("latin-1")
    path: str = scope["path"]
    return f"{path}?{query}" if query else path


async def body_of(receive: Receive) -> bytes:
    """A request's whole body. Raises Gone."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        whole: bytes = message.get("body", b"")
        return whole
    pieces = []
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)
        message = await receive()
    raise Gone


async def begin_reply(send: Send, status: int, media_type: str, headers: tuple[tuple[str, str], ...]) -> None:
    """Send the head of a reply."""
    listed = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    if media_type:
        listed.append((b"content-type", media_type.encode("latin-1")))
    await send({"type": "http.response.start", "status": status, "headers": listed})


async def send_piece(send: Send, data: bytes, more: bool = True) -> None:
    """Send a piece of a reply's body."""
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole reply."""
    sized = ("content-length", str(len(reply.body)))
    await begin_reply(send, reply.status, reply.media_type, (*reply.headers, sized))
    await send_piece(send, reply.body, more=False)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` in this task; a client that goes away meanwhile cancels it. Raises Gone."""
    watch = asyncio.ensure_future(_until_gone(receive))
    task = asyncio.current_task()
    assert task is not None
    working = True

    def left(_: object) -> None:
        if working:
            task.cancel()

    watch.add_done_callback(left)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.done() or watch.cancelled():
            raise
        _forgive(task)
        raise Gone from None
    finally:
        working = False
        watch.cancel()


def _forgive(task: asyncio.Task[Any]) -> None:
    """Take back our own cancellation, since from Python 3.11 on a task counts its pending cancellations."""
    if hasattr(task, "uncancel"):
        task.uncancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
