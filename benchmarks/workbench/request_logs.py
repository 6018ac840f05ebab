"""Request logs that are made up for `benchmarks/analyze.py`: their shape is known, so a report of them can be judged.

Rules:
1. A log is the same for the same arguments.
2. Files are written piece by piece: a log may be larger than memory.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from prefixroute.analyze.prompt_keys import Keys, prefix_keys
from prefixroute.sim.serving.workloads import prefix_lengths

TEXT = (
    "the of and to in is that for it as was with be by on not this are or from at which but have an had they you were"
    " their one all we can her has there been if more when will would who so no cache prompt model token prefix server"
    " request answer question system please write short list table explain because example number city river language"
)
WORDS = TEXT.split()
MODELS = ("llama-70b", "llama-8b", "qwen-32b")
TENANTS = 40
BROKEN = 5000
"""One line in so many is cut in the middle, as happens to logs."""


def write_chats(path: Path, size: int, seed: int = 1) -> tuple[int, int]:
    """Write at least `size` bytes of chat bodies: conversations that grow, behind shared system prompts.

    Return how many lines there are, and how many of them are broken.
    """
    rng = random.Random(seed)
    pieces = [json.dumps(" ".join(rng.choices(WORDS, k=rng.randrange(40, 400))))[1:-1] for _ in range(4000)]
    systems = [" ".join(rng.choices(pieces, k=rng.randrange(1, 6))) for _ in range(200)]
    heights = list(accumulate((k + 1) ** -1.0 for k in range(len(systems))))
    talks: list[tuple[str, str, list[str]]] = []
    written = lines = broken = 0
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:
        while written < size:
            if talks and rng.random() < 0.7:
                place = rng.randrange(len(talks))
                model, tenant, said = talks[place]
                if len(said) > 20 or len(talks) > 400:
                    talks[place] = talks[-1]
                    talks.pop()
            else:
                model, tenant = rng.choice(MODELS), f"tenant-{min(int(rng.paretovariate(0.7)), TENANTS)}"
                system = rng.choices(systems, cum_weights=heights)[0]
                said = [f'{{"role":"system","content":"{system}"}}']
                talks.append((model, tenant, said))
            if len(said) > 1:
                said.append(f'{{"role":"assistant","content":"{rng.choice(pieces)}"}}')
            said.append(f'{{"role":"user","content":"{rng.choice(pieces)} {lines}"}}')
            line = (
                f'{{"timestamp":{1.7e9 + lines * 0.05:.2f},"user":"{tenant}","model":"{model}",'
                f'"messages":[{",".join(said)}],"max_tokens":200}}\n'
            )
            lines += 1
            if not lines % BROKEN:
                line, broken = line[: len(line) // 2] + "\n", broken + 1
            written += file.write(line)
    return lines, broken


def write_topics(path: Path, skew: float, requests: int, seed: int = 1) -> None:
    """Write completion bodies of tokens: 57 topics of MMLU's prefix lengths, each with an end of its own."""
    rng = random.Random(seed)
    heights = list(accumulate((k + 1) ** -skew for k in range(57)))
    with path.open("w") as file:
        for _ in range(requests):
            topic = rng.choices(range(57), cum_weights=heights)[0]
            front = [topic * 4000 + i for i in range(prefix_lengths()[topic])]
            file.write(json.dumps({"prompt": front + [rng.randrange(2**31) for _ in range(100)]}) + "\n")


def write_one_off(path: Path, requests: int, seed: int = 1) -> None:
    """Write prompts of which no two begin alike."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(requests):
            file.write(json.dumps({"prompt": [rng.randrange(2**31) for _ in range(800)]}) + "\n")


# --- as keys -----------------------------------------------------------------------------------------------


def topic_paths(skew: float, requests: int, topics: int, tail: int = 20, seed: int = 2) -> Iterator[Keys]:
    """Yield prompts of topics of 10 to 200 blocks, with `tail` blocks of their own."""
    rng = random.Random(seed)
    lengths = [rng.randrange(10, 200) for _ in range(topics)]
    heights = list(accumulate((k + 1) ** -skew for k in range(topics)))
    for i in range(requests):
        topic = rng.choices(range(topics), cum_weights=heights)[0]
        front = np.arange(lengths[topic], dtype=np.uint64) + np.uint64(topic << 20)
        own = np.arange(tail, dtype=np.uint64) + np.uint64((1 << 40) + i * tail)
        yield prefix_keys(np.concatenate([front, own]))


def talk_paths(requests: int, open_talks: int = 300, turn: int = 24, seed: int = 3) -> Iterator[Keys]:
    """Yield prompts of conversations that grow by a turn at a time, and end after some."""
    rng = random.Random(seed)
    talks: list[Keys] = []
    for i in range(requests):
        more = np.arange(turn, dtype=np.uint64) + np.uint64(i * turn)
        if len(talks) >= open_talks or (talks and rng.random() < 0.5):
            place = rng.randrange(len(talks))
            talks[place] = np.concatenate([talks[place], more])
            words = talks[place]
            if rng.random() < 0.15:
                talks.pop(place)
        else:
            words = more
            talks.append(words)
        yield prefix_keys(words)


def mixed_paths(requests: int, seed: int = 4) -> Iterator[Keys]:
    """Yield a few hot topics among prompts that come once: what a scan does to a cache."""
    rng = random.Random(seed)
    hot = topic_paths(1.2, requests, 40, tail=4, seed=seed)
    for i in range(requests):
        if rng.random() < 0.4:
            yield prefix_keys(np.arange(60, dtype=np.uint64) + np.uint64((1 << 50) + i * 60))
        else:
            yield next(hot)
