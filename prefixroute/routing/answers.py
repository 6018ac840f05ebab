"""Whether peers answer: the first words of the forwards under way, and what their absence means.

| what | means |
|---|---|
| a first word: a first token, or an outcome before it | the endpoint is there; a suspension ends step by step |
| it is late | more than a few do not go there; each second makes the next one look a second slower (`Silence`) |
| it is overdue, and the queue does not move | a failure, which counts for more than one that comes at once |
| it comes after all | that was none, and more time is given from now on (`Promptness`) |
| nobody waits for it any more | nothing, but many in vain are a failure |

Rules:
1. Silence is judged at the moment of `judge_at` or with the next decision, whatever the patience of who waits.
2. A decision pays for no more than a comparison or two: all attempts are looked at when one may be overdue.
3. This node's own endpoints are never suspended.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from ..events import Journal, PeerChanged
from ..keys.chain import TokenChain
from ..keys.names import owner_of
from ..policy.interface import Candidate
from .decision import Decision
from .fleet import Fleet, Offer
from .predictions import Predictions
from .standing import PeerStanding, Standing
from .trust import AT_ONCE, LATE, LATE_S, OVERDUE_S, SILENT, Suspension, overdue_after_s

JUDGED_EVERY_S = 0.05
"""Between two looks at all attempts there is so much time at least, in seconds."""


class Flight:
    """An attempt under way: what the endpoint that has the request was `weighed` at, and who is `left` to try.

    `offer` are those that may be tried at all; None: everybody. What has its first value is not set for each: that took
    a decision 0.3 us.
    """

    tried: tuple[str, ...] = ()
    """Who had it before."""
    queued: bool = False
    """Whether it had to queue behind others of this node's."""
    booked: Standing | None = None
    """Where: another life of an endpoint has another standing."""
    handed_back: bool = False
    """Such a prompt stays where it goes next; an endpoint that declines it all the same is passed over."""
    heard: bool = False
    """Whether its first word came."""
    foreseen: bool = True
    """Whether its target was weighed when it was decided: else there is nothing to compare the answer with."""
    moved_at: float = -inf
    """When the queue in which it waits was last seen to move."""
    excess_s: float = 0.0
    """Seconds of the wait that its target did not tell: earlier ones came late, or do not come."""
    charged: int = -1
    """Failures of its target since it is overdue; below 0 before."""
    suspension: Suspension | None = None
    """Where it is counted as a trial."""

    def __init__(
        self,
        decision: Decision,
        chain: TokenChain,
        weighed: Candidate,
        left: tuple[str, ...],
        sent_at: float,
        offer: Offer | None = None,
    ) -> None:
        self.decision = decision
        self.chain = chain
        self.weighed = weighed
        self.left = left
        self.sent_at = sent_at
        self.offer = offer

    def end_trial(self) -> None:
        """Take it for over as a trial."""
        if self.suspension is not None:
            self.suspension.ended(self.decision.id)
            self.suspension = None


class Answers:
    """Which peers answer. Calls are O(1) but for `judge`, and for a failure or a trial."""

    def __init__(self, fleet: Fleet, predictions: Predictions, journal: Journal, now: float) -> None:
        self.judge_at = now
        """When `judge` is to be called. To be read only."""
        self._fleet = fleet
        self._predictions = predictions
        self._journal = journal
        self._pauses: list[float] = []
        """A heap: when suspended endpoints may be tried again."""

    def judge(self, flights: Iterable[Flight], now: float) -> None:
        """Suspend peers whose first words are overdue, and let those be tried whose pause is over. O(flights)."""
        # Nothing that is sent from now on is overdue before.
        next_at = now + OVERDUE_S
        for flight in list(flights):
            if not (flight.heard or flight.weighed.local or flight.charged >= 0):
                next_at = min(next_at, self._overdue(flight, now))
        if self._pauses and self._pauses[0] <= now:
            while self._pauses and self._pauses[0] <= now:
                heappop(self._pauses)
            self._fleet.refresh_passing(now)
        # Of thousands that are due one after the other, some are judged at a time.
        self.judge_at = min(max(next_at, now + JUDGED_EVERY_S), self._pauses[0] if self._pauses else inf)

    def _overdue(self, flight: Flight, now: float) -> float:
        """Judge an attempt of which no word came, if it is time; return when it is to be looked at again."""
        standing = self._fleet.known(flight.weighed.endpoint)
        if not isinstance(standing, PeerStanding):
            return inf
        patience_s = standing.slack_s + overdue_after_s(flight.weighed.cost_s)
        due_at = max(flight.sent_at, flight.moved_at) + patience_s
        if now < due_at:
            return due_at
        if standing.silence.moves(flight.sent_at, max(flight.sent_at, now - patience_s)):
            flight.moved_at = now
            return now + patience_s
        self._journal.count("overdue")
        self.silent(flight, standing, f"no first token within {now - flight.sent_at:.1f} s", now)
        self._fleet.refresh(standing, now)
        return inf

    def silent(self, flight: Flight, standing: Standing, reason: str, now: float) -> None:
        """Suspend a peer that gives no word, and expect nothing there of the prompt."""
        flight.end_trial()
        charged = self.suspend(flight, standing, reason, now)
        if isinstance(standing, PeerStanding) and flight.charged < 0:
            # The booking stays. But a trial is to go where it would go if all were well.
            flight.charged = charged
            standing.overdue += 1
            standing.queue.unsent(flight.decision.id)
        self._predictions.drop(flight.decision.id)

    def heard(self, flight: Flight, standing: Standing, answers: bool, now: float) -> None:
        """Take an attempt's first word: the endpoint is there, and `answers` or turns the prompt away."""
        flight.heard = True
        flight.end_trial()
        late_s = now - flight.sent_at - flight.weighed.cost_s
        if isinstance(standing, PeerStanding):
            standing.silence.heard(flight.sent_at, now)
            if answers:
                # Of a word that was overdue no more is counted than twice the patience there was.
                standing.promptness.note(late_s, 2.0 * (standing.slack_s + overdue_after_s(flight.weighed.cost_s)))
                standing.slack_s = standing.promptness.patience_s
                self.resume(flight, standing)
        if answers:
            self._fleet.promptness.note(late_s, inf)

    def doubt(self, flight: Flight, standing: PeerStanding, now: float) -> None:
        """Note a forward to an endpoint that was late or failed before."""
        late_at, suspension = standing.silence.late_at, standing.suspension
        flight.excess_s = standing.lateness.excess_s(now) + max(0.0, now - late_at)
        if suspension.on_trial:
            flight.suspension = suspension
            suspension.sent(flight.decision.id)
            self._fleet.refresh_sharing(standing, now)
        elif standing.holds(now):
            self._fleet.refresh(standing, now)

    def resume(self, flight: Flight, standing: Standing) -> None:
        """Count an answer towards the end of a suspension: the target is there."""
        forgiven = max(0, flight.charged)
        if self._fleet.served(standing, flight.weighed.prompt_tokens, forgiven):
            self._journal.tell(PeerChanged(owner_of(standing.name), "resumed", standing.name))

    def suspend(self, flight: Flight, standing: Standing, reason: str, now: float) -> int:
        """Suspend a peer's endpoint, if the failure is news; return for how many it counts.

        This node's own endpoints never are suspended.
        """
        if not isinstance(standing, PeerStanding):
            return 0
        standing.silence.broken(now)
        weight = SILENT if self._is_late(flight, standing, now) else 1
        charged = standing.suspension.failed(flight.sent_at, now, flight.weighed.prompt_tokens, weight, reason)
        if charged:
            heappush(self._pauses, standing.suspension.trial_at)
            self.judge_at = min(self.judge_at, self._pauses[0])
            self._fleet.refresh_sharing(standing, now)
            self._journal.tell(PeerChanged(owner_of(standing.name), "suspended", reason))
        return charged

    def _is_late(self, flight: Flight, standing: PeerStanding, now: float) -> bool:
        """Whether a forward waits for its first word longer than it should."""
        late_at = flight.sent_at + standing.slack_s + LATE * flight.weighed.cost_s + LATE_S
        return now >= late_at and not flight.heard

    def cancelled(self, flight: Flight, standing: PeerStanding, now: float) -> None:
        """Nobody waits for an attempt any more. That says nothing, unless it is late and so were the ones before."""
        silence, suspension, most = standing.silence, standing.suspension, AT_ONCE
        late_at = silence.late_at
        if suspension.failures:
            flight.end_trial()
            most = 1 if suspension.on_trial else AT_ONCE
        if not standing.queue.sends:
            silence.late_at = inf
        if now >= late_at and flight.sent_at >= silence.since and self._is_late(flight, standing, now):
            silence.given_up += 1
            if silence.given_up >= most:
                self.suspend(flight, standing, "no first token came before those who waited went away", now)
