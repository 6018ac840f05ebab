"""A small inference server with a prefix cache and no event stream: one that nobody wrote an adapter for.

    POST /generate {"tokens": [...], "max_tokens": 8}  ->  {"tokens": [...], "cached_tokens": 1024}
    GET  /slots                                        ->  what each slot holds, and the load

Rules:
1. The cache is some slots. Each keeps the tokens that it served last: the prompt, and the answer but for its last
   token, of which nothing was computed.
2. A prompt reuses its longest common prefix with any slot, never its last token. A conversation that goes on stays in
   its slot; anything else gets a copy of that prefix in the slot that was used least recently, whose rest is lost.
3. One prompt is computed at a time. There is no model: prefill takes time, and the answer is made up.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

VOCABULARY = 32000
MAX_ANSWER = 1024


class Taken(NamedTuple):
    """The slot that a prompt got, and how many of its tokens are there already."""

    slot: int
    cached_tokens: int


class SlotCache:
    """What the slots hold; it takes no time and knows no clock."""

    def __init__(self, slots: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self._used = list(range(slots))
        """Slots, the least recently used first."""

    def match(self, prompt: Sequence[int]) -> Taken:
        """Return the slot with the longest prefix of `prompt`, and how much of it can be reused. O(slots x prefix)."""
        best = max(range(len(self.tokens)), key=lambda slot: _common(self.tokens[slot], prompt))
        return Taken(best, min(_common(self.tokens[best], prompt), len(prompt) - 1))

    def take(self, prompt: Sequence[int]) -> Taken:
        """Give `prompt` a slot that holds what can be reused of it, and nothing else."""
        source, cached = self.match(prompt)
        # The slot whose tokens the prompt merely continues is its own conversation's: nobody needs a copy.
        slot = source if cached and cached >= len(self.tokens[source]) - 1 else self._used[0]
        self.tokens[slot] = list(prompt[:cached])
        self._used.remove(slot)
        self._used.append(slot)
        return Taken(slot, cached)

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        """Note what a slot holds once its prompt was served."""
        self.tokens[slot] = list(tokens)


class SlotsEngine:
    """The server. `time_scale` 0 makes it take no time, while it still reports `tokens_per_s`."""

    def __init__(
        self, slots: int = 4, slot_tokens: int = 4096, tokens_per_s: float = 4000.0, time_scale: float = 1.0
    ) -> None:
        self.cache = SlotCache(slots)
        self.app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/slots", self._slots, methods=["GET"]),
            ]
        )
        self._slot_tokens = slot_tokens
        self._tokens_per_s = tokens_per_s
        self._time_scale = time_scale
        self._turn = asyncio.Lock()
        self._requests = 0
        self._queued_tokens = 0

    def state(self) -> dict[str, Any]:
        """Return the answer to ``GET /slots``."""
        running = int(self._turn.locked())
        return {
            "slots": [{"id": slot, "tokens": tokens} for slot, tokens in enumerate(self.cache.tokens)],
            "capacity_tokens": len(self.cache.tokens) * self._slot_tokens,
            "running": running,
            "waiting": max(0, self._requests - running),
            "queued_tokens": self._queued_tokens,
            "tokens_per_s": self._tokens_per_s,
        }

    async def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Serve a prompt: wait for its turn, reuse what a slot holds, compute the rest."""
        queued = len(prompt) - self.cache.match(prompt).cached_tokens
        self._requests += 1
        self._queued_tokens += queued
        try:
            async with self._turn:
                slot, cached = self.cache.take(prompt)
                await asyncio.sleep((len(prompt) - cached) / self._tokens_per_s * self._time_scale)
                answer = [(sum(prompt) + i) % VOCABULARY for i in range(max_tokens)]
                self.cache.put(slot, prompt + answer[:-1])
        finally:
            self._requests -= 1
            self._queued_tokens -= queued
        return {"tokens": answer, "cached_tokens": cached}

    async def _generate(self, request: Request) -> JSONResponse:
        try:
            body = await request.json()
            prompt, max_tokens = body["tokens"], body.get("max_tokens", 16)
            fits = len(prompt) > 0 and 0 < max_tokens <= MAX_ANSWER and len(prompt) + max_tokens <= self._slot_tokens
            usable = fits and all(type(token) is int and 0 <= token < 1 << 32 for token in prompt)
        except (ValueError, KeyError, TypeError, AttributeError):
            usable = False
        if not usable:
            return JSONResponse({"error": f"pass tokens and max_tokens, {self._slot_tokens} together"}, 400)
        return JSONResponse(await self.generate(prompt, max_tokens))

    async def _slots(self, request: Request) -> JSONResponse:
        return JSONResponse(self.state())


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))


class _Server(uvicorn.Server):
    """Several run in one loop here, and what signals do is that program's business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(engine: SlotsEngine, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an engine while the context is open, and give its URL; port 0 takes a free one."""
    # It listens from here on, so nobody who gets the URL comes too early.
    listener = socket.create_server((host, port))
    server = _Server(uvicorn.Config(engine.app, lifespan="off", ws="none", log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


async def _main(options: argparse.Namespace) -> None:
    async with serving(SlotsEngine(options.slots), port=options.port) as url:
        print(f"slots engine ready: {url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A small engine with a prefix cache and no event stream.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (0)")
    parser.add_argument("--slots", type=int, default=4, help="prompts that it remembers (4)")
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
