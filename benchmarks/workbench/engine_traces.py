"""Three small traces for fleets of real engines, and how each is sent.

Prompts are token ids, so their lengths are exact for every engine and need no tokenizer. A trace depends on its seed
alone. Eight tokens are answered.

| name | prompts | load |
|---|---|---|
| W1 | 48 over 6 prefixes of 1,024 tokens, evenly; 32 tokens of their own | closed loop, 2 clients |
| W2 | 96 over 12 topics of 600 to 1,000 tokens, Zipf 1.1 (MMLU in shape); 48 to 80 of their own | open loop, Poisson |
| W3 | 8 conversations of 5 turns: 119 tokens at first, 154 more each turn | each waits 1 to 3 s after an answer |
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

ANSWER_TOKENS = 8
PREFIXES, PREFIX_TOKENS, OWN_TOKENS, W1_REQUESTS = 6, 1024, 32, 48
TOPICS, TOPIC_TOKENS, QUESTION_TOKENS, ZIPF, W2_REQUESTS = 12, (600, 1000), (48, 80), 1.1, 96
CONVERSATIONS, TURNS, FIRST_TOKENS, TURN_TOKENS = 8, 5, 119, 154
CLIENTS = 2

_VOCABULARY = range(16, 4000)  # of the made-up models, special tokens left out


class Ask(NamedTuple):
    """One request. `arrival` is drawn once, so that it enters at the same node for every contender.

    `at` is when it comes, in mean gaps between requests; `pause_s` how long its conversation waits before it.
    """

    topic: int
    prompt: tuple[int, ...]
    arrival: int
    at: float = 0.0
    pause_s: float = 0.0


Send = Callable[[Ask, float], Awaitable[None]]
"""Sends a request; the second argument is when it was due, by `time.monotonic`."""


def tokens(rng: random.Random, n: int) -> tuple[int, ...]:
    """Return `n` random tokens."""
    return tuple(rng.choices(_VOCABULARY, k=n))


def w1(seed: int) -> list[Ask]:
    """A few long prefixes, asked for evenly."""
    rng = random.Random(f"{seed}/w1")
    prefixes = [tokens(rng, PREFIX_TOKENS) for _ in range(PREFIXES)]
    topics = [rng.randrange(PREFIXES) for _ in range(W1_REQUESTS)]
    return [Ask(topic, prefixes[topic] + tokens(rng, OWN_TOKENS), i) for i, topic in enumerate(topics)]


def w2(seed: int) -> list[Ask]:
    """More topics than one cache holds, some much more popular than others."""
    rng = random.Random(f"{seed}/w2")
    low, high = TOPIC_TOKENS
    lengths = [low + round((high - low) * i / (TOPICS - 1)) for i in range(TOPICS)]
    rng.shuffle(lengths)  # so that length does not follow popularity
    prefixes = [tokens(rng, n) for n in lengths]
    topics = rng.choices(range(TOPICS), weights=[(rank + 1) ** -ZIPF for rank in range(TOPICS)], k=W2_REQUESTS)
    asks, at = [], 0.0
    for i, topic in enumerate(topics):
        asks.append(Ask(topic, prefixes[topic] + tokens(rng, rng.randint(*QUESTION_TOKENS)), i, at))
        at += rng.expovariate(1.0)
    return asks


def w3(seed: int) -> list[Ask]:
    """Conversations; the replies in their history are made up, so that prompts do not depend on who answered."""
    rng = random.Random(f"{seed}/w3")
    asks = []
    for conversation in range(CONVERSATIONS):
        history: tuple[int, ...] = ()
        for turn in range(TURNS):
            history += tokens(rng, TURN_TOKENS if turn else FIRST_TOKENS)
            pause = rng.uniform(1, 3) if turn else rng.uniform(0, 3)
            asks.append(Ask(conversation, history, rng.randrange(1 << 30), pause_s=pause))
    return asks


TRACES: dict[str, Callable[[int], list[Ask]]] = {"W1": w1, "W2": w2, "W3": w3}


async def closed_loop(asks: Sequence[Ask], send: Send, clients: int = CLIENTS) -> None:
    """Each client sends its next request when its last one was answered."""
    waiting = iter(asks)

    async def client() -> None:
        for ask in waiting:
            await send(ask, time.monotonic())

    await asyncio.gather(*(client() for _ in range(clients)))


async def open_loop(asks: Sequence[Ask], send: Send, rate: float) -> None:
    """Requests come at `rate` a second, whatever became of the others."""
    began = time.monotonic()

    async def one(ask: Ask) -> None:
        due = began + ask.at / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await send(ask, due)

    await asyncio.gather(*(one(ask) for ask in asks))


async def dialogues(asks: Sequence[Ask], send: Send) -> None:
    """Each conversation sends its next turn some time after its last answer."""

    async def one(topic: int) -> None:
        for ask in asks:
            if ask.topic == topic:
                await asyncio.sleep(ask.pause_s)
                await send(ask, time.monotonic())

    await asyncio.gather(*(one(topic) for topic in dict.fromkeys(ask.topic for ask in asks)))
