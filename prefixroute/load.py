"""How busy endpoints are: what an engine's probe reports, what its owner advertises, and when it pushes back.

Rules:
1. Work is in seconds of prefill on the endpoint that will do it. Tokens become seconds by its own rate, so unequal
   devices compare (SGLang #28933).
2. Push-back has hysteresis, a time to live and a reason. *Overloaded* is relative: honoured while a candidate that is
   not overloaded exists. *Refusing* (the engine answers 503, or is draining) is absolute, and over with the report that
   says so no more.
3. Unknown is 0 in a report, and becomes a stated default, never a guess that looks measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import NamedTuple

from .errors import UsageError, expect_plain, is_number

DEFAULT_PREFILL_TOKENS_PER_S = 8000.0
"""A mid-size model on one current accelerator; used while no endpoint is known to have another rate."""

DEFAULT_OVERHEAD_S = 0.01
"""Fixed part of a time to first token on an idle engine, until known."""


class PushBackState(IntEnum):
    """What an endpoint says to forwarded work; the values travel."""

    OPEN = 0
    OVERLOADED = 1
    REFUSING = 2


_COUNTS = (
    "running",
    "waiting",
    "queued_tokens",
    "prefill_tokens_per_s",
    "overhead_s",
    "capacity_tokens",
    "block_tokens",
)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an endpoint's engine, or a probe of it, says of its load; 0 means not known.

    `queued_tokens` are prompt tokens that wait for prefill or are in it, cached ones not counted. `overhead_s` is the
    fixed part of a time to first token. `capacity_tokens` is the size of the GPU tier. `refusing` says that the engine
    turned a request away, and `reason` why. `asleep` says that it gave its memory away, and its cache with it.
    `block_tokens` is the engine's own block by its own word: no hit is shorter. The last two do not travel.
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
    block_tokens: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 2**63:
                raise UsageError(f"LoadReport.{name} must be 0 (not known) or positive and below 2**63, got {value!r}")
        if not is_number(self.kv_used) or not 0 <= self.kv_used <= 1:
            raise UsageError(f"LoadReport.kv_used is a share, 0 to 1, got {self.kv_used!r}")
        if not isinstance(self.reason, str):
            raise UsageError(f"LoadReport.reason is a text, got {self.reason!r:.60}")
        if not isinstance(self.refusing, bool) or not isinstance(self.asleep, bool):
            raise UsageError(
                f"LoadReport.refusing and .asleep are True or False, got {self.refusing!r}, {self.asleep!r}"
            )


class Advert(NamedTuple):
    """What a node believes of one endpoint's load: its freshest report, push-back, hit unit, confidence and cache.

    `held_tokens` are in its cache; `eviction_age_s` is how long what it evicts was idle, infinite before the first;
    `arrivals_per_s` are requests that come to it, lately. `home` and `demand` are its owner's (`policy.entry`): the
    share of what enters there that is asked for there only, 0 to 1, and the share of the time that it would be busy
    with what enters there alone.
    """

    report: LoadReport
    state: PushBackState = PushBackState.OPEN
    ttl_s: float = 0.0
    hit_unit: int = 0
    confidence: float = 1.0
    held_tokens: int = 0
    eviction_age_s: float = inf
    arrivals_per_s: float = 0.0
    home: float = 0.0
    demand: float = 0.0

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
        expect_plain(self)
        if not 0 <= self.leave_s < self.enter_s or self.ttl_s <= 0:
            raise UsageError("push-back needs 0 <= leave_s < enter_s and ttl_s > 0")
