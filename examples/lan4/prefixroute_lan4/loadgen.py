"""The demo's client: sends a trace open loop and measures what comes back.

Rules:
1. A request leaves at its scheduled time whatever became of the others, and its clock starts at that time.
2. A client knows several addresses, as a real one would: when the node it asked dies under it, it sends the
   request again to the next node. Only a request that no node answers is an error.
3. An answer counts when it came whole: 200, at least one token, and the closing ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx

from .measure import RequestSample
from .workload import DemoRequest, DemoTrace

TARGET_HEADER = "x-prefixroute-target"
_CONNECT_S, _READ_S = 2.0, 120.0
_MAX_ERROR_CHARS = 200


class NodeAddress(NamedTuple):
    """Where clients reach a node."""

    node: str
    url: str


class AnswerError(Exception):
    """This node did not answer the request; another one may."""


@dataclass(slots=True)
class StreamedAnswer:
    """What one attempt has received so far; times by `time.monotonic`. `served_by` is the endpoint, if one is named."""

    served_by: str = ""
    first_token_at: float | None = None
    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    done: bool = False


def new_client() -> httpx.AsyncClient:
    """An HTTP client for loopback: many connections, no proxies."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        trust_env=False,
    )


async def send_trace(
    trace: DemoTrace,
    nodes: Sequence[NodeAddress],
    model: str,
    on_answer: Callable[[RequestSample], None] = lambda sample: None,
) -> list[RequestSample]:
    """Send every request of `trace` at its time and return what came of each, in the trace's order.

    `on_answer` is called as each one ends. Cancelling this cancels all requests in flight.
    """
    began = time.monotonic()
    async with new_client() as client:
        tasks = []
        try:
            for request in trace.requests:
                await asyncio.sleep(began + request.at_s - time.monotonic())
                tasks.append(asyncio.create_task(_send(client, request, nodes, model, began, on_answer)))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _send(
    client: httpx.AsyncClient,
    request: DemoRequest,
    nodes: Sequence[NodeAddress],
    model: str,
    began: float,
    on_answer: Callable[[RequestSample], None],
) -> RequestSample:
    """Ask the origin, then the next node round the ring, until one answers or all have failed."""
    errors = []
    for attempt in range(len(nodes)):
        origin = nodes[(request.origin + attempt) % len(nodes)]
        try:
            answer = await ask(client, origin, model, request.prompt, request.answer_tokens)
        except (httpx.HTTPError, AnswerError) as error:
            errors.append(f"{origin.node}: {str(error) or type(error).__name__}")
            continue
        sample = _sample(request, origin, answer, attempt, began)
        on_answer(sample)
        return sample
    now = time.monotonic() - began
    first = nodes[request.origin % len(nodes)].node
    sample = RequestSample(
        request.number, request.at_s, 0.0, now - request.at_s, first, "", 0, 0, "", len(nodes) - 1, "; ".join(errors)
    )
    on_answer(sample)
    return sample


def _sample(
    request: DemoRequest, origin: NodeAddress, answer: StreamedAnswer, resends: int, began: float
) -> RequestSample:
    assert answer.first_token_at is not None
    return RequestSample(
        number=request.number,
        at_s=request.at_s,
        ttft_s=answer.first_token_at - began - request.at_s,
        total_s=time.monotonic() - began - request.at_s,
        origin=origin.node,
        served_by=answer.served_by.partition("/")[0] or origin.node,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        text="".join(answer.text),
        resends=resends,
    )


async def ask(
    client: httpx.AsyncClient, origin: NodeAddress, model: str, prompt: str | Sequence[int], answer_tokens: int
) -> StreamedAnswer:
    """One attempt at one node, with a text or token ids; AnswerError when the answer did not come whole."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = StreamedAnswer()
    async with client.stream("POST", f"{origin.url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            detail = (await response.aread()).decode("utf-8", "replace")[:_MAX_ERROR_CHARS]
            raise AnswerError(f"status {response.status_code}: {detail}")
        answer.served_by = response.headers.get(TARGET_HEADER, "")
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                _take(answer, line[5:].strip())
    if not answer.done or answer.first_token_at is None:
        raise AnswerError("the stream ended early")
    return answer


def _take(answer: StreamedAnswer, data: str) -> None:
    """Fold one server-sent event into the answer."""
    if data == "[DONE]":
        answer.done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        raise AnswerError(str(chunk["error"])[:_MAX_ERROR_CHARS])
    if chunk.get("choices"):
        if answer.first_token_at is None:
            answer.first_token_at = time.monotonic()
        answer.text.append(chunk["choices"][0].get("text") or "")
    usage = chunk.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
