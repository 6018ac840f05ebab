"""When a node speaks: the settings of gossip, and the pace of its exchanges.

Rules:
1. A round is `fan_out` exchanges, spread evenly over `interval_s`: peers that are asked at the same moment would all
   send the same.
2. When nothing but heartbeats was news for a second, exchanges slow down step by step to one in `idle_interval_s`.
   Any news brings the full pace back at once.
3. What changed is published when it is a share of the set, or has waited long enough: not by a clock alone.
"""

from __future__ import annotations

from .gossip_settings import GossipSettings

QUIET_AFTER_S = 1.0
"""Without news for so long, a node slows down."""

SLOWER = 1.25
"""Each quiet exchange takes this much longer to the next: gently, so that others learn the new rhythm on the way."""


class Tempo:
    """When the next exchange and the next heartbeat are due."""

    __slots__ = ("_settings", "beat_at", "last_at", "news_at", "next_at", "spacing_s")

    def __init__(self, settings: GossipSettings, now: float) -> None:
        self._settings = settings
        self.spacing_s = settings.interval_s
        """Seconds between exchanges, at the present pace."""
        self.next_at = now
        """When the next exchange is due."""
        self.beat_at = now
        """When the next heartbeat is due."""
        self.last_at = now
        self.news_at = now
        """When there was last anything new but heartbeats."""

    def beats(self, now: float) -> bool:
        """Whether this exchange begins a round; if so the next round is set."""
        interval = self._settings.interval_s
        # A float's rounding must not put a heartbeat off by a whole exchange.
        if now < self.beat_at - 0.01 * interval:
            return False
        self.beat_at = max(self.beat_at + interval, now + 0.5 * interval)
        return True

    def went(self, n_peers: int, now: float) -> None:
        """Note that an exchange began, and set the next one."""
        settings = self._settings
        busy = settings.interval_s / max(1, min(settings.fan_out, n_peers))
        if now - self.news_at <= QUIET_AFTER_S:
            self.spacing_s = busy
        else:
            self.spacing_s = max(busy, min(self.spacing_s * SLOWER, settings.idle_interval_s))
        self.last_at = now
        self.next_at = max(self.next_at + self.spacing_s, now + 0.5 * self.spacing_s)

    def stir(self, now: float) -> None:
        """Note that there is news: the pace is the full one from now on."""
        self.news_at = now
        self.next_at = min(self.next_at, max(now, self.last_at + self._settings.interval_s))
