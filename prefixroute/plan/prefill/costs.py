"""What prompts cost: bytes of KV, seconds of prefill, requests a second of decode; the unit is in every name.

Rules:
1. A cost is a curve: a function of a number of tokens. Measurements give one of two kinds: a table or a polynomial.
2. No cost is negative: below its first point a table goes on as a line, but not below 0.
3. A model's layers differ in what they keep. Full attention keeps every token, a sliding window the last ones, a
   recurrent layer a state of fixed size. The bytes of a model are the sum over its layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple, Protocol

from prefixroute import UsageError


class Curve(Protocol):
    """A cost by number of tokens, in the unit that the field with the curve names; never negative, rarely falling."""

    def __call__(self, tokens: float) -> float:
        """Return the cost of so many tokens."""
        ...  # pragma: no cover


@dataclass(frozen=True, slots=True)
class Table:
    """Measured points (tokens, cost), joined by lines; the first and the last line go on beyond the points.

    Raises `UsageError` for fewer than two points, points out of order, and costs below 0. A look-up is O(log points).
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise UsageError("a table needs two points or more: [[tokens, cost], [tokens, cost], ...]")
        for (before, _), (tokens, _) in zip(self.points, self.points[1:], strict=False):
            if not tokens > before:
                raise UsageError(f"a table's tokens must rise: {tokens:g} comes after {before:g}")
        for tokens, cost in self.points:
            if not (isfinite(tokens) and 0 <= cost < inf):
                raise UsageError(f"a table needs costs of 0 or more, not {cost!r} at {tokens!r} tokens")

    def __call__(self, tokens: float) -> float:
        """Interpolate, or extend the nearest line."""
        points = self.points
        at = min(max(bisect_right(points, (tokens, inf)), 1), len(points) - 1)
        (left, low), (right, high) = points[at - 1], points[at]
        return max(0.0, low + (tokens - left) * (high - low) / (right - left))


@dataclass(frozen=True, slots=True)
class Polynomial:
    """c0 + c1 l + c2 l^2 + ..., not below 0, for l tokens. Raises `UsageError` without finite coefficients."""

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.coefficients or not all(isfinite(c) for c in self.coefficients):
            raise UsageError("a polynomial needs finite coefficients, lowest power first")

    def __call__(self, tokens: float) -> float:
        """Evaluate by Horner's rule."""
        value = 0.0
        for coefficient in reversed(self.coefficients):
            value = value * tokens + coefficient
        return max(0.0, value)


@dataclass(frozen=True, slots=True)
class Slower:
    """A curve times a factor: a machine that takes `times` as long. Raises `UsageError` for a factor below 0."""

    curve: Curve
    times: float

    def __post_init__(self) -> None:
        if not 0 < self.times < inf:
            raise UsageError(f"a machine takes a positive number of times as long, not {self.times!r}")

    def __call__(self, tokens: float) -> float:
        """Return the curve's cost times the factor."""
        return self.times * self.curve(tokens)


# --- bytes of KV -------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """Layers that keep only the last `tokens`; `bytes_per_token` is for all these layers together."""

    tokens: int
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of KV of a prompt: tokens -> bytes. The sum of two is a hybrid. Raises `UsageError` for sizes below 0."""

    bytes_per_token: float = 0.0
    """Bytes that every token leaves behind."""
    state_bytes: float = 0.0
    """Bytes of a state whose size does not depend on the prompt."""
    windows: tuple[Window, ...] = ()
    """Layers that keep the last tokens only."""

    def __post_init__(self) -> None:
        sizes = (self.bytes_per_token, self.state_bytes, *(part for window in self.windows for part in window))
        if not all(0 <= size < inf for size in sizes):
            raise UsageError("bytes of KV must be 0 or more")

    def __call__(self, tokens: float) -> float:
        """Return the bytes that `tokens` leave behind."""
        kept = sum(min(tokens, window.tokens) * window.bytes_per_token for window in self.windows)
        return self.state_bytes + tokens * self.bytes_per_token + kept

    def __add__(self, other: KvBytes) -> KvBytes:
        """Return what both kinds of layers keep together."""
        return KvBytes(
            self.bytes_per_token + other.bytes_per_token,
            self.state_bytes + other.state_bytes,
            self.windows + other.windows,
        )

    @property
    def whole_only(self) -> bool:
        """Whether some of the KV (states, windows) is reusable only at the length at which it was stored."""
        return self.state_bytes > 0 or bool(self.windows)


def attention_kv(layers: int, kv_heads: int, head_dim: int, element_bytes: float = 2.0) -> KvBytes:
    """Return the KV of full attention: keys and values of every token. With grouped queries `kv_heads` is smaller."""
    return KvBytes(_positive("attention", 2.0 * layers * kv_heads * head_dim * element_bytes))


def latent_kv(layers: int, latent_dim: int, rope_dim: int, element_bytes: float = 2.0) -> KvBytes:
    """Return the KV of multi-head latent attention: one compressed row a token, and its rotary part."""
    return KvBytes(_positive("latent attention", layers * (latent_dim + rope_dim) * element_bytes))


def window_kv(layers: int, window_tokens: int, kv_heads: int, head_dim: int, element_bytes: float = 2.0) -> KvBytes:
    """Return the KV of sliding-window attention: it stops growing at the window."""
    a_token = _positive("a sliding window", 2.0 * layers * kv_heads * head_dim * element_bytes)
    return KvBytes(windows=(Window(window_tokens, a_token),))


def recurrent_kv(layers: int, layer_bytes: float) -> KvBytes:
    """Return the states of linear-attention or state-space layers, which do not grow."""
    return KvBytes(state_bytes=_positive("recurrent layers", layers * layer_bytes))


def reusable_tokens(kv: KvBytes, matched_tokens: int, stored_at: Sequence[int] = ()) -> int:
    """Return the reusable tokens of a match: all of them, or with states and windows the longest stored length in it.

    `stored_at` are the lengths in tokens at which states were kept.
    """
    if not kv.whole_only:
        return matched_tokens
    return max((tokens for tokens in stored_at if tokens <= matched_tokens), default=0)


# --- decode ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode node. Raises `UsageError` for values that are not positive."""

    slots: int
    """Requests that it decodes at once."""
    step_s: float
    """Seconds of a step of the full batch, in which each request gets one token."""
    output_tokens: float
    """Tokens of an answer, on average."""

    def __post_init__(self) -> None:
        if self.slots < 1 or not 0 < self.step_s < inf or not 0 < self.output_tokens < inf:
            raise UsageError("a decode node needs slots >= 1, and a step and an output above 0")

    @classmethod
    def of_batch(cls, step_s: Curve, slots: int, output_tokens: float) -> Decode:
        """Return a node whose steps take `step_s` seconds by the number of requests in them, all slots in use."""
        return cls(slots, step_s(slots), output_tokens)

    @property
    def request_s(self) -> float:
        """Seconds that a request keeps its slot."""
        return self.step_s * self.output_tokens

    @property
    def requests_per_s(self) -> float:
        """Requests a second that one node completes, at most."""
        return self.slots / self.request_s


def _positive(what: str, size: float) -> float:
    if not 0 < size < inf:
        raise UsageError(f"{what}: layers, heads, dimensions and bytes must be positive")
    return size
