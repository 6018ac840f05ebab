"""How busy endpoints are: what they advertise, how fast they are, and whether they push back or fail.

Rules:
1. Work is seconds of prefill on the endpoint that will do it; tokens become seconds by its own rate, so unequal
   devices compare (SGLang #28933).
2. Push-back has hysteresis, a time to live and a reason. *Overloaded* is relative: honoured while a candidate that is
   not overloaded exists. *Refusing* (the engine answers 503, or is draining) is absolute.
3. Unknown is 0 in a report, and becomes a stated default, never a guess that looks measured.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import IntEnum
from math import inf
from typing import NamedTuple

from .errors import UsageError

DEFAULT_PREFILL_TOKENS_PER_S = 8000.0
"""A mid-size model on one current accelerator; used while no endpoint is known to have another rate."""

DEFAULT_OVERHEAD_S = 0.01
"""Fixed part of a time to first token on an idle engine, until known."""


class PushBackState(IntEnum):
    """What an endpoint says to forwarded work; the values travel."""

    OPEN = 0
    OVERLOADED = 1
    REFUSING = 2


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an endpoint's engine, or a probe of it, says of its load; 0 means not known.

    `queued_tokens` are prompt tokens that wait for prefill or are in it, cached ones not counted. `overhead_s` is the
    fixed part of a time to first token. `capacity_tokens` is the size of the GPU tier. `refusing` says that the engine
    turned a request away, and `reason` why. `asleep` says that it gave its memory away, and its cache with it.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    overhead_s: float = 0.0
    kv_used: float = 0.0
    capacity_tokens: int = 0
    refusing: bool = False
    reason: str = ""
    asleep: bool = False

    def __post_init__(self) -> None:
        for name in ("running", "waiting", "queued_tokens", "prefill_tokens_per_s", "overhead_s", "capacity_tokens"):
            value = getattr(self, name)
            if not 0 <= value < 2**63:
                raise UsageError(f"LoadReport.{name} must be 0 (not known) or positive and below 2**63, got {value!r}")
        if not 0 <= self.kv_used <= 1:
            raise UsageError(f"LoadReport.kv_used is a share, 0 to 1, got {self.kv_used!r}")


class Advert(NamedTuple):
    """What a node believes of one endpoint's load: its freshest report, push-back, hit unit, confidence and cache.

    `held_tokens` are in its cache; `eviction_age_s` is how long what it evicts was idle, infinite before the first;
    `arrivals_per_s` are requests that come to it, lately.
    """

    report: LoadReport
    state: PushBackState = PushBackState.OPEN
    ttl_s: float = 0.0
    hit_unit: int = 0
    confidence: float = 1.0
    held_tokens: int = 0
    eviction_age_s: float = inf
    arrivals_per_s: float = 0.0

    @property
    def room_tokens(self) -> float:
        """Tokens that fit the cache without an eviction: infinite while nothing tells that it is full."""
        if self.report.capacity_tokens:
            return max(0.0, self.report.capacity_tokens - self.held_tokens)
        return inf if self.eviction_age_s == inf else 0.0


@dataclass(frozen=True, slots=True)
class PushBackSettings:
    """When an endpoint pushes back: queue work above `enter_s` until it is below `leave_s`, in seconds of prefill.

    `ttl_s` bounds how long peers honour a flag that is not renewed (a fifth more or less from node to node), and how
    long one refusal of the engine counts.
    """

    enter_s: float = 4.0
    leave_s: float = 2.0
    ttl_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.leave_s < self.enter_s or self.ttl_s <= 0:
            raise UsageError("push-back needs 0 <= leave_s < enter_s and ttl_s > 0")


class RateEstimate:
    """Prefill rate and fixed time of an endpoint, from outcomes: a low estimate of the cost on purpose.

    Overrating the cost of prefill makes forwards look better than they are: twice too high costs up to 13 % against
    not routing in the rule's model, half costs 0.3 %. So the rate is the upper quartile of the last 32 samples, and the
    fixed time the lower one. Engines that share a core look slower by chance, and who looks slow is not asked again.
    """

    __slots__ = ("_rates", "_rest")

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=32)
        self._rest: deque[float] = deque(maxlen=32)

    def add(self, uncached_tokens: int, ttft_s: float, queued: bool) -> None:
        """Take one served request; those that waited for others say nothing about the rate."""
        if queued or ttft_s <= 0:
            return
        if uncached_tokens < 64:
            self._rest.append(ttft_s)
        elif uncached_tokens >= 256:
            spent = ttft_s - min(self.overhead_s, 0.5 * ttft_s)
            self._rates.append(uncached_tokens / spent)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Upper quartile of the observed rates; 0.0 before four samples."""
        if len(self._rates) < 4:
            return 0.0
        return sorted(self._rates)[(len(self._rates) - 1) * 3 // 4]

    @property
    def overhead_s(self) -> float:
        """Lower quartile of the time to first token of nearly cached requests; 0.0 before four samples."""
        if len(self._rest) < 4:
            return 0.0
        return sorted(self._rest)[(len(self._rest) - 1) // 4]


class Pace(NamedTuple):
    """How fast an endpoint prefills, and the fixed part of its time to first token."""

    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    overhead_s: float = DEFAULT_OVERHEAD_S


def learnt(report: LoadReport, estimate: RateEstimate) -> LoadReport:
    """Return `report` with the rate and fixed time that outcomes show, once they do: a setting is but a guess."""
    rate, overhead = estimate.prefill_tokens_per_s, estimate.overhead_s
    if not rate and not overhead:
        return report
    return replace(
        report, prefill_tokens_per_s=rate or report.prefill_tokens_per_s, overhead_s=overhead or report.overhead_s
    )
