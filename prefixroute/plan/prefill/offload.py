"""Whether the pool should prefill one prompt: prefill there plus its KV over the link, against prefill here.

    local  = W_l + T_l(u_l)
    remote = RTT + W_r + max(T_r(u_r), S(x) / B_eff) + S(x) / (n B_eff)
    offload when remote (1 + h) < local

u_l and u_r are uncached tokens here and there, x the tokens whose KV is sent, W waits, n layers, h the hysteresis. A
layer's KV is sent while the next layer is computed, so the slower of computing and sending counts; the last layer is
sent alone.

Rules:
1. B_eff is the rate for one more prompt: min(B (1 - utilisation), connections x B_conn).
2. With a margin the link must also sustain such prompts: B_eff >= S(u_r) / T_r(u_r) (1 + margin). One prompt may gain
   on a link that a stream of such prompts would fill.
3. On a tie the prompt stays here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from prefixroute import UsageError

from .costs import Curve


@dataclass(frozen=True, slots=True)
class KvLink:
    """The link that carries KV from a pool to this cluster. Raises `UsageError` for values out of range."""

    bytes_per_s: float
    """B: bytes a second of the whole link."""
    rtt_s: float = 0.0
    """Seconds of the round trip."""
    layers: int = 1
    """n: layers of the model; sending one overlaps computing the next."""
    connections: int = 1
    """Connections that one transfer uses."""
    connection_bytes_per_s: float = inf
    """B_conn: bytes a second that one connection carries."""
    utilisation: float = 0.0
    """Share of `bytes_per_s` that others use, 0 to 1."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.connection_bytes_per_s > 0:
            raise UsageError("a link needs bytes_per_s > 0 and connection_bytes_per_s > 0")
        if not 0 <= self.rtt_s < inf or self.layers < 1 or self.connections < 1 or not 0 <= self.utilisation <= 1:
            raise UsageError("a link needs rtt_s >= 0, layers >= 1, connections >= 1 and a utilisation of 0 to 1")

    @property
    def effective_bytes_per_s(self) -> float:
        """Bytes a second left for one more prompt; 0 when others use the whole link."""
        return min(self.bytes_per_s * (1 - self.utilisation), self.connections * self.connection_bytes_per_s)

    def used(self, utilisation: float) -> KvLink:
        """Return the link with another utilisation, 0 to 1."""
        return replace(self, utilisation=min(max(utilisation, 0.0), 1.0))

    def arrival_s(self, kv_bytes: float, prefill_s: float) -> float:
        """Return the seconds from the beginning of a prefill until all its KV has arrived, without the round trip."""
        if not kv_bytes:
            return prefill_s
        rate = self.effective_bytes_per_s
        if rate <= 0:
            return inf
        return max(prefill_s, kv_bytes / rate) + kv_bytes / (self.layers * rate)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two places for a prefill."""

    uncached_tokens: float
    """Tokens of the prompt that this side must compute."""
    prefill_s: Curve
    """Tokens -> seconds of prefill."""
    wait_s: float = 0.0
    """Seconds before the prefill begins."""


class OffloadGain(NamedTuple):
    """One prompt weighed: seconds to first token here and through the pool, and whether it should go.

    `transfer_s` is the seconds that sending adds to the prefill there; `sustained` tells whether the link could carry
    such prompts one after another.
    """

    local_s: float
    remote_s: float
    transfer_s: float
    sustained: bool
    offload: bool


def offload_gain(
    local: Side,
    pool: Side,
    sent_tokens: float,
    kv_bytes: Curve,
    link: KvLink,
    hysteresis: float = 0.0,
    margin: float | None = None,
) -> OffloadGain:
    """Weigh one prompt; `hysteresis` is the share by which the pool must be faster. O(1).

    With a `margin` of None the link need not sustain the rate (rule 2). Raises `UsageError` for a hysteresis below 0.
    """
    if hysteresis < 0:
        raise UsageError(f"hysteresis is a share of 0 or more, not {hysteresis!r}")
    local_s = local.wait_s + local.prefill_s(local.uncached_tokens)
    prefill_s = pool.prefill_s(pool.uncached_tokens)
    arrival_s = link.arrival_s(kv_bytes(sent_tokens) if sent_tokens > 0 else 0.0, prefill_s)
    remote_s = link.rtt_s + pool.wait_s + arrival_s
    made = kv_bytes(pool.uncached_tokens) if pool.uncached_tokens > 0 else 0.0
    sustained = link.effective_bytes_per_s * prefill_s >= made * (1 + (margin or 0.0))
    offload = remote_s * (1 + hysteresis) < local_s and (margin is None or sustained)
    return OffloadGain(local_s, remote_s, arrival_s - prefill_s, sustained, offload)


class Line(NamedTuple):
    """A cost that is linear in the tokens: `fixed` + `per_token` x tokens."""

    fixed: float
    per_token: float

    def __call__(self, tokens: float) -> float:
        """Return the cost of so many tokens."""
        return self.fixed + self.per_token * tokens


def offload_from(local: Line, pool: Line, kv_bytes: Line, link: KvLink) -> float:
    """Return the uncached tokens above which a prompt goes to the pool when all costs are lines and nothing waits.

    The result is infinite when no prompt goes. Raises `UsageError` when only short prompts would go: then weigh each
    prompt by `offload_gain`.
    """
    rate = link.effective_bytes_per_s
    if rate <= 0:
        return inf
    n = link.layers
    computing = (
        link.rtt_s + pool.fixed - local.fixed + kv_bytes.fixed / (n * rate),
        local.per_token - pool.per_token - kv_bytes.per_token / (n * rate),
    )
    sending = (
        link.rtt_s - local.fixed + kv_bytes.fixed * (1 + 1 / n) / rate,
        local.per_token - kv_bytes.per_token * (1 + 1 / n) / rate,
    )
    least = 0.0
    if any(per_token <= 0 <= fixed for fixed, per_token in (computing, sending)):
        return inf
    for fixed, per_token in (computing, sending):
        if per_token > 0:
            least = max(least, fixed / per_token)
        elif per_token < 0:
            raise UsageError("only short prompts gain from this pool: weigh each prompt by offload_gain")
    return least
