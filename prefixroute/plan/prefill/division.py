"""When prefill should go to another cluster: how many requests a second two clusters serve, and the best division.

There are three roles. A *pool* of fast prefill nodes in another cluster takes prompts with more than t uncached tokens,
and sends their KV back over a link. Local *prefill* nodes take the others, local *decode* nodes answer all. p is the
share of prompts longer than t, l_long and l_short are the mean lengths on either side, T and T' the seconds of prefill
in the pool and here, S the bytes of KV, B the bytes a second of the link:

    (1) rate of KV of one node           Phi(l) = S(l) / T(l)
    (2) egress of a cluster              N Phi(l)
    (3) pool                             P = min(N_pool / T(l_long), B / S(l_long))
    (4) local prefill                    Q = N_p / T'(l_short)
    (5) decode                           D = N_d slots / (step x output tokens)
    (6) requests a second                min(P / p, Q / (1 - p), D)
    (7) best t                           P / p = Q / (1 - p)
    (8) best N_p and N_d                 P + Q = D

Rules (model of PrfaaS, arXiv 2604.15039):
1. P / p rises with t and Q / (1 - p) falls, so bisection finds the one root of (7). (8) is solved by trying all N_p.
2. The published model takes the time of the mean length. Prefill grows faster than the length, so that time is some
   percent too short. `average="time"` takes the mean time instead, and agrees with a simulation with arrivals.
3. A node is an instance, which serves one prompt's prefill at a time; as a rule it has eight devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Literal, NamedTuple

from prefixroute import UsageError

from .costs import Curve
from .lengths import Lengths

_HALVINGS = 100


class Bottleneck(Enum):
    """The role that bounds the requests a second."""

    POOL = "pool prefill"
    EGRESS = "egress"
    PREFILL = "local prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PrefillClusters:
    """Two clusters, and the lengths of the prompts that they serve. Raises `UsageError`."""

    lengths: Lengths
    """Distribution of a prompt's uncached tokens."""
    kv_bytes: Curve
    """Tokens of a prompt -> bytes of its KV."""
    pool_prefill_s: Curve
    """Tokens -> seconds of prefill on one node of the pool."""
    local_prefill_s: Curve
    """Tokens -> seconds of prefill on one local node."""
    pool_nodes: int
    """Nodes of the pool, 0 or more."""
    local_nodes: int
    """Local nodes, prefill and decode together."""
    decode_per_s: float
    """Requests a second that one local node completes when it decodes (`Decode.requests_per_s`)."""
    egress_bytes_per_s: float
    """Bytes a second that the link out of the pool carries."""
    average: Literal["length", "time"] = "length"
    """Whether a side's prefill takes the time of its mean length, as published, or its mean time (rule 2)."""

    def __post_init__(self) -> None:
        if self.pool_nodes < 0 or self.local_nodes < 1:
            raise UsageError("a plan needs local_nodes >= 1 and pool_nodes >= 0")
        if not 0 < self.decode_per_s < inf or not 0 < self.egress_bytes_per_s <= inf:
            raise UsageError("a plan needs decode_per_s > 0 and egress_bytes_per_s > 0")
        if self.average not in ("length", "time"):
            raise UsageError(f'average is "length" or "time", not {self.average!r}')


class PrefillRates(NamedTuple):
    """The rates that a threshold and a division of the nodes give; the rate of a role without prompts is infinite."""

    threshold_tokens: float
    """t: prompts with more uncached tokens go to the pool."""
    pool_nodes: int
    """N_pool."""
    prefill_nodes: int
    """N_p: local nodes that prefill."""
    decode_nodes: int
    """N_d: local nodes that decode."""
    offloaded: float
    """p: share of the prompts that go to the pool, 0 to 1."""
    long_tokens: float
    """l_long: mean uncached tokens of the prompts that go."""
    short_tokens: float
    """l_short: mean uncached tokens of the prompts that stay."""
    pool_per_s: float
    """P: prompts a second that the pool and its link can take."""
    prefill_per_s: float
    """Q: prompts a second that local prefill can take."""
    decode_per_s: float
    """D: requests a second that local decode can complete."""
    requests_per_s: float
    """Requests a second of the whole: the least of P / p, Q / (1 - p) and D."""
    egress_bytes_per_s: float
    """Bytes a second that the link carries at `requests_per_s`."""
    bottleneck: Bottleneck
    """The role that bounds `requests_per_s`."""


def kv_rate_bytes_per_s(clusters: PrefillClusters, tokens: float) -> float:
    """Return (1): the bytes of KV a second that a pool node produces from prompts of this length."""
    return _per_s(clusters.kv_bytes(tokens), clusters.pool_prefill_s(tokens))


def rates(
    clusters: PrefillClusters, threshold_tokens: float, prefill_nodes: int, decode_nodes: int | None = None
) -> PrefillRates:
    """Return (3) to (6) for a threshold and a division of the local nodes; by default all that do not prefill decode.

    Raises `UsageError` for an impossible division.
    """
    decode = clusters.local_nodes - prefill_nodes if decode_nodes is None else decode_nodes
    if prefill_nodes < 0 or decode < 1 or prefill_nodes + decode > clusters.local_nodes:
        wanted = f"{prefill_nodes} for prefill and {decode} for decode"
        raise UsageError(f"{clusters.local_nodes} local nodes cannot be divided into {wanted}")
    lengths, t = clusters.lengths, threshold_tokens
    p, long_, short = lengths.share_over(t), lengths.mean_over(t), lengths.mean_upto(t)
    if clusters.average == "length":
        pool_s = clusters.pool_prefill_s(long_) if p else inf
        local_s = clusters.local_prefill_s(short) if p < 1 else inf
        kv = clusters.kv_bytes(long_) if p else 0.0
    else:
        pool_s = lengths.average(clusters.pool_prefill_s, low=t) if p else inf
        local_s = lengths.average(clusters.local_prefill_s, high=t) if p < 1 else inf
        kv = lengths.average(clusters.kv_bytes, low=t) if p else 0.0
    computed = _per_s(clusters.pool_nodes, pool_s)
    carried = clusters.egress_bytes_per_s / kv if kv else inf
    pool, prefill = min(computed, carried), _per_s(prefill_nodes, local_s)
    decoded = decode * clusters.decode_per_s
    # A role without prompts bounds nothing.
    bounds = {
        Bottleneck.POOL if computed <= carried else Bottleneck.EGRESS: pool / p if p > 0 else inf,
        Bottleneck.PREFILL: prefill / (1 - p) if p < 1 else inf,
        Bottleneck.DECODE: decoded,
    }
    bottleneck = min(bounds, key=lambda each: bounds[each])
    total = bounds[bottleneck]
    nodes = (clusters.pool_nodes, prefill_nodes, decode)
    return PrefillRates(t, *nodes, p, long_, short, pool, prefill, decoded, total, total * p * kv, bottleneck)


def _per_s(amount: float, seconds: float) -> float:
    """Return amount / seconds: infinite when the work takes no time, and 0 when there is no amount either."""
    if seconds <= 0:
        return inf if amount else 0.0
    return amount / seconds


def best_threshold(clusters: PrefillClusters, prefill_nodes: int) -> float:
    """Return the root of (7) in tokens, at which both prefill roles are equally busy. O(log precision).

    The root is 0 when the pool takes all prompts, and the length of the longest prompt when it takes none.
    """
    low, high = 0.0, clusters.lengths.longest
    if clusters.pool_nodes == 0:
        return high
    if prefill_nodes == 0:
        return low
    if high == inf:
        high = 2.0**40
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _leans_local(clusters, middle, prefill_nodes):
            high = middle
        else:
            low = middle
        if high - low <= 1e-9 * high:
            break
    # A distribution with steps has no exact root: take the side of the step that serves more.
    return max((low, high), key=lambda t: _prefilled(clusters, t, prefill_nodes))


def best_plan(clusters: PrefillClusters) -> PrefillRates:
    """Return the optimum (t, N_p, N_d): for each N_p the root of (7), and of these the one with most requests a second.

    Of plans with equal rates, where decode is the bound, it is the one that sends the fewest bytes over the link.
    O(local nodes x log precision).
    """
    if clusters.local_nodes == 1:
        return rates(clusters, 0.0, 0)
    plans = [rates(clusters, best_threshold(clusters, n), n) for n in range(clusters.local_nodes)]
    return max(plans, key=lambda plan: (round(plan.requests_per_s, 9), -plan.egress_bytes_per_s))


def all_local(clusters: PrefillClusters, local_nodes: int | None = None) -> PrefillRates:
    """Return the best plan without a pool: the homogeneous cluster of `local_nodes` (by default the clusters' own)."""
    nodes = clusters.local_nodes if local_nodes is None else local_nodes
    if nodes < 2:
        raise UsageError("without a pool it takes two local nodes: one for prefill, one for decode")
    alone = _with(clusters, pool_nodes=0, local_nodes=nodes)
    plans = [rates(alone, alone.lengths.longest, n) for n in range(1, nodes)]
    return max(plans, key=lambda plan: plan.requests_per_s)


def all_remote(clusters: PrefillClusters) -> PrefillRates:
    """Return the plan that sends every prompt to the pool: the naive heterogeneous cluster."""
    return rates(clusters, 0.0, 0)


def _with(clusters: PrefillClusters, pool_nodes: int, local_nodes: int) -> PrefillClusters:
    c = clusters
    costs = (c.lengths, c.kv_bytes, c.pool_prefill_s, c.local_prefill_s)
    return PrefillClusters(*costs, pool_nodes, local_nodes, c.decode_per_s, c.egress_bytes_per_s, c.average)


def _sides(clusters: PrefillClusters, threshold: float, prefill_nodes: int) -> tuple[float, float]:
    found = rates(clusters, threshold, prefill_nodes, 1)
    p = found.offloaded
    return (found.pool_per_s / p if p > 0 else inf), (found.prefill_per_s / (1 - p) if p < 1 else inf)


def _leans_local(clusters: PrefillClusters, threshold: float, prefill_nodes: int) -> bool:
    """Return whether local prefill is the busier side with this threshold."""
    pool, local = _sides(clusters, threshold, prefill_nodes)
    return local < pool


def _prefilled(clusters: PrefillClusters, threshold: float, prefill_nodes: int) -> float:
    return min(_sides(clusters, threshold, prefill_nodes))


# --- where one prompt goes ---------------------------------------------------------------------------------


class PrefillPlace(NamedTuple):
    """Where a prompt is prefilled: in the pool or not, the tokens computed there, and those copied between caches."""

    remote: bool
    computed_tokens: int
    copied_tokens: int = 0


def place(
    prompt_tokens: int, cached_local: int, cached_pool: int, threshold_tokens: float, ample: bool = False
) -> PrefillPlace:
    """Apply the length threshold to the uncached tokens of a prompt.

    With scarce bandwidth a cluster uses its own cache alone. With `ample` bandwidth the better cache counts for both,
    and the tokens that the chosen cluster lacks are copied. Raises `UsageError` for more cached tokens than the prompt
    has.
    """
    if not (0 <= cached_local <= prompt_tokens and 0 <= cached_pool <= prompt_tokens):
        raise UsageError("a cache holds between none and all of a prompt's tokens")
    best = max(cached_local, cached_pool)
    known = best if ample else cached_local
    remote = prompt_tokens - known > threshold_tokens
    own = cached_pool if remote else cached_local
    if not ample:
        return PrefillPlace(remote, prompt_tokens - own)
    return PrefillPlace(remote, prompt_tokens - best, best - own)
