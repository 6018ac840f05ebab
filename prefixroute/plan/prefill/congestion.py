"""Control of a congested link: a monitor, a threshold that rises under congestion, and a slow re-balancer of nodes.

    every second   congested (utilisation, loss or queue above its high mark)   t := 1.1 t
                   clear (utilisation and queue below their low marks)          t := max(t_opt, 0.99 t)
                   else                                                         hold
    every minute   (7) and (8) solved anew for the lengths of the last minutes: a new t_opt, one node converted at most

A higher threshold sends fewer and longer prompts, and a long prompt has less KV for each second of its prefill.

Rules:
1. The threshold is never below t_opt, and returns to t_opt when the load is gone.
2. Between the marks the threshold holds, and between a rise and a fall at least `dwell_s` pass, so that noise around a
   mark seldom moves it.
3. There is no clock: the caller gives `now`, in seconds, at its own pace.
4. The constants of both loops are not published; ours are settings, and the defaults come from our simulation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from math import expm1, inf
from typing import NamedTuple

from prefixroute import UsageError

from .division import PrefillClusters, PrefillRates, best_plan, best_threshold, rates
from .lengths import Empirical

FULL = 0.9
"""Share of a second: a link that holds transfers up for at least so long carries its full capacity."""


class LinkState(NamedTuple):
    """State of a link: share of the bandwidth used, seconds of queued KV, and share of packets sent again."""

    utilisation: float
    queue_s: float = 0.0
    retransmitted: float = 0.0


class LinkMonitor:
    """Exponential averages of a link's state, over about `over_s` seconds. O(1). Raises `UsageError`."""

    __slots__ = ("_at", "_over_s", "state")

    def __init__(self, over_s: float = 5.0) -> None:
        if not over_s >= 0:
            raise UsageError(f"a monitor averages over over_s >= 0 seconds, not {over_s!r}")
        self._over_s = over_s
        self._at: float | None = None
        self.state = LinkState(0.0)

    def observe(self, seen: LinkState, now: float) -> LinkState:
        """Take the state seen since the last call; return the averages."""
        if self._at is None or not self._over_s:
            self.state = seen
        else:
            # When the clock went back, no time counts as passed.
            weight = -expm1(-max(0.0, now - self._at) / self._over_s)
            self.state = LinkState(*(old + weight * (new - old) for old, new in zip(self.state, seen, strict=True)))
        self._at = now
        return self.state


class CapacityEstimate:
    """What a link can carry: the nominal rate until it limits transfers, then the measured rate. O(1).

    A link that does not limit transfers shows nothing of its capacity; each such step moves the estimate back towards
    the nominal rate by the share `regain`. Raises `UsageError`.
    """

    __slots__ = ("_nominal", "_regain", "bytes_per_s")

    def __init__(self, nominal_bytes_per_s: float, regain: float = 0.02) -> None:
        if not nominal_bytes_per_s > 0 or not regain >= 0:
            raise UsageError("an estimate of a link needs nominal_bytes_per_s > 0 and regain >= 0")
        self._nominal, self._regain = nominal_bytes_per_s, regain
        self.bytes_per_s = nominal_bytes_per_s

    def observe(self, sent_bytes_per_s: float, limited: float) -> float:
        """Take the last second's rate, and its share in which the link limited transfers; return bytes a second."""
        if limited >= FULL and sent_bytes_per_s > 0:
            self.bytes_per_s += 0.5 * (sent_bytes_per_s - self.bytes_per_s)
        else:
            self.bytes_per_s = max(sent_bytes_per_s, min(self._nominal, self.bytes_per_s * (1 + self._regain)))
        return self.bytes_per_s


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Marks and steps of a threshold controller. Raises `UsageError`."""

    high: float = 0.85
    """Utilisation, a share of the link, above which it is congested."""
    low: float = 0.6
    """Utilisation below which it is clear."""
    lossy: float = 0.01
    """Share of packets sent again above which the link is congested."""
    queue_high_s: float = inf
    """Seconds of waiting KV above which the link is congested."""
    queue_low_s: float = inf
    """Seconds of waiting KV below which the link is clear."""
    rise: float = 1.1
    """Factor of the threshold at each step under congestion."""
    fall: float = 0.99
    """Factor of the threshold at each step on a clear link."""
    dwell_s: float = 5.0
    """Seconds that pass between a rise and a fall at least."""
    most: float = inf
    """Upper bound of the threshold, as a multiple of t_opt."""
    least_change: float = 0.0
    """Share of the threshold: smaller changes add up, and take effect once they reach it."""
    floor_tokens: float = 128.0
    """Tokens: a threshold below this counts as "all prompts". A rise begins here, and a fall ends here."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high or not 0 <= self.queue_low_s <= self.queue_high_s:
            raise UsageError("a controller needs 0 <= low < high, and 0 <= queue_low_s <= queue_high_s")
        if not self.fall < 1 < self.rise or not self.fall > 0 or not self.most >= 1:
            raise UsageError("a controller needs 0 < fall < 1 < rise, and most >= 1")
        if self.dwell_s < 0 or self.least_change < 0 or not self.lossy > 0 or not self.floor_tokens > 0:
            raise UsageError("a controller needs dwell_s >= 0, least_change >= 0, lossy > 0 and floor_tokens > 0")


class ThresholdController:
    """The fast loop: raises the threshold while the link is congested, and lets it sink back to `optimum` after."""

    __slots__ = ("_aim", "_rising", "_settings", "_turned_at", "moves", "optimum", "threshold_tokens")

    def __init__(self, optimum: float, settings: ControllerSettings | None = None) -> None:
        self._settings = settings or ControllerSettings()
        self.optimum = _tokens(optimum)
        """t_opt in tokens, from the plan."""
        self.threshold_tokens = optimum
        """Threshold in force, in tokens."""
        self.moves = 0
        """How often the threshold in force has changed."""
        self._aim = optimum
        self._rising: bool | None = None
        self._turned_at = -inf

    def step(self, state: LinkState, now: float, ceiling: float = inf) -> float:
        """Take the link's averages; return the threshold in force. Call it at an even pace, such as every second.

        The threshold rises to `ceiling` at most, and falls back to it. Above `relief_threshold` local prefill would be
        the busier side, and a rise would only move the queue there.
        """
        s = self._settings
        if state.utilisation > s.high or state.retransmitted > s.lossy or state.queue_s > s.queue_high_s:
            self._turn(True, max(self._aim, min(s.rise * max(self._aim, s.floor_tokens), ceiling)), now)
        elif state.utilisation < s.low and state.queue_s <= s.queue_low_s:
            lower = s.fall * self._aim
            self._turn(False, lower if lower > s.floor_tokens else self.optimum, now)
        if self._aim > ceiling:
            self._turn(False, ceiling, now)
        return self._publish()

    def replan(self, optimum: float) -> float:
        """Take a new t_opt, in tokens, from the slow loop; return the threshold in force."""
        if self._aim <= self.optimum:
            self._aim = _tokens(optimum)
        self.optimum = _tokens(optimum)
        self._aim = self._bounded(self._aim)
        return self._publish()

    def _turn(self, rising: bool, aim: float, now: float) -> None:
        bounded = self._bounded(aim)
        if bounded == self._aim:
            return
        if self._rising is not rising:
            if self._rising is not None and now - self._turned_at < self._settings.dwell_s:
                return
            self._rising = rising
        self._turned_at = now
        self._aim = bounded

    def _bounded(self, aim: float) -> float:
        most = self._settings.most * max(self.optimum, self._settings.floor_tokens)
        return max(self.optimum, min(aim, most))

    def _publish(self) -> float:
        changed = abs(self._aim - self.threshold_tokens)
        home = self._aim == self.optimum and changed > 0
        if home or changed > self._settings.least_change * self.threshold_tokens:
            self.threshold_tokens = self._aim
            self.moves += 1
        return self.threshold_tokens


def _tokens(threshold: float) -> float:
    if not 0 <= threshold < inf:
        raise UsageError(f"a threshold is a number of tokens, not {threshold!r}")
    return threshold


class Backlog(NamedTuple):
    """Waiting work on either side: bytes for the link, seconds of prefill for the pool's nodes and for local nodes."""

    link_bytes: float = 0.0
    pool_s: float = 0.0
    local_s: float = 0.0


def relief_threshold(
    clusters: PrefillClusters,
    prefill_nodes: int,
    rate: float,
    backlog: Backlog,
    horizon_s: float = 30.0,
    caution: float = 1.0,
) -> float:
    """Return the threshold with which both sides finish their waiting and coming work at the same time.

    `rate` requests a second come for `horizon_s`. Without a backlog the result is the root of (7); with a backlog on
    the link it is higher, and it is never below that root. With `caution` over 1 the pool's side may take that many
    times as long, since a link that has recovered drains its queue sooner than local prefill does. O(log precision).
    Raises `UsageError`.
    """
    if not rate >= 0 or not horizon_s > 0 or not caution > 0:
        raise UsageError("relief needs rate >= 0, horizon_s > 0 and caution > 0")
    low = best_threshold(clusters, prefill_nodes)
    if not clusters.pool_nodes or not prefill_nodes:
        return low
    coming = rate * horizon_s
    high = min(clusters.lengths.longest, 2.0**40)
    for _ in range(50):
        middle = (low + high) / 2
        found = rates(clusters, middle, prefill_nodes, 1)
        p, kv = found.offloaded, clusters.kv_bytes(found.long_tokens)
        link_s = (backlog.link_bytes + coming * p * kv) / clusters.egress_bytes_per_s
        pool_s = (backlog.pool_s + coming * p * clusters.pool_prefill_s(found.long_tokens)) / clusters.pool_nodes
        own = coming * (1 - p) * clusters.local_prefill_s(found.short_tokens) if p < 1 else 0.0
        if max(link_s, pool_s) > caution * (backlog.local_s + own) / prefill_nodes:
            low = middle
        else:
            high = middle
        if high - low < 1.0:
            break
    return low


class Rebalance(NamedTuple):
    """The result of the slow loop: the new plan, and the role to which one node changes ("" if none changes)."""

    plan: PrefillRates
    converted_to: str = ""


class Rebalancer:
    """The slow loop: it collects lengths, finds the optimum every `period_s`, and converts at most one node a period.

    A conversion empties a node, so it must add at least `least_gain` (a share) to the requests a second. Until
    `least_lengths` prompts were seen, the plan's own lengths are used. A period costs O(n log n) in the kept lengths.
    """

    __slots__ = ("_clusters", "_due", "_least_gain", "_least_lengths", "_period_s", "_seen", "prefill_nodes")

    def __init__(
        self,
        clusters: PrefillClusters,
        prefill_nodes: int,
        now: float,
        period_s: float = 60.0,
        keep_lengths: int = 4096,
        least_lengths: int = 256,
        least_gain: float = 0.05,
    ) -> None:
        if not 0 <= prefill_nodes < clusters.local_nodes:
            raise UsageError(f"prefill_nodes is 0 to {clusters.local_nodes - 1}: one node at least decodes")
        if not period_s > 0 or not 1 <= least_lengths <= keep_lengths or least_gain < 0:
            raise UsageError("a re-balancer needs period_s > 0, 1 <= least_lengths <= keep_lengths, least_gain >= 0")
        self._clusters = clusters
        self._period_s, self._least_lengths, self._least_gain = period_s, least_lengths, least_gain
        self._seen: deque[float] = deque(maxlen=keep_lengths)
        self._due = now + period_s
        self.prefill_nodes = prefill_nodes
        """Local nodes that prefill, or are being converted to prefill."""

    def saw(self, uncached_tokens: float) -> None:
        """Note a prompt. O(1)."""
        self._seen.append(uncached_tokens)

    def step(self, now: float, egress_bytes_per_s: float | None = None) -> Rebalance | None:
        """Return a new plan if a period is over, else None. `egress_bytes_per_s` is the link's present capacity."""
        if now < self._due:
            return None
        self._due = now + self._period_s
        clusters = self._clusters
        if len(self._seen) >= self._least_lengths:
            clusters = replace(clusters, lengths=Empirical(self._seen))
        if egress_bytes_per_s is not None:
            clusters = replace(clusters, egress_bytes_per_s=egress_bytes_per_s)
        held = rates(clusters, best_threshold(clusters, self.prefill_nodes), self.prefill_nodes)
        best = best_plan(clusters)
        toward = (best.prefill_nodes > self.prefill_nodes) - (best.prefill_nodes < self.prefill_nodes)
        if toward:
            nodes = self.prefill_nodes + toward
            moved = rates(clusters, best_threshold(clusters, nodes), nodes)
            if moved.requests_per_s > (1 + self._least_gain) * held.requests_per_s:
                self.prefill_nodes = nodes
                return Rebalance(moved, "prefill" if toward > 0 else "decode")
        return Rebalance(held)
