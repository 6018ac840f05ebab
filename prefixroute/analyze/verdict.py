"""The verdict on a model's traffic: what to do, in plain words, and why.

Rules:
1. The first line of the table whose condition holds is the verdict.
2. Prefix routing is judged by what it adds to local caches and to balancing by load alone.

| condition | verdict |
|---|---|
| there are fewer than FEW requests | unknown: a longer log |
| no prompt has a whole block, or an endless cache would hit less than RARE | local caches suffice |
| prefixes make routing pay at a delay that was tried, and hits rise by RISE | route, in zones of that width |
| what was simulated repeats less than half as much as the whole log | unknown: simulate more |
| one cache of the fleet's size, or an endless one, would hit FAR more than local ones | a bigger or central cache |
| else | local caches suffice |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .gain import Gain

RARE = 0.05
"""Hit rate of an unbounded cache below which prompts count as one-off."""

FEW = 20
"""Number of requests below which there is no verdict: in so few requests repetitions are chance."""

FAR = 0.05
"""Difference of hit rates that justifies a bigger or a central cache."""


RISE = 0.01
"""The least rise of the token hit rate by routing; with a smaller rise, a gain comes from better balancing."""


class Advice(Enum):
    """What to do."""

    LOCAL = "local caches suffice"
    ROUTE = "route"
    BIGGER = "a bigger or central cache is better"
    UNKNOWN = "not simulated"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Advice, as a sentence (`says`), with its reason."""

    advice: Advice
    says: str
    reason: str


class Seen(NamedTuple):
    """A model's traffic in a log: requests, their whole blocks, and the hit rate of an unbounded cache over these."""

    requests: int
    blocks: int
    hit_rate: float


def judge(seen: Seen, gain: Gain | None) -> Verdict:
    """Return the verdict for a model; `gain` is None when nothing was simulated."""
    hit_rate = seen.hit_rate
    if seen.requests < FEW:
        there = "There is 1 request" if seen.requests == 1 else f"There are {seen.requests} requests"
        return Verdict(
            Advice.UNKNOWN,
            "Too few requests to tell: give a longer log.",
            f"{there} of this model; whether prefixes repeat is chance in fewer than {FEW}.",
        )
    if not seen.blocks:
        return Verdict(
            Advice.LOCAL,
            "Local caches suffice: do not route by prefix.",
            "No prompt is as long as a block, and engines cache whole blocks alone.",
        )
    if hit_rate < RARE:
        return Verdict(
            Advice.LOCAL,
            "Local caches suffice: do not route by prefix.",
            f"Prompts are one-off: even an endless cache would hit {hit_rate:.1%} of the blocks.",
        )
    if gain is None:
        return Verdict(
            Advice.UNKNOWN,
            "Prefixes repeat; whether routing pays was not simulated.",
            f"An endless cache would hit {hit_rate:.1%} of the blocks.",
        )
    hits = (
        f"local caches hit {gain.local_hit_rate:.1%} of the tokens, one cache of the {gain.nodes} nodes' size "
        f"{gain.pooled_hit_rate:.1%}, an endless one {gain.endless_hit_rate:.1%}"
    )
    tried = (
        f"{gain.delays[0].delay_ms:g} to {gain.delays[-1].delay_ms:g} ms"
        if len(gain.delays) > 1
        else (f"{gain.delays[0].delay_ms:g} ms")
    )
    best = min((row for row in gain.delays if row.pays), key=lambda row: row.by_prefixes, default=None)
    if best is not None and gain.break_even_ms is not None and best.hit_rate - gain.local_hit_rate >= RISE:
        more = gain.endless_hit_rate - best.hit_rate
        bigger = " A bigger cache would do more still." if more >= max(FAR, best.hit_rate - gain.local_hit_rate) else ""
        return Verdict(
            Advice.ROUTE,
            _zones(gain, gain.break_even_ms),
            f"At {best.delay_ms:g} ms the mean time to first token falls by {1 - best.by_prefixes:.1%} beyond what "
            f"balancing or nothing at all would give, and {best.hit_rate:.1%} of the tokens hit; {hits}.{bigger}",
        )
    if gain.endless_hit_rate < hit_rate / 2:
        return Verdict(
            Advice.UNKNOWN,
            "Too few requests were simulated to tell: try more (--requests).",
            f"They would hit {gain.endless_hit_rate:.1%} in an endless cache, the whole log {hit_rate:.1%}.",
        )
    wanting = max(gain.pooled_hit_rate, gain.endless_hit_rate) - gain.local_hit_rate
    if wanting >= FAR:
        kind = "central" if gain.pooled_hit_rate - gain.local_hit_rate >= FAR else "bigger"
        return Verdict(
            Advice.BIGGER,
            f"Do not route over {tried}: a {kind} cache is better.",
            f"Prefixes do not make forwarding pay, beyond chance, at any delay tried, but {hits}.",
        )
    return Verdict(
        Advice.LOCAL,
        f"Local caches suffice: do not route over {tried}.",
        f"There is little left to gain: {hits}.",
    )


def _zones(gain: Gain, break_even_ms: float) -> str:
    """Return a text that says between which nodes to route; a zone is a group of nodes within this delay."""
    if gain.open_ended:
        return f"Route, in one zone of all nodes that are up to {break_even_ms:.3g} ms apart (one way), or farther."
    far = next((row.delay_ms for row in gain.delays if row.delay_ms > break_even_ms), gain.delays[-1].delay_ms)
    return (
        f"Route, in zones of nodes up to about {break_even_ms:.3g} ms apart (one way); "
        f"zones {far:g} ms apart and farther keep to themselves."
    )
