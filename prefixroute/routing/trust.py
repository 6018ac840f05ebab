"""Whether an endpoint is believed: whether it answers, whether its hits come true, and whether it is in time.

| evidence | kept in | effect | ends with |
|---|---|---|---|
| forwards that fail | `Suspension` | only a trial is sent, after 1 s, 2 s ... 60 s | answers, step by step |
| forwards without a word | `Silence` | the longer, the later it is taken to be; then it has failed | a word |
| how late words come | `Promptness` | so much more patience | |
| predicted hits that are none | `Misses` | less of its digest is believed | hits, or time |
| first tokens that come late | `Lateness` | it is taken for slower than it says | tokens in time, or time |
| every count of cached tokens | `Accuracy` | none: it is for operators | |

An honest endpoint misses now and then, since its digest is a round old. One that misses again and again claims what it
does not hold, and is not to be asked twenty times before that is believed.

    weight of the n-th total miss in a row      1/10, 2/10, 4/10, 1/2, 1/2 ...
    weight of the n-th first token in a row     1/5, 1/5, 2/5, 3/5, 3/5 ...
        that came after twice what was told
    a miss is forgiven with time constant       one minute, doubled with each miss in a row, at most ten
    lateness fades with time constant           half a minute, doubled from the third late one in a row, at most four

Rules:
1. A streak ends with the first hit, or the first token in time. Without a streak the plain weights (0.1, 0.2) apply.
2. Forgiving needs no evidence, only time: an endpoint that is not asked cannot show that it is better.
3. Heartbeats do not end a suspension: a node that speaks may still not serve. Nor does a report of an empty queue show
   that what was sent there has been served.
4. A prediction is compared only with the engine's own count, at the endpoint that served the request, and as finely as
   the engine can reuse blocks.
5. A word is a first token, or an outcome before it. Who is slow is not dead: a first word later than the silence that
   was taken for a failure takes that failure back.
"""

from __future__ import annotations

from math import exp, inf
from typing import NamedTuple

MISSED = 0.1
"""A hit of less than this share of what was predicted is a total miss."""

LATE = 2.0
"""A first token after so many times what was told is late."""

LATE_S = 0.05
"""But no token is late by less than this, in seconds; one that has not come is late after both together."""

MAX_DECLINES = 1
"""Prompts in a row that an endpoint may hand back though it would have been in time by its own word."""

OVERDUE, OVERDUE_S = 5.0, 3.0
"""A first token is overdue after so many times what was expected, and so many seconds at least.

An engine may be several times slower than it is known to be. What a shorter silence would save is saved by `AT_ONCE`.
"""

AT_ONCE = 4
"""Forwards that wait at an endpoint that is late, without a word since the first of them: no more go there then."""

SILENT = 2
"""Failures that a silence counts for: it has cost the request its time, which a refused connection does not."""

_MOST_FAILURES = 7
"""With them the pause is at its longest."""

_STEP = 4.0
"""Answers in a row that make up for one failure: who hangs more often than once in ten, by chance, is driven out."""

_FREE = 4
"""Answers in a row after which an endpoint gets all again; before, it gets 1, 2, 4, 8 forwards at a time."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MISS_WEIGHTS = (0.1, 0.2, 0.4, 0.5)
_LATE_WEIGHTS = (0.2, 0.2, 0.4, 0.6)
_FORGIVEN_S, _FORGIVEN_MOST_S = 60.0, 600.0
_FADES_S, _FADES_MOST = 30.0, 8.0


class Suspension:
    """Whether forwards to an endpoint are suspended because they fail; after a pause one trial is let through.

    It lasts until it ends: with a word, an outcome, or as overdue. One that is served lifts the suspension: twice as
    many forwards may be under way after each answer. The failures are forgotten more slowly.
    """

    __slots__ = ("_earned", "_failed_at", "_failed_tokens", "_in_row", "_trials", "failures", "reason", "trial_at")

    def __init__(self) -> None:
        self._failed_at = -inf
        self.trial_at = -inf
        """When the pause ends."""
        self._failed_tokens = 0
        self._in_row = 0
        """Answers since the last failure."""
        self._earned = 0.0
        """The same since the last step, each by the length of its prompt: a short one shows little of long ones."""
        self._trials: set[int] = set()
        self.failures = 0
        self.reason = ""
        """Of the last failure."""

    @property
    def on_trial(self) -> bool:
        """Whether what goes there is counted."""
        return self.failures > 0 and self._in_row < _FREE

    def blocks(self, now: float) -> bool:
        """Whether forwards must not go there now."""
        return self.on_trial and (now < self.trial_at or len(self._trials) >= 1 << self._in_row)

    def sent(self, ticket: int) -> None:
        """Note that a forward goes out while the endpoint is on trial."""
        self._trials.add(ticket)

    def ended(self, ticket: int) -> None:
        """Note that a forward is over; one that was not counted is harmless."""
        self._trials.discard(ticket)

    def failed(self, sent_at: float, now: float, tokens: int = 0, weight: int = 1, reason: str = "") -> int:
        """Note that a forward of a prompt of `tokens` failed; return for how many it counts, 0 if it is no news.

        When a node dies all forwards under way fail at once: one that was sent before the last failure is no news.
        """
        if sent_at <= self._failed_at:
            return 0
        before, self.failures = self.failures, min(self.failures + weight, _MOST_FAILURES)
        self._failed_at, self._failed_tokens, self.reason = now, tokens, reason
        self.trial_at = now + min(_FIRST_PAUSE_S * 2.0 ** (self.failures - 1), _LONGEST_PAUSE_S)
        self._in_row, self._earned = 0, 0.0
        return max(1, self.failures - before)

    def served(self, tokens: int = 0, forgiven: int = 0) -> bool:
        """Note an answer to a prompt of `tokens`; return whether that ended a suspension.

        `forgiven` are failures that were none: the answer was only late.
        """
        if not self.failures:
            return False
        ended = self._in_row == 0
        self._in_row += 1
        self.trial_at = -inf
        self._earned += tokens / self._failed_tokens if tokens < self._failed_tokens else 1.0
        if self._earned >= _STEP:
            self._earned, forgiven = 0.0, forgiven + 1
        self.failures = max(0, self.failures - forgiven)
        if not self.failures:
            self._in_row = 0
        return ended

    def parted(self) -> Suspension:
        """Return one of its own for an endpoint that shared this one."""
        own = Suspension()
        own.failures, own._in_row, own._earned = self.failures, self._in_row, self._earned
        own._failed_at, own._failed_tokens, own.reason = self._failed_at, self._failed_tokens, self.reason
        return own


class Silence:
    """Whether forwards wait at an endpoint since its last word, or since it failed."""

    __slots__ = ("_heard_at", "_reached", "given_up", "late_at", "since")

    def __init__(self) -> None:
        self._heard_at = self._reached = -inf
        """When the last word came, and when the latest forward was sent of which one came."""
        self.since = -inf
        self.given_up = 0
        """Forwards sent since then for which nobody waits any more, and that were late by then."""
        self.late_at = inf
        """When the first forward sent since then is late. From that moment on nothing is believed to move there."""

    def heard(self, sent_at: float, now: float) -> None:
        """Note the word of a forward that was sent then."""
        self._heard_at = now
        self._reached = max(self._reached, sent_at)
        self.broken(now)

    def broken(self, now: float) -> None:
        """Note a word, or a failure: what is to come is judged anew."""
        self.since, self.given_up, self.late_at = now, 0, inf

    def moves(self, sent_at: float, since: float) -> bool:
        """Whether a forward that was sent then is still in a queue: words came `since`, and none of a later one."""
        return self._heard_at > since and self._reached < sent_at


class Promptness:
    """How much later than expected first words come: their mean and mean deviation, smoothed (Jacobson, SIGCOMM 1988).

    So a peer that is slower than it says gets the time it takes, and so does a caller that reports whole answers.
    """

    __slots__ = ("_deviation_s", "_mean_s", "known", "patience_s")

    def __init__(self) -> None:
        self.known = False
        self.patience_s = 0.0
        """Seconds beyond what is expected within which nearly all words come."""
        self._mean_s = self._deviation_s = 0.0

    def note(self, excess_s: float, most_s: float) -> None:
        """Take a first word that came `excess_s` seconds later than expected; of one only `most_s` is counted.

        So an endpoint that once hung for a minute is not waited for so long again.
        """
        if excess_s < 0.0:
            excess_s = 0.0
        if not self.known:
            self.known, self._mean_s, self._deviation_s = True, excess_s, excess_s / 4
        else:
            error = (excess_s if excess_s < most_s else most_s) - self._mean_s
            self._mean_s += error / 8
            self._deviation_s += ((error if error > 0 else -error) - self._deviation_s) / 4
        self.patience_s = self._mean_s + 4 * self._deviation_s


class Misses:
    """Total misses in a row of one endpoint."""

    __slots__ = ("_at", "in_row")

    def __init__(self) -> None:
        self.in_row = 0
        self._at = 0.0

    def weight(self, share: float, now: float) -> float:
        """Note that `share` of a predicted hit came true; return its weight in the trust."""
        self._at = now
        if share >= MISSED:
            self.in_row = 0
            return _MISS_WEIGHTS[0]
        self.in_row += 1
        return _MISS_WEIGHTS[min(self.in_row, len(_MISS_WEIGHTS)) - 1]

    def forgiven(self, trust: float, now: float) -> float:
        """Return what a trust has come back to since the last miss, or since this was last asked."""
        if not self.in_row or now <= self._at:
            return trust
        constant = min(_FORGIVEN_S * 2.0 ** min(self.in_row - 1, 10), _FORGIVEN_MOST_S)
        back = 1.0 - exp((self._at - now) / constant)
        self._at = now
        return trust + back * (1.0 - trust)


class Lateness:
    """First tokens in a row that came much later than told, and prompts in a row handed back though in time."""

    __slots__ = ("_at", "declines", "in_row", "late_s")

    def __init__(self) -> None:
        self.in_row = 0
        self.declines = 0
        self.late_s = 0.0
        """Seconds by which first tokens came later than told, smoothed; below 0: earlier."""
        self._at = 0.0

    def excess_s(self, now: float) -> float:
        """Return the seconds by which first tokens came later than told, lately; it fades, so a peer is tried again."""
        # Early ones weigh against late ones, but a peer is not taken for faster than it says.
        return self.late_s * exp((self._at - now) / self.fades_s) if self.late_s > 0 else 0.0

    def surprised(self, ttft_s: float, told_s: float, now: float) -> None:
        """Learn from a first token that came after `ttft_s` seconds and was told for `told_s`."""
        self.late_s = self.excess_s(now) or self.late_s
        self.late_s += self.weight(ttft_s, told_s) * (ttft_s - told_s - self.late_s)
        self._at = now

    def weight(self, ttft_s: float, told_s: float) -> float:
        """Note a first token that came after `ttft_s` seconds and was told for `told_s`; return its weight."""
        late = ttft_s > LATE * told_s and ttft_s > told_s + LATE_S
        self.in_row = self.in_row + 1 if late else 0
        return _LATE_WEIGHTS[min(max(self.in_row, 1), len(_LATE_WEIGHTS)) - 1]

    @property
    def fades_s(self) -> float:
        """Seconds in which a surprise fades to a third."""
        return _FADES_S * min(2.0 ** max(0, min(self.in_row, 10) - 2), _FADES_MOST)


def overdue_after_s(expected_s: float) -> float:
    """Return the seconds after which a first token is overdue that was expected after `expected_s`."""
    return OVERDUE_S if expected_s < OVERDUE_S / OVERDUE else OVERDUE * expected_s


class Accuracy(NamedTuple):
    """Requests by how their predicted hit compares with the cached tokens that the engine reported, and sums of both.

    Each is one of `exact`, `near` (off by one hit unit at most), `high` and `low` (predicted too much, too little).
    `most_over` is the largest over-estimate in tokens.
    """

    exact: int = 0
    near: int = 0
    high: int = 0
    low: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    most_over: int = 0

    @property
    def compared(self) -> int:
        """Requests compared."""
        return self.exact + self.near + self.high + self.low

    def and_one(self, predicted: int, cached: int, unit: int) -> Accuracy:
        """Return this with one more request; all in tokens. O(1)."""
        over = predicted - cached
        return Accuracy(
            self.exact + (over == 0),
            self.near + (0 < abs(over) <= unit),
            self.high + (over > unit),
            self.low + (-over > unit),
            self.predicted_tokens + predicted,
            self.cached_tokens + cached,
            max(self.most_over, over),
        )
