"""The fast loop of two clusters in the simulator: what an operator's own code would do once a second.

Rule: the loop sees what an operator can see: the counters of its connections, its own queues, and the link's nominal
rate. A link does not report that it has less bandwidth; the loop learns it from transfers that the link slows down.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from prefixroute.plan import (
    Backlog,
    CapacityEstimate,
    ControllerSettings,
    LinkMonitor,
    LinkState,
    PrefillClusters,
    ThresholdController,
    relief_threshold,
)

from .kv_link import SharedLink

TICK_S = 1.0
"""Seconds between two steps of the fast loop."""

HORIZON_S = 60.0
"""Seconds that the loop looks ahead: as long as a link's trouble lasts, so that a burst does not count as trouble.

With 20 s thresholds moved three times as often, and bursts of twice the rate cost 7.6 % of P90 on a whole link.
"""

CAUTION = 1.25
"""Factor by which the link may be busier than local prefill: its queue ends with its trouble, a local queue later."""


class FastLoop:
    """A threshold controller, and the monitors of the link that it follows."""

    def __init__(
        self,
        clusters: PrefillClusters,
        prefill_nodes: int,
        threshold_tokens: float,
        settings: ControllerSettings,
        link: SharedLink,
    ) -> None:
        self._clusters, self._prefill_nodes, self._settings, self._link = clusters, prefill_nodes, settings, link
        self._controller = ThresholdController(threshold_tokens, settings)
        self._monitor = LinkMonitor()
        self._capacity = CapacityEstimate(clusters.egress_bytes_per_s)
        self._sent = self._limited_s = self._rate = 0.0

    def replan(self, optimum: float, prefill_nodes: int) -> float:
        """Take the slow loop's new optimum; return the threshold in force, in tokens."""
        self._prefill_nodes = prefill_nodes
        return self._controller.replan(optimum)

    def step(self, now: float, backlog: Backlog, arrived: int) -> float:
        """Take one step; return the threshold in force, in tokens. `arrived` prompts came in the last second."""
        link = self._link
        sent, limited = (link.sent_bytes - self._sent) / TICK_S, (link.limited_s - self._limited_s) / TICK_S
        self._sent, self._limited_s = link.sent_bytes, link.limited_s
        self._rate += 0.1 * (arrived / TICK_S - self._rate) if self._rate else arrived / TICK_S
        carries = self._capacity.observe(sent, limited)
        seen = LinkState(max(sent / self._clusters.egress_bytes_per_s, limited), backlog.link_bytes / carries)
        state, controller = self._monitor.observe(seen, now), self._controller
        busy = state.utilisation > self._settings.low or controller.threshold_tokens > controller.optimum
        return controller.step(state, now, self._ceiling(carries, backlog) if busy else inf)

    def _ceiling(self, carries: float, backlog: Backlog) -> float:
        """Return the threshold in tokens above which local prefill would be the busier side."""
        clusters = replace(self._clusters, egress_bytes_per_s=carries)
        return relief_threshold(clusters, self._prefill_nodes, self._rate, backlog, HORIZON_S, CAUTION)
