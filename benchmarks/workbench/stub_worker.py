#!/usr/bin/env python3
"""An engine that costs almost nothing, for what stands in front of it: vLLM's HTTP wire without a model.

    python benchmarks/workbench/stub_worker.py PORT [EVENTS REPLAY]

EVENTS and REPLAY are the ZeroMQ addresses where cache events are published. Rules:
1. An answer is a stream of `EVENTS` events, a write each and `PAUSE_S` apart, then usage and ``[DONE]``; unstreamed it
   is one body. The first event leaves at once.
2. ``cached_tokens`` is true for an infinite cache with pages of `PAGE_TOKENS`. New pages are published as the answer
   ends, so that they cost its first event nothing.
3. A word is a token and has `WORD_CHARACTERS` characters, blank included, so that texts and token ids can be compared.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec

from prefixroute.emulator import KvEventsConfig
from prefixroute.emulator.event_socket import EventPublisher
from prefixroute.emulator.vllm_wire import Batch, BlockStored

MODEL = "stub"
EVENTS = 8
PAUSE_S = 0.001
PAGE_TOKENS = 256
WORD_CHARACTERS = 4
VOCABULARY = 4096

_JSON = b"application/json"
_METRICS = (
    b"".join(
        b'%s{engine="0",model_name="stub"} %s\n' % (name, value)
        for name, value in (
            (b"vllm:num_requests_running", b"0.0"),
            (b"vllm:num_requests_waiting", b"0.0"),
            (b"vllm:kv_cache_usage_perc", b"0.0"),
            # What a page of a real engine holds besides: some hundred lines that are of no interest.
            *((b"vllm:some_histogram_bucket", b"%d.0" % n) for n in range(400)),
        )
    )
    + b'vllm:cache_config_info{engine="0",num_gpu_blocks="65536",block_size="256"} 1.0\n'
)
_STATIC: dict[str, tuple[bytes, bytes]] = {
    "/metrics": (_METRICS, b"text/plain"),
    "/version": (b'{"version":"0.32.0"}', _JSON),
    "/kv_event_sources": (b"{}", _JSON),
    "/v1/models": (b'{"object":"list","data":[{"id":"stub","object":"model","max_model_len":65536}]}', _JSON),
    "/get_model_info": (b'{"model_path":"stub","is_generation":true,"served_model_name":"stub"}', _JSON),
    "/model_info": (b'{"model_path":"stub","is_generation":true,"served_model_name":"stub"}', _JSON),
    "/get_server_info": (b'{"model_path":"stub","served_model_name":"stub","dp_size":1,"version":"stub"}', _JSON),
    "/server_info": (b'{"model_path":"stub","served_model_name":"stub","dp_size":1,"version":"stub"}', _JSON),
}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def words(ids: Sequence[int]) -> str:
    """The text of token ids; `tokens` reads it back."""
    return "".join(f"{token:03x} " for token in ids)


_IDS = {f"{token:03x}": token for token in range(VOCABULARY)}


def tokens(text: str) -> list[int]:
    """The token ids of a text."""
    return [_IDS.get(word, 0) for word in text.split()]


class Cache:
    """What an infinite cache holds, and how much of a prompt that is."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.publisher = EventPublisher(KvEventsConfig())

    def take(self, prompt: str | Sequence[int]) -> tuple[int, int]:
        """The tokens of a prompt, and how many were cached; it is cached from now on."""
        page = PAGE_TOKENS * (WORD_CHARACTERS if isinstance(prompt, str) else 1)
        keys, key = [], b""
        for at in range(0, len(prompt) - page + 1, page):
            piece = prompt[at : at + page]
            raw = piece.encode() if isinstance(piece, str) else array("H", piece).tobytes()
            key = blake2b(key + raw, digest_size=16).digest()
            keys.append(key)
        known = next((n for n, key in enumerate(keys) if key not in self._seen), len(keys))
        if known < len(keys):
            self._seen.update(keys[known:])
            rest = prompt[known * page : len(keys) * page]
            self._publish(keys, known, tuple(tokens(rest) if isinstance(rest, str) else rest))
        return len(prompt) * PAGE_TOKENS // page, known * PAGE_TOKENS

    def _publish(self, keys: Sequence[bytes], known: int, ids: tuple[int, ...]) -> None:
        parent = keys[known - 1] if known else None
        stored = BlockStored(tuple(keys[known:]), parent, ids, PAGE_TOKENS, None, "GPU", None)
        self.publisher.publish(Batch(time.time(), [stored]))


CACHE = Cache()


class Worker(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer every whole request."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).decode("latin1")
            if head.startswith("PRI "):  # a probe for HTTP/2
                self._transport.close()
                return
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            if "chunked" in fields.get("transfer-encoding", ""):
                stop = self._buffer.find(b"\r\n0\r\n\r\n", end + 2)
                if stop < 0:
                    return
                body = _unchunked(bytes(self._buffer[end + 4 : stop + 2]))
                del self._buffer[: stop + 7]
            else:
                stop = end + 4 + int(fields.get("content-length", 0))
                if len(self._buffer) < stop:
                    return
                body = bytes(self._buffer[end + 4 : stop])
                del self._buffer[:stop]
            self._answer(head.split(" ", 2)[1].split("?")[0], body)

    def _answer(self, path: str, body: bytes) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            self._complete(msgspec.json.decode(body))
        elif path == "/tokenize":
            self._whole(msgspec.json.encode({"tokens": tokens(msgspec.json.decode(body)["prompt"])}), _JSON)
        else:
            self._whole(*_STATIC.get(path, (b"{}", _JSON)))

    def _whole(self, body: bytes, media_type: bytes) -> None:
        self._transport.write(_HEAD % (media_type, len(body)) + body)

    def _complete(self, request: dict[str, Any]) -> None:
        prompt = request.get("prompt") or "".join(message["content"] for message in request["messages"])
        if not request.get("stream"):
            self._whole(_chunk("ok " * EVENTS, "stop", _usage(prompt)), _JSON)
            return
        self._transport.write(_STREAM_HEAD)
        self._send_event(1, prompt)

    def _send_event(self, number: int, prompt: str | Sequence[int]) -> None:
        if self._transport.is_closing():
            return
        last = number == EVENTS
        self._transport.write(_piece(b"data: " + _chunk("ok ", "stop" if last else None) + b"\n\n"))
        if last:
            closing = msgspec.json.encode(
                {"id": "x", "object": "text_completion", "choices": [], "usage": _usage(prompt)}
            )
            self._transport.write(_piece(b"data: " + closing + b"\n\n") + _piece(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            asyncio.get_running_loop().call_later(PAUSE_S, self._send_event, number + 1, prompt)


def _usage(prompt: str | Sequence[int]) -> dict[str, Any]:
    count, cached = CACHE.take(prompt)
    return {"prompt_tokens": count, "completion_tokens": EVENTS, "prompt_tokens_details": {"cached_tokens": cached}}


def _chunk(text: str, finish: str | None, usage: dict[str, Any] | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = {"id": "x", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}
    return msgspec.json.encode(body if usage is None else {**body, "usage": usage})


def _piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _unchunked(rest: bytes) -> bytes:
    body = b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
    return body


async def serve(port: int, *sockets: str) -> None:
    """Answer on 127.0.0.1 until the process ends; `sockets` are for events and replay."""
    if sockets:
        CACHE.publisher = EventPublisher(
            KvEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=sockets[0], replay_endpoint=sockets[1]
            )
        )
        await CACHE.publisher.start()
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve on the port that the command line names."""
    serving = serve(int(sys.argv[1]), *sys.argv[2:4])
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


if __name__ == "__main__":
    main()
