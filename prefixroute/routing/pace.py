"""How fast an endpoint prefills: what outcomes show of this node's own engines, and what is taken for the others."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from ..load import DEFAULT_OVERHEAD_S, DEFAULT_PREFILL_TOKENS_PER_S, LoadReport

SAMPLES = 32
"""Outcomes that an estimate looks back on."""

LEAST_SAMPLES = 4
"""Below so many an estimate says nothing."""


class Pace(NamedTuple):
    """How fast an endpoint prefills, in tokens a second, and the fixed part of its time to first token in seconds."""

    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    overhead_s: float = DEFAULT_OVERHEAD_S


class RateEstimate:
    """Prefill rate and fixed time of an endpoint, from outcomes. Both err on purpose towards a low cost of prefill.

    Overrating the cost of prefill makes forwards look better than they are: twice too high costs up to 13 % against
    not routing in the rule's model, half costs 0.3 %. So the rate is the upper quartile of the last 32 samples, and the
    fixed time the lower one. Engines that share a core look slower by chance, and who looks slow is not asked again.
    """

    __slots__ = ("_rates", "_rest")

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._rest: deque[float] = deque(maxlen=SAMPLES)

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
        if len(self._rates) < LEAST_SAMPLES:
            return 0.0
        return sorted(self._rates)[(len(self._rates) - 1) * 3 // 4]

    @property
    def overhead_s(self) -> float:
        """Lower quartile of the time to first token of nearly cached requests; 0.0 before four samples."""
        if len(self._rest) < LEAST_SAMPLES:
            return 0.0
        return sorted(self._rest)[(len(self._rest) - 1) // 4]

    def corrected(self, report: LoadReport) -> LoadReport:
        """Return `report` with the rate and fixed time that outcomes show, once they do: a setting is but a guess."""
        rate, overhead = self.prefill_tokens_per_s, self.overhead_s
        if not rate and not overhead:
            return report
        return replace(
            report, prefill_tokens_per_s=rate or report.prefill_tokens_per_s, overhead_s=overhead or report.overhead_s
        )
