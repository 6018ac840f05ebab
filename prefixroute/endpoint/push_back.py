"""When an endpoint of this node's own pushes back (`load`, rule 2): overloaded with hysteresis, or refusing.

| state | from | until |
|---|---|---|
| overloaded | `enter_s` of queued work | `leave_s` of it |
| refusing | the engine says so, or turned a request away | `ttl_s` after the last time |
| open | neither | |
"""

from __future__ import annotations

from ..load import LoadReport, PushBackSettings, PushBackState


class PushBack:
    """One endpoint's push-back. `reason` says in words why the state is not open."""

    __slots__ = ("_refused_until", "_settings", "reason", "state")

    def __init__(self, settings: PushBackSettings) -> None:
        self._settings = settings
        self._refused_until = float("-inf")
        self.state = PushBackState.OPEN
        self.reason = ""

    def update(self, work_s: float, report: LoadReport, now: float) -> bool:
        """Take the endpoint's queue work in seconds and its report; return whether the state changed."""
        before = self.state
        if report.refusing:
            self._refused_until = now + self._settings.ttl_s
            self.reason = report.reason or "the engine refuses"
        if now < self._refused_until:
            self.state = PushBackState.REFUSING
        elif work_s >= self._settings.enter_s:
            self.state, self.reason = PushBackState.OVERLOADED, f"queue of {work_s:.1f} s"
        elif work_s <= self._settings.leave_s or before is PushBackState.REFUSING:
            self.state, self.reason = PushBackState.OPEN, ""
        return self.state is not before

    def refuse(self, reason: str, until: float) -> None:
        """Note that the engine turned a request away: it refuses until then."""
        self._refused_until = max(until, self._refused_until)
        self.reason = reason or "the engine refused a request"
