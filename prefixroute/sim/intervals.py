"""Confidence intervals of means over seeds, as all laboratories print them.

Rule: a ratio is taken for each run, on the same trace; the ratios are averaged, and the interval is of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; above 30, the normal quantile is near enough.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Interval(NamedTuple):
    """A mean and half the width of its 95 % confidence interval, 0.0 for a single value."""

    mean: float
    half: float


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with its interval."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, 0.0)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Interval(mean, (_T95[n - 2] if n <= len(_T95) + 1 else 1.96) * math.sqrt(variance / n))
