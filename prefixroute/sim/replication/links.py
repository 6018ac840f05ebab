"""What links do to datagrams: delay, loss, repetition, lateness. Drawn from the simulator's one generator.

Rules:
1. A link is one-way: (from, to) has its own, so paths can be asymmetric.
2. Reordering needs no rule of its own: two datagrams whose delays differ enough change places.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from prefixroute import UsageError


class LogNormal(NamedTuple):
    """Delays with a long tail: half of them are above `median_s`; `sigma` is the deviation of their logarithm."""

    median_s: float
    sigma: float


Delay: TypeAlias = tuple[float, float] | LogNormal
"""Uniform between two bounds in seconds, or `LogNormal`."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes. `late` is the share of datagrams that take up to `late_s` more."""

    delay_s: Delay = (0.0005, 0.002)
    loss: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    late_s: float = 3.0
    up: bool = True

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in (self.loss, self.duplicate, self.late)):
            raise UsageError("loss, duplicate and late are shares between 0 and 1")
        if min(self.delay_s) < 0 or self.late_s < 0:
            raise UsageError("delays are seconds, 0 or more")

    def delays(self, rng: random.Random) -> list[float]:
        """Draw the seconds after which each copy of a datagram arrives: none when it is lost."""
        if not self.up:
            return []
        copies = 2 if self.duplicate and rng.random() < self.duplicate else 1
        arrivals = []
        for _ in range(copies):
            if self.loss and rng.random() < self.loss:
                continue
            if isinstance(self.delay_s, LogNormal):
                delay = rng.lognormvariate(math.log(self.delay_s.median_s), self.delay_s.sigma)
            else:
                low, high = self.delay_s
                delay = low + (high - low) * rng.random()
            if self.late and rng.random() < self.late:
                delay += self.late_s * rng.random()
            arrivals.append(delay)
        return arrivals


CALM = Link()
"""A local network: a millisecond, nothing lost."""

ROUGH = Link(delay_s=(0.001, 0.3), loss=0.3, duplicate=0.1, late=0.05)
"""Everything that can be wrong with a path, all at once."""
