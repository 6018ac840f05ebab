"""A latency model from measurements: seconds to first token by prompt, cached tokens and concurrency.

    seconds = a + b u + c u^2 + d u k + e m + ... ,  all coefficients 0 or more

with u the uncached tokens, k the cached ones that they attend to, m the other requests that began at the same moment.
No one knows beforehand which terms are useful: `calibrate` tries FORMS, shortest first, and takes the form with the
least error on held-out measurements, to which it was not fitted. Only that error is reported with the model.

Rules:
1. Errors are relative: a short prompt counts as much as a long one.
2. Fits are least squares, reweighted so that single outliers (a busy machine) count less.
3. Of two forms whose errors differ by less than `CLEARLY`, the shorter one is taken.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixroute import Decision, Outcome, OutcomeKind, UsageError

from .costs import Polynomial

CLEARLY = 0.03
"""Share by which a longer form's held-out error must be smaller."""

_REWEIGHTED = 8
_UNIT = 1000.0  # tokens: keeps the columns of a fit within a few powers of ten of each other

_Array = npt.NDArray[np.float64]


class Timing(NamedTuple):
    """One measurement: tokens of a prompt, how many were cached, seconds to first token, and prompts at once.

    With several prompts at once, `seconds` is their mean.
    """

    prompt_tokens: int
    cached_tokens: int
    seconds: float
    concurrent: int = 1


class Errors(NamedTuple):
    """Relative errors of a model on `n` measurements."""

    median: float
    p90: float
    n: int


def _after_the_first(others: float) -> float:
    return others * others / (others + 1)


TERMS: dict[str, Callable[[float, float, float], float]] = {
    "1": lambda u, k, m: 1.0,
    "u": lambda u, k, m: u,
    "u^2": lambda u, k, m: u * u,
    "u k": lambda u, k, m: u * k,
    "k": lambda u, k, m: k,
    "a": lambda u, k, m: u * (k + u / 2),
    "m": lambda u, k, m: m,
    "m u": lambda u, k, m: m * u,
    "m u^2": lambda u, k, m: m * u * u,
    "m a": lambda u, k, m: m * u * (k + u / 2),
    "m u k": lambda u, k, m: m * u * k,
    "m k": lambda u, k, m: m * k,
    "w u": lambda u, k, m: _after_the_first(m) * u,
    "w a": lambda u, k, m: _after_the_first(m) * u * (k + u / 2),
}
"""Terms by name: of uncached and cached tokens, in thousands, and of other requests at the same moment.

`a` is the work of attention: each uncached token sees the cached ones, and half of the uncached ones on average.
`w` is m^2 / (m + 1), the mean wait of a prompt when the first prompt begins alone and all others are computed together
after it, as in a continuously batching engine that has room for them in one step. With less room the wait is nearer
m / 2, and the fit divides the weight between `m` and `w`.
"""

FORMS: tuple[tuple[str, ...], ...] = (
    ("1", "u"),
    ("1", "u", "u^2"),
    ("1", "u", "u^2", "u k"),
    ("1", "u", "m u"),
    ("1", "u", "u k", "m u"),
    ("1", "u", "a", "m u"),
    ("1", "u", "a", "w u"),
    ("1", "u", "a", "m u", "m a"),
    ("1", "u", "a", "w u", "w a"),
    ("1", "u", "a", "m u", "w u"),
    ("1", "u", "a", "m u", "w u", "w a"),
    ("1", "u", "u^2", "m", "m u"),
    ("1", "u", "u^2", "u k", "m", "m u"),
    ("1", "u", "u^2", "u k", "k", "m", "m u", "m k"),
    ("1", "u", "u^2", "u k", "k", "m", "m u", "m u^2", "m u k", "m k"),
)
"""The forms that are tried, shortest first."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """A fitted form. `coefficients` go with `terms`, in seconds and thousands of tokens; `held_out` is its error."""

    terms: tuple[str, ...]
    coefficients: tuple[float, ...]
    held_out: Errors

    def seconds(self, prompt_tokens: float, cached_tokens: float = 0.0, concurrent: int = 1) -> float:
        """Return the expected seconds to first token. O(terms)."""
        u, k, m = (prompt_tokens - cached_tokens) / _UNIT, cached_tokens / _UNIT, concurrent - 1.0
        parts = zip(self.terms, self.coefficients, strict=True)
        return sum(coefficient * TERMS[term](u, k, m) for term, coefficient in parts)

    def prefill_s(self) -> Polynomial:
        """Return, for the planners, the seconds of a prompt that comes alone and uncached, as a curve of its tokens."""
        powers = {"1": (0, 1.0), "u": (1, 1.0), "u^2": (2, 1.0), "a": (2, 0.5)}
        found = [0.0, 0.0, 0.0]
        for term, coefficient in zip(self.terms, self.coefficients, strict=True):
            if term in powers:
                power, share = powers[term]
                found[power] += share * coefficient / _UNIT**power
        return Polynomial(tuple(found))

    def errors(self, timings: Sequence[Timing]) -> Errors:
        """Return the relative errors on other measurements. Raises `UsageError` without one."""
        if not timings:
            raise UsageError("errors are of one measurement at least")
        predicted = [self.seconds(t.prompt_tokens, t.cached_tokens, t.concurrent) for t in timings]
        return _summary(_off(predicted, [t.seconds for t in timings]))


def calibrate(
    timings: Sequence[Timing],
    rng: random.Random,
    folds: int = 5,
    forms: Sequence[tuple[str, ...]] = FORMS,
) -> LatencyModel:
    """Fit the form that best predicts held-out measurements, by cross-validation over `folds` parts.

    Raises `UsageError` for impossible measurements, and for fewer than two measurements a fold.
    """
    if folds < 2 or len(timings) < 2 * folds:
        raise UsageError(f"calibration needs {2 * max(folds, 2)} measurements or more, got {len(timings)}")
    for t in timings:
        if not 0 <= t.cached_tokens <= t.prompt_tokens or not t.seconds > 0 or t.concurrent < 1:
            raise UsageError(f"a measurement needs 0 <= cached <= prompt, seconds > 0, concurrent >= 1: {t}")
    shuffled = rng.sample(list(timings), len(timings))
    parts = [shuffled[i::folds] for i in range(folds)]
    chosen: tuple[tuple[str, ...], float, Errors] | None = None
    for form in forms:
        if len(form) > len(timings) - len(parts[0]):
            continue
        off = _cross_validated(form, parts)
        # The mean without the worst tenth tells forms apart better than the median, and single outliers do not lead it.
        mean = sum(off[: max(1, 9 * len(off) // 10)])
        if chosen is None or mean < (1 - CLEARLY) * chosen[1]:
            chosen = (form, mean, _summary(off))
    if chosen is None:
        raise UsageError("no form is short enough for so few measurements: give more of them")
    form, _, held_out = chosen
    return LatencyModel(form, tuple(float(c) for c in _fit(form, shuffled)), held_out)


def timings_of(
    served: Iterable[tuple[Decision, Outcome] | tuple[Decision, Outcome, str]],
) -> dict[str, list[Timing]]:
    """Return by endpoint the measurements of its prefill in decisions and their outcomes.

    Requests count that were served and have both a count of cached tokens and a time; the expected round trip and wait
    are subtracted from the time. After a fallback, give the endpoint that served as a third item.
    """
    found: dict[str, list[Timing]] = defaultdict(list)
    for decision, outcome, *more in served:
        endpoint = more[0] if more else decision.target
        weighed = decision.candidate(endpoint)
        if (
            outcome.kind is not OutcomeKind.SERVED
            or outcome.ttft_s is None
            or outcome.cached_tokens is None
            or weighed is None
        ):
            continue
        seconds = outcome.ttft_s - weighed.rtt_s - weighed.wait_s
        if seconds > 0:
            found[endpoint].append(Timing(decision.prompt_tokens, outcome.cached_tokens, seconds))
    return dict(found)


def _cross_validated(form: tuple[str, ...], parts: Sequence[Sequence[Timing]]) -> list[float]:
    predicted: list[float] = []
    seen: list[float] = []
    for i, part in enumerate(parts):
        fitted = _fit(form, [t for j, other in enumerate(parts) if j != i for t in other])
        predicted += (_columns(form, part) @ fitted).tolist()
        seen += [t.seconds for t in part]
    return _off(predicted, seen)


def _columns(form: Sequence[str], timings: Sequence[Timing]) -> _Array:
    rows = [
        [
            TERMS[term]((t.prompt_tokens - t.cached_tokens) / _UNIT, t.cached_tokens / _UNIT, t.concurrent - 1)
            for term in form
        ]
        for t in timings
    ]
    return np.array(rows, dtype=np.float64)


def _fit(form: Sequence[str], timings: Sequence[Timing]) -> _Array:
    """Fit by least relative squares, reweighted towards least absolute errors, with no coefficient below 0."""
    seconds = np.array([t.seconds for t in timings])
    columns = _columns(form, timings) / seconds[:, None]
    wanted = np.ones(len(timings))
    fitted = _not_negative(columns, wanted)
    for _ in range(_REWEIGHTED):
        off = np.abs(columns @ fitted - wanted)
        usual = float(np.median(off)) + 1e-9
        weights = np.sqrt(1 / np.maximum(off, usual) * usual)
        fitted = _not_negative(columns * weights[:, None], wanted * weights)
    return fitted


def _not_negative(columns: _Array, wanted: _Array) -> _Array:
    """Fit by least squares; while a coefficient is below 0, the column with the lowest one is left out."""
    kept = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    while kept:
        part = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)[0]
        worst = int(np.argmin(part))
        if part[worst] >= 0:
            found[kept] = part
            break
        del kept[worst]
    return found


def _off(predicted: Sequence[float], seen: Sequence[float]) -> list[float]:
    """Return the relative errors, the smallest first."""
    return sorted(abs(guess - value) / value for guess, value in zip(predicted, seen, strict=True))


def _summary(off: Sequence[float]) -> Errors:
    n = len(off)
    return Errors((off[(n - 1) // 2] + off[n // 2]) / 2, off[min(n - 1, int(0.9 * n))], n)
