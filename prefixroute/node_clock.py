"""The clock of a node: the readings that callers give it, as a time that never goes back.

| a reading, beside the last one | is | node time |
|---|---|---|
| up to a day later | the usual case | goes on as far |
| up to a year later | a long pause: a machine slept | goes on as far; counted and told |
| up to a year earlier | old, or of a clock that was set back | stands still; counted; told beyond a second |
| a thousand times as large, to a hundredth | in milliseconds, or smaller | refused |
| further off | of another clock | refused |
| NaN, infinite, no number | a mistake | refused |

Rules:
1. What is refused raises `UsageError` and changes nothing: the next reading of the right clock goes on.
2. No clock is locked out for ever. Readings that go on by themselves, without one of the old clock in between, are of a
   clock that was set: those of the timer for `STAYS_S`, since its caller reads the clock right before it; any that are
   refused for `FAR_STAYS_S`. Node time goes on from where it stood, so nothing grows older by the step.
3. What a node tells its caller, as when its timer is due, is in readings again (`reading_of`).
"""

from __future__ import annotations

from math import inf, isfinite, nextafter

from .errors import UsageError
from .events import ClockJumped, Journal

LONG_S = 86_400.0
"""A pause of more than a day is told."""

FAR_S = 365 * 86_400.0
"""More than a year off is another clock: wall clocks are some 55 years ahead of those that count from the start."""

STAYS_S = 1.0
FAR_STAYS_S = 60.0
"""A node that is driven meets a reading of its own clock every half second, so a mistaken caller does not get there."""

TOLD_S = 1.0
"""An older reading is told beyond this: callers keep one over an await, and clocks are slewed by less."""

QUIET_S = 60.0
"""Jumps are told once in so long of node time."""

LIMIT_S = 1e10
"""No clock of seconds is there for three centuries: 1.7e12 and more are the milliseconds and nanoseconds of today."""

_UNITS = {"milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}


def checked_reading(now: float) -> float:
    """Return a clock reading as a float. Raises `UsageError` for one that is none."""
    try:
        reading = float(now)
    except (TypeError, ValueError, ArithmeticError):
        reading = float("nan")
    if isinstance(now, (str, bytes)) or not isfinite(reading):
        raise UsageError(f"`now` must be a clock reading in seconds, as time.monotonic() returns, not {now!r}")
    if abs(reading) >= LIMIT_S:
        raise UsageError(f"`now` must be in seconds, as time.monotonic() returns; {now!r} looks like a smaller unit")
    return reading


class NodeClock:
    """Node time, from the caller's readings: what `read` returns never decreases. O(1)."""

    __slots__ = ("_journal", "_told_at", "doubt", "offset", "reading")

    def __init__(self, now: float, journal: Journal) -> None:
        self.reading = checked_reading(now)
        """The last one that was taken."""
        self.offset = 0.0
        """Node time less reading: grows when the clock is set back."""
        self.doubt: tuple[float, float, bool] | None = None
        """Of readings since the last that was taken that may be of another clock, the first and the last, and whether
        they tell that it stays: those of the timer, and those that are far off."""
        self._told_at = float("-inf")
        self._journal = journal

    def read(self, now: float, timer: bool = False) -> float:
        """Return the node time of a reading; `timer` says that it was taken for the node's timer.

        Raises `UsageError` for one that cannot be of this node's clock.
        """
        try:
            if 0.0 <= now - self.reading <= LONG_S:
                self.reading = now
                if self.doubt is not None:
                    self.doubt = None
                return now + self.offset
        except (TypeError, ValueError, ArithmeticError):
            pass
        return self._odd(checked_reading(now), timer)

    def reading_of(self, at: float) -> float:
        """Return the reading at which it is `at`; soon, while it is not known which clock is right: the timer tells."""
        reading = at - self.offset
        while reading + self.offset < at:  # Rounded down it would never be due.
            reading = nextafter(reading, inf)
        if self.doubt is None:
            return reading
        first, _, telling = self.doubt
        return min(reading, first + STAYS_S if telling else first)

    def _odd(self, now: float, timer: bool) -> float:
        """Judge a reading that is not just a little later than the last."""
        step, unit = now - self.reading, self._unit(now)
        far = unit != "" or not -FAR_S <= step <= FAR_S
        if step >= 0 and not far:
            self._jumped(step, "a long pause")
            self.reading, self.doubt = now, None
            return now + self.offset
        begins = self.doubt is None
        first, last, telling = self.doubt or (now, now, False)
        if not telling or not last <= now <= last + LONG_S:
            first = now
        if not far and not timer:
            self.doubt = self.doubt if telling else (now, now, False)
        elif now - first >= 0.99 * (FAR_STAYS_S if far else STAYS_S):
            # Exactly as long as the new readings measured: nothing is lost either.
            self.offset += self.reading - first
            self.reading, self.doubt = now, None
            self._journal.count("clock_sets")
            return now + self.offset
        else:
            self.doubt = (first, now, True)
        if not far:
            self._journal.count("clock_behind")
            if begins and step < -TOLD_S:
                self._jumped(step, "an older reading than the last: time stands still until the clock is there again")
            return self.reading + self.offset
        self._journal.count("clock_refused")
        if begins:
            self._jumped(step, "a reading of another clock, which was refused")
        why = f"looks like {unit}" if unit else f"is {abs(step):.3g} s {'after' if step > 0 else 'before'} the last one"
        raise UsageError(
            f"now={now!r} {why}: this node's clock was at {self.reading!r}. Give every call of one node readings in "
            "seconds of one clock, time.monotonic() or driver.now(), and never time.time() as well"
        )

    def _unit(self, now: float) -> str:
        """The smaller unit that a reading seems to have; "" if none."""
        last = self.reading
        if now - last <= LONG_S or last <= 0:
            return ""
        return next((unit for unit, n in _UNITS.items() if abs(now / n - last) <= 0.01 * last), "")

    def _jumped(self, step: float, reason: str) -> None:
        self._journal.count("clock_jumps")
        time = self.reading + self.offset
        if time - self._told_at >= QUIET_S:
            self._told_at = time
            self._journal.tell(ClockJumped(step, reason))
