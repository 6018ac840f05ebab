#!/usr/bin/env python3
"""Hold a node's estimate of a cache hit against what a real engine reports, request by request.

    python live_tests/check_estimates.py         an engine of its own (see docs/real-vllm.md), ended afterwards
    python live_tests/check_estimates.py --url URL --model NAME     a vLLM that runs, with KV-cache events on

Rules:
1. One request at a time, and the events of one are applied before the next: what differs is an error of the
   mirror, not a delay.
2. The prompts share prefixes, diverge inside blocks, carry salts, and together are larger than the cache, so that
   the engine evicts all the time.
3. Truth is ``usage.prompt_tokens_details.cached_tokens``; vLLM tells it under ``--enable-prompt-tokens-details``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prefixroute_launch.launcher import EngineSpec, RunningEngine
from prefixroute_launch.processes import ProcessError, free_ports
from prefixroute_launch.vllm_launcher import VllmLauncher
from prefixroute_vllm import EventSource, Follower, discover

from prefixroute import Domain, Namespace, Node, Outcome, UsageError

# Events follow their step by 0.5 to 35 ms as a rule; one took 346 ms on a noisy 2-core machine.
_QUIET_S = 0.25
_POLL_S = 0.02
_TOKENS = range(100, 4000)
_PREFIXES = 12
_OWN_BLOCKS = 400


class Asked(NamedTuple):
    """A request: its tokens, the salt that separates it from others, and how many tokens to answer."""

    tokens: list[int]
    salt: str
    answer_tokens: int


class EstimateRow(NamedTuple):
    """What was expected of one request, and what the engine said."""

    prompt_tokens: int
    expected: int
    reported: int


def requests(seed: int, count: int) -> Iterator[Asked]:
    """Yield `count` requests over twelve prefixes of 300 to 1,200 tokens; the same seed, the same requests."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return rng.choices(_TOKENS, k=rng.randrange(low, high))

    prefixes = [some(300, 1200) for _ in range(_PREFIXES)]
    for _ in range(count):
        tokens = rng.choice(prefixes)
        if rng.random() < 0.2:
            tokens = tokens[: rng.randrange(100, len(tokens))]
        if rng.random() < 0.9:
            tokens = tokens + some(1, 100)
        yield Asked(tokens, rng.choice(("", "", "", "tenant-b")), rng.choice((1, 8, 40)))


async def quiet(follower: Follower) -> None:
    """Wait until no message has come for a while."""
    seen, since = follower.stats().messages, time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        await asyncio.sleep(_POLL_S)
        if follower.stats().messages != seen:
            seen, since = follower.stats().messages, time.monotonic()


async def ask(client: httpx.AsyncClient, url: str, model: str, asked: Asked) -> int:
    """Send one request; return the cached tokens that the engine reports. UsageError when it reports none."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": asked.tokens,
        "max_tokens": asked.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if asked.salt:
        body["cache_salt"] = asked.salt
    reply = await client.post(f"{url}/v1/completions", json=body)
    reply.raise_for_status()
    details = reply.json()["usage"].get("prompt_tokens_details")
    if details is None or details.get("cached_tokens") is None:
        raise UsageError("the engine does not report cached tokens: start it with --enable-prompt-tokens-details")
    return int(details["cached_tokens"])


async def compare(url: str, model: str, source: EventSource, wanted: Iterator[Asked]) -> tuple[list[EstimateRow], Node]:
    """Send the requests one by one and note what was expected of each; the node keeps the mirror."""
    node = Node("check", Domain(model=model, tokenizer=model), rng=random.Random(0), now=time.monotonic())
    endpoint = node.add_endpoint("0", url=url, incarnation=time.time_ns(), now=time.monotonic())
    follower = Follower(source, lambda batch: node.apply(endpoint, batch, time.monotonic()))
    following = asyncio.create_task(follower.run())
    rows = []
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
            await quiet(follower)
            for asked in wanted:
                now = time.monotonic()
                node.handle_timer(now)  # nobody gossips here, but what the engine taught is taken over in rounds
                decision = node.route(asked.tokens, now, namespace=Namespace(salt=asked.salt), forwarded=True)
                reported = await ask(client, url, model, asked)
                node.report(decision, Outcome.served(cached_tokens=reported), time.monotonic())
                rows.append(EstimateRow(len(asked.tokens), decision.matched_tokens, reported))
                await quiet(follower)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return rows, node


@contextlib.asynccontextmanager
async def own_engine() -> AsyncIterator[RunningEngine]:
    """Start a vLLM with a cache of 6,400 tokens for the length of the block."""
    (port,) = free_ports(1, socket.SOCK_STREAM)
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as folder:
        events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        launcher = VllmLauncher(EngineSpec("check", port, events, replay, "", 16, _OWN_BLOCKS, 0, Path(folder)))
        try:
            engine = await launcher.start()
            await launcher.wait_ready()
            yield engine
        finally:
            await launcher.stop()


def tell(rows: list[EstimateRow], node: Node) -> bool:
    """Print the comparison; True when every estimate was exact."""
    wrong = [row for row in rows if row.expected != row.reported]
    over = sum(row.expected > row.reported for row in wrong)
    tokens, cached = sum(row.prompt_tokens for row in rows), sum(row.reported for row in rows)
    counts = node.residency("check/0").counts
    print(f"{len(rows)} requests of {tokens:,} tokens, {cached:,} of them cached")
    print(f"estimates: {len(rows) - len(wrong)} exact, {over} too high, {len(wrong) - over} too low")
    print(f"events: {counts.stored:,} blocks stored, {counts.removed:,} removed, {counts.unknown_events} unknown")
    for row in wrong[:10]:
        print(f"  {row.prompt_tokens} tokens: expected {row.expected}, reported {row.reported}")
    return not wrong


async def check(args: argparse.Namespace) -> bool:
    """Run the comparison that the options ask for."""
    wanted = requests(args.seed, args.requests)
    if args.url:
        source, *_ = await discover(args.url, endpoint=args.events, replay_endpoint=args.replay)
        return tell(*await compare(args.url, args.model, source, wanted))
    async with own_engine() as engine:
        source = EventSource(engine.events_endpoint, engine.replay_endpoint)
        return tell(*await compare(engine.url, engine.model, source, wanted))


def main(argv: list[str] | None = None) -> int:
    """Run the check; exit status 0 when all estimates were exact, 1 when not or when it failed, 2 for a mistake."""
    parser = argparse.ArgumentParser(description="Compare estimated cache hits with what a real engine reports.")
    parser.add_argument("--url", help="a running vLLM; without it one is started")
    parser.add_argument("--model", default=VllmLauncher.model, help="the name it serves")
    parser.add_argument("--events", default="tcp://*:5557", help="its event endpoint, if it cannot tell (before 0.31)")
    parser.add_argument("--replay", help="its replay endpoint, likewise")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7)
    try:
        return 0 if asyncio.run(check(parser.parse_args(argv))) else 1
    except UsageError as error:
        print(f"check_estimates: {error}", file=sys.stderr)
        return 2
    except (ProcessError, httpx.HTTPError) as error:
        print(f"check_estimates: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
