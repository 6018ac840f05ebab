"""Workloads of the serving simulator: traces of prompts with their arrival times and origins, from one seed.

Rules:
1. A trace is made once and used for every policy: ratios between policies compare the same requests.
2. Times scale exactly with the rate, so the work of a trace is known, at rate 1, before the rate is chosen.
3. Prompts are prepared once: packed, hashed, and with the handles of the blocks that an engine caches of them.
4. Topics have the same tokens whatever the seed; tails and turns are new for each request.

A name is a kind and, for Zipf, its exponent: uniform, zipf1.5, own, own0.5, rotate, flash, conversations, agentic,
mooncake. Requests enter at random nodes; of "own" a share asks for what is asked for at its own node only.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prefixroute import Domain, Node, TokenChain, UsageError

TOPICS = 57
"""Number of topics: MMLU's subjects."""

TAIL_TOKENS = 100
OWN_TOPICS, OWN_TOKENS = 12, 1500
ROTATE_S, ROTATE_BY, ROTATE_SKEW = 300.0, 7, 1.5
FLASH_SHARE, FLASH_SKEW = 0.7, 1.5
SYSTEM_PROMPTS, SYSTEM_TOKENS, MEAN_TURNS, OPEN_SESSIONS = 8, 600, 6, 48
AGENT_TOOLS, AGENT_TOKENS, AGENT_TURNS, AGENT_SESSIONS = 4, 2000, 8, 240
TRACE_BLOCK = 512
"""Tokens of a block in the Mooncake traces."""

_VOCABULARY = 32000


class SimulatedPrompt:
    """A prompt, prepared: `tokens`, `chain`, and `blocks`, the handles of the blocks that an engine caches of it.

    Other prompts may begin with its first `shared` blocks, as far as the workload knows.
    """

    __slots__ = ("_blocks", "cached_depth", "chain", "shared", "tokens")

    def __init__(
        self, chain: TokenChain, tokens: memoryview, shared: int, cached_depth: int, blocks: tuple[int, ...] = ()
    ) -> None:
        self.chain = chain
        self.tokens = tokens
        self.shared = shared
        self.cached_depth = cached_depth
        self._blocks = blocks

    @property
    def blocks(self) -> tuple[int, ...]:
        """Handles of the cached blocks, root first. O(tokens) the first time."""
        if not self._blocks and self.cached_depth:
            key = self.chain.key
            self._blocks = tuple(key(depth) for depth in range(1, self.cached_depth + 1))
        return self._blocks


class RequestArrival(NamedTuple):
    """One request: when it comes (seconds), at which node (from 0), its topic or session, and the prompt."""

    at: float
    origin: int
    topic: int
    prompt: SimulatedPrompt


class ArrivalTrace(NamedTuple):
    """All requests of a run in order of time; a cache's share of capacity is a share of `prefix_tokens`."""

    name: str
    arrivals: tuple[RequestArrival, ...]
    prefix_tokens: int
    domain: Domain

    def at_rate(self, rate: float) -> ArrivalTrace:
        """Return this trace, which was made with rate 1, at `rate` requests a second."""
        return self._replace(arrivals=tuple(a._replace(at=a.at / rate) for a in self.arrivals))


class Skeleton(NamedTuple):
    """A request without its prompt: when it comes (seconds), at which node, and its topic."""

    at: float
    origin: int
    topic: int


# --- topics ------------------------------------------------------------------------------------------------


def prefix_lengths(topics: int = TOPICS) -> list[int]:
    """Return the tokens of each topic's prefix: log-normal, 250 to 3,000, the same for every seed."""
    rng = random.Random(1)
    return [min(max(int(rng.lognormvariate(6.45, 0.5)), 250), 3000) for _ in range(topics)]


def topic_arrivals(skew: float, requests: int, origins: int, seed: int, topics: int = TOPICS) -> list[Skeleton]:
    """Return Poisson arrivals of rate 1 at random origins; topic k has a weight of (k + 1) ** -skew."""
    rng = random.Random(seed)
    heights = list(accumulate((k + 1) ** -skew for k in range(topics)))
    cumulative = [height / heights[-1] for height in heights]
    found, at = [], 0.0
    for _ in range(requests):
        at += rng.expovariate(1.0)
        origin = rng.randrange(origins)
        found.append(Skeleton(at, origin, min(bisect_left(cumulative, rng.random()), topics - 1)))
    return found


def own_arrivals(skew: float, own: float, requests: int, origins: int, seed: int) -> list[Skeleton]:
    """Return Poisson arrivals of rate 1 at random origins, of which a share `own` asks for one of its origin's topics.

    The others ask for one of another origin's. Topic k of each has a weight of (k + 1) ** -skew.
    """
    rng = random.Random(f"{seed}/own")
    heights = list(accumulate((k + 1) ** -skew for k in range(OWN_TOPICS)))
    found, at = [], 0.0
    for _ in range(requests):
        at += rng.expovariate(1.0)
        origin, whose = rng.randrange(origins), 0
        if rng.random() >= own:
            whose = rng.randrange(1, max(2, origins))
        topic = bisect_left(heights, rng.random() * heights[-1])
        found.append(Skeleton(at, origin, (origin + whose) % origins * OWN_TOPICS + topic))
    return found


def _rotated(rate: float, requests: int, origins: int, seed: int) -> list[Skeleton]:
    drawn = topic_arrivals(ROTATE_SKEW, requests, origins, seed)
    return [s._replace(topic=(s.topic + ROTATE_BY * int(s.at / (ROTATE_S * rate))) % TOPICS) for s in drawn]


def _flashed(requests: int, origins: int, seed: int) -> list[Skeleton]:
    rng = random.Random(f"{seed}/flash")
    drawn = topic_arrivals(FLASH_SKEW, requests, origins, seed)
    middle = range(requests // 3, 2 * requests // 3)
    return [
        s._replace(topic=TOPICS - 1) if i in middle and rng.random() < FLASH_SHARE else s for i, s in enumerate(drawn)
    ]


@lru_cache(maxsize=4)
def _kitchen(domain: Domain) -> Node:
    """Return a node that only prepares prompts: chains are the same for every node of a domain."""
    return Node("prompts", domain, rng=random.Random(0), now=0.0)


def simulated_domain(block_tokens: int = 16) -> Domain:
    """Return the domain of all simulated prompts with blocks of so many tokens."""
    return Domain("simulated", "simulated", block_size=block_tokens)


def random_words(seed: Sequence[int], n: int) -> bytes:
    """Return `n` tokens, packed, that follow from a seed."""
    generator = np.random.default_rng([abs(part) for part in seed])
    return generator.integers(0, _VOCABULARY, n, dtype=np.uint32).astype("<u4").tobytes()


def _prompt(
    domain: Domain, packed: bytes, shared: int, cached: int | None, blocks: tuple[int, ...] = ()
) -> SimulatedPrompt:
    tokens = memoryview(packed).cast("I")
    chain = _kitchen(domain).chain(tokens)
    return SimulatedPrompt(chain, tokens, shared, chain.depth if cached is None else cached, blocks)


def _with_prompts(
    name: str,
    drawn: Sequence[Skeleton],
    lengths: Sequence[int],
    seed: int,
    domain: Domain,
    tail_tokens: int,
    cache_tails: bool,
) -> ArrivalTrace:
    prefixes = [random_words((1, topic), n) for topic, n in enumerate(lengths)]
    tails = random_words((2, seed), tail_tokens * len(drawn))
    shared = [n // domain.block_size for n in lengths]
    blocks: dict[int, tuple[int, ...]] = {}
    arrivals = []
    for i, (at, origin, topic) in enumerate(drawn):
        packed = prefixes[topic] + tails[4 * tail_tokens * i : 4 * tail_tokens * (i + 1)]
        depth = shared[topic]
        if cache_tails:
            prompt = _prompt(domain, packed, depth, None)
        else:
            prompt = _prompt(domain, packed, depth, depth, blocks.get(topic, ()))
            blocks[topic] = prompt.blocks
        arrivals.append(RequestArrival(at, origin, topic, prompt))
    return ArrivalTrace(name, tuple(arrivals), sum(lengths), domain)


# --- sessions ----------------------------------------------------------------------------------------------


class SessionShape(NamedTuple):
    """Sessions that begin with one of `fronts` prompts of `front_tokens`, and grow by a turn with each request.

    A session ends after a geometric number of turns with mean `turns`; `open_sessions` are under way at a time. The
    tokens of a turn are log-normal by `turn_log` (mu, sigma), bounded by `turn_tokens` (least, most).
    """

    fronts: int
    front_tokens: int
    turns: int
    open_sessions: int
    turn_log: tuple[float, float] = (5.6, 0.7)
    turn_tokens: tuple[int, int] = (60, 1500)


CONVERSATIONS = SessionShape(SYSTEM_PROMPTS, SYSTEM_TOKENS, MEAN_TURNS, OPEN_SESSIONS)
AGENTIC = SessionShape(AGENT_TOOLS, AGENT_TOKENS, AGENT_TURNS, AGENT_SESSIONS)


def session_arrivals(
    name: str, shape: SessionShape, requests: int, origins: int, seed: int, domain: Domain
) -> ArrivalTrace:
    """Return the turns of sessions, each at a random origin; a prompt begins with all turns before it.

    `topic` is the number of the session.
    """
    rng = random.Random(f"{seed}/{name}")
    fronts = [random_words((3, i, shape.front_tokens), shape.front_tokens) for i in range(shape.fronts)]
    told: list[bytes] = []
    running: list[int] = []
    arrivals, at, distinct = [], 0.0, sum(len(front) for front in fronts) // 4

    def begin() -> int:
        told.append(rng.choice(fronts))
        return len(told) - 1

    running = [begin() for _ in range(shape.open_sessions)]
    for i in range(requests):
        at += rng.expovariate(1.0)
        origin = rng.randrange(origins)
        place = rng.randrange(len(running))
        session = running[place]
        shared = len(told[session]) // 4 // domain.block_size
        low, high = shape.turn_tokens
        turn = min(max(int(rng.lognormvariate(*shape.turn_log)), low), high)
        distinct += turn
        told[session] += random_words((4, seed, i), turn)
        arrivals.append(RequestArrival(at, origin, session, _prompt(domain, told[session], shared, None)))
        if rng.random() < 1 / shape.turns:
            told[session] = b""
            running[place] = begin()
    return ArrivalTrace(name, tuple(arrivals), distinct, domain)


def short_prompts(requests: int, origins: int, seed: int, tokens: int = 12) -> ArrivalTrace:
    """Return prompts that are shorter than a block, all different, at random origins with rate 1."""
    domain = simulated_domain()
    drawn = topic_arrivals(0.0, requests, origins, seed)
    prompts = [_prompt(domain, random_words((6, seed, i), tokens), 0, None) for i in range(requests)]
    return ArrivalTrace(
        "short", tuple(RequestArrival(s.at, s.origin, i, prompts[i]) for i, s in enumerate(drawn)), tokens, domain
    )


def one_prefix(requests: int, prefix_tokens: int, tail_tokens: int, seed: int) -> ArrivalTrace:
    """Return prompts that all begin with one prefix, with tails of their own which no engine keeps; all at time 0."""
    domain = simulated_domain()
    front, depth = random_words((7, prefix_tokens), prefix_tokens), prefix_tokens // domain.block_size
    tails = random_words((8, seed), tail_tokens * requests)
    arrivals = []
    for i in range(requests):
        packed = front + tails[4 * tail_tokens * i : 4 * tail_tokens * (i + 1)]
        arrivals.append(RequestArrival(0.0, 0, 0, _prompt(domain, packed, depth, depth)))
    return ArrivalTrace("one prefix", tuple(arrivals), prefix_tokens, domain)


# --- Mooncake ----------------------------------------------------------------------------------------------


def read_mooncake(path: Path, requests: int, origins: int, seed: int, skip: int = 0) -> ArrivalTrace:
    """Read a Mooncake trace: a JSON object a line with timestamp (ms), input_length, and hash_ids, one for 512 tokens.

    Arrival times are scaled to a mean rate of 1. Raises `UsageError` for a file that is no such trace.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line, _ in zip(_from(lines, skip), range(requests), strict=False)]
        parsed = [(row["timestamp"] / 1000, int(row["input_length"]), tuple(row["hash_ids"])) for row in rows]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UsageError(f"{path} is no Mooncake trace ({type(error).__name__}: {error})") from None
    if len(parsed) < 2:
        raise UsageError(f"{path} has fewer than two requests after the first {skip}")
    domain = simulated_domain(TRACE_BLOCK)
    rng = random.Random(seed)
    first, last = parsed[0][0], parsed[-1][0]
    pace = (last - first) / len(parsed) or 1.0
    words: dict[int, bytes] = {}
    seen: set[int] = set()
    arrivals = []
    for at, n, ids in parsed:
        packed = b"".join(words.get(i) or words.setdefault(i, random_words((5, i), TRACE_BLOCK)) for i in ids)[: 4 * n]
        shared = next((k for k, i in enumerate(ids) if i not in seen), len(ids))
        seen.update(ids)
        prompt = _prompt(domain, packed, min(shared, n // TRACE_BLOCK), None)
        arrivals.append(RequestArrival((at - first) / pace, rng.randrange(origins), ids[0] if ids else 0, prompt))
    return ArrivalTrace("mooncake", tuple(arrivals), TRACE_BLOCK * len(seen), domain)


def _from(lines: Iterator[str], skip: int) -> Iterator[str]:
    for i, line in enumerate(lines):
        if i >= skip:
            yield line


# --- by name -----------------------------------------------------------------------------------------------


def maker(
    name: str,
    *,
    block_tokens: int = 16,
    tail_tokens: int = TAIL_TOKENS,
    cache_tails: bool = False,
    file: str = "",
    own: float = 1.0,
) -> Callable[[float, int, int, int], ArrivalTrace]:
    """Return the maker of the workload `name`: a function (rate, requests, origins, seed) -> a trace of rate 1.

    The rate matters only for workloads that change with time; `own` is the share of "own" that asks for its origin's
    topics. Raises `UsageError` for an unknown name.
    """
    domain = simulated_domain(block_tokens)
    kind = "uniform" if name == "uniform" else next((kind for kind in ("zipf", "own") if name.startswith(kind)), "")

    def topics(
        drawn: Callable[[float, int, int, int], list[Skeleton]],
    ) -> Callable[[float, int, int, int], ArrivalTrace]:
        def make(rate: float, requests: int, origins: int, seed: int) -> ArrivalTrace:
            lengths = [OWN_TOKENS] * OWN_TOPICS * origins if kind == "own" else prefix_lengths()
            skeletons = drawn(rate, requests, origins, seed)
            return _with_prompts(name, skeletons, lengths, seed, domain, tail_tokens, cache_tails)

        return make

    if kind:
        try:
            skew = float(name.removeprefix(kind)) if name not in ("uniform", "own") else 0.0
        except ValueError:
            raise UsageError(f"a Zipf workload is named like zipf1.5, not {name!r}") from None
        if kind == "own":
            return topics(lambda _, requests, origins, seed: own_arrivals(skew, own, requests, origins, seed))
        return topics(lambda _, requests, origins, seed: topic_arrivals(skew, requests, origins, seed))
    if name == "rotate":
        return topics(_rotated)
    if name == "flash":
        return topics(lambda _, requests, origins, seed: _flashed(requests, origins, seed))
    if name in ("conversations", "agentic"):
        shape = CONVERSATIONS if name == "conversations" else AGENTIC
        return lambda _, requests, origins, seed: session_arrivals(name, shape, requests, origins, seed, domain)
    if name == "mooncake":
        if not file:
            raise UsageError("the mooncake workload needs its file: one JSON object a line")
        return lambda _, requests, origins, seed: partial(read_mooncake, Path(file))(requests, origins, seed)
    known = "uniform, zipf1.5, own0.5, rotate, flash, conversations, agentic or mooncake"
    raise UsageError(f"unknown workload {name!r}: {known}")
