"""How long things take in the emulated engine: one serial prefill server, and a steady decode.

Rules:
1. Prefill is serial: prompts are computed one after the other, in order of arrival. A prompt costs
   `overhead_s` once, and each token that was not cached costs 1 / `prefill_tokens_per_s`.
2. Decode is not serial: every running sequence gets a token each `decode_s_per_token`, however many there are.
3. Times are planned, not measured (`scheduler.py`): work that waits begins when the work before it was due
   to end, even if the program woke late. Lateness never adds up, so throughput is exact on a busy machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefixroute.errors import UsageError


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Service times in seconds. `time_scale` multiplies them all: 0.1 is an engine ten times as fast.

    `prefill_tokens_per_s` may be infinite. Raises UsageError for a figure that cannot be a time.
    """

    prefill_tokens_per_s: float = 4000.0
    overhead_s: float = 0.02
    decode_s_per_token: float = 0.01
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise UsageError(f"prefill_tokens_per_s must be above 0, not {self.prefill_tokens_per_s}")
        for name in ("overhead_s", "decode_s_per_token", "time_scale"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{name} must be a finite number, 0 or more, not {value}")

    def prefill_s(self, uncached_tokens: int, *, first_chunk: bool = True) -> float:
        """Time to compute this many prompt tokens; the overhead is paid with the first chunk."""
        overhead = self.overhead_s if first_chunk else 0.0
        return self.time_scale * (overhead + uncached_tokens / self.prefill_tokens_per_s)

    def decode_s(self, tokens: int) -> float:
        """Time from one token of a sequence to the one `tokens` later."""
        return self.time_scale * self.decode_s_per_token * tokens
