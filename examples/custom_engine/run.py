"""Two slots engines, two nodes, one process: a prompt that comes to the wrong node goes where its prefix is.

Everything is on loopback; it ends by itself, with exit code 1 if a prediction was wrong.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import httpx
from engine import SlotsEngine, serving
from prefixroute_slots import SlotsWatcher

from prefixroute import Decision, Domain, Node, NodeSettings, Outcome
from prefixroute.aio import Driver, UdpTransport

DOMAIN = Domain("made-up", "token ids", secret=b"shared by the cluster")
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 2048, 48, 16
TOKENS_PER_S = 500.0
"""So slow that the gain is plain on any machine, however busy it is."""


class AttachedEngine(NamedTuple):
    """An engine, the node beside it, and what joins them."""

    node: Node
    driver: Driver
    endpoint: str
    watcher: SlotsWatcher
    client: httpx.AsyncClient


class ServedPrompt(NamedTuple):
    """How a prompt fared."""

    decision: Decision
    answer: list[int]
    cached_tokens: int


async def open_site(name: str, engine: SlotsEngine, stack: AsyncExitStack, settings: NodeSettings) -> AttachedEngine:
    """Start an engine and a node; `stack` stops both."""
    client = await stack.enter_async_context(httpx.AsyncClient())
    url = await stack.enter_async_context(serving(engine))
    node = Node(name, DOMAIN, rng=random.Random(name), now=time.monotonic(), settings=settings)
    driver = await stack.enter_async_context(Driver(node, await UdpTransport.open()))
    # Here peers send to the engine itself. A server would give its own URL, and route what comes there with
    # forwarded=True.
    endpoint = node.add_endpoint("0", url=url, incarnation=time.time_ns(), now=driver.now())
    watcher = SlotsWatcher(
        url,
        lambda batch: node.apply(endpoint, batch, driver.now()),
        lambda load: node.set_load(endpoint, load, driver.now()),
        client,
        interval_s=0.05,
    )
    return AttachedEngine(node, driver, endpoint, watcher, client)


def join(*sites: AttachedEngine) -> None:
    """Make all sites each other's peers."""
    for site in sites:
        for other in sites:
            if other is not site:
                assert isinstance(other.driver.transport, UdpTransport)
                site.node.add_peer(other.node.node, other.driver.transport.address, site.driver.now())


async def ask(site: AttachedEngine, prompt: list[int]) -> ServedPrompt:
    """Serve a prompt that came to `site`, wherever that is best."""
    decision = site.node.route(prompt, site.driver.now())
    endpoint: str | None = decision.target
    while endpoint is not None:
        body = {"tokens": prompt, "max_tokens": ANSWER_TOKENS}
        began = site.driver.now()
        try:
            reply = await site.client.post(site.node.endpoint_url(endpoint) + "/generate", json=body, timeout=30)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            endpoint = site.node.report(decision, Outcome.failed(str(error)), site.driver.now())
            continue
        told, now = reply.json(), site.driver.now()
        site.node.report(decision, Outcome.served(told["cached_tokens"], now - began), now)
        return ServedPrompt(decision, told["tokens"], told["cached_tokens"])
    raise RuntimeError("no engine answered")


def knows(site: AttachedEngine, endpoint: str, blocks: int) -> bool:
    """Whether `site` has heard that an endpoint holds so many blocks, and that it is not busy with them any more."""
    rows = {row.endpoint: row for row in site.node.stats(site.driver.now()).endpoints}
    return endpoint in rows and rows[endpoint].blocks >= blocks and rows[endpoint].push_back == "open"


async def _until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.01)


async def _main() -> int:
    rng = random.Random(1)
    wrong = 0

    def tokens(n: int) -> list[int]:
        return [rng.randrange(32000) for _ in range(n)]

    async with AsyncExitStack() as stack:
        first, second = [
            await open_site(name, SlotsEngine(tokens_per_s=TOKENS_PER_S), stack, NodeSettings())
            for name in ("node-1", "node-2")
        ]
        for site in (first, second):
            # Its speed is known before its peers are: an engine that says nothing passes for one of usual speed.
            await site.watcher.poll()
            task = asyncio.create_task(site.watcher.run())
            stack.callback(task.cancel)
        join(first, second)

        async def show(title: str, site: AttachedEngine, prompt: list[int]) -> ServedPrompt:
            nonlocal wrong
            served = await ask(site, prompt)
            right = served.cached_tokens == served.decision.matched_tokens
            wrong += not right
            print(f"\n{title}, at {site.node.node}")
            print(site.node.explain(served.decision).text())
            print(
                f"  predicted {served.decision.matched_tokens} cached tokens, the engine had {served.cached_tokens}:"
                f" {'right' if right else 'WRONG'}"
            )
            return served

        system = tokens(SYSTEM_TOKENS)
        prompt = system + tokens(QUESTION_TOKENS)
        await show("A new prompt", first, prompt)
        held = (SYSTEM_TOKENS + QUESTION_TOKENS) // DOMAIN.block_size
        await asyncio.wait_for(_until(lambda: knows(second, first.endpoint, held)), 60)

        other = await show("The same system prompt, another question", second, system + tokens(QUESTION_TOKENS))
        wrong += other.decision.target != first.endpoint
        await show("Something else", second, tokens(QUESTION_TOKENS))
    print(f"\n{'all as predicted' if not wrong else f'{wrong} not as predicted'}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(asyncio.run(_main()))
