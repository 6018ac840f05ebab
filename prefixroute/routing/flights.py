"""Following decisions up: each attempt is booked at its target, judged by its outcome, and passed on where it failed.

| outcome | learnt of the target | the request |
|---|---|---|
| served | that it is there, its hit, its lateness, its load | is done |
| declined: over the budget | that it is there, its hit, its load, what it could have served | is decided anew, once |
| refused | that it refuses for a while | goes to the next fallback |
| failed, timed out | that forwards to it fail: it is suspended | goes to the next fallback |
| cancelled | nothing, but many in vain are a failure | is done |
| first token overdue | as failed | waits for its caller |
| none in time | as failed | is given up; goes to the next fallback if its caller reports that it failed after all |

Rules:
1. The expected work is booked at the target with the decision, and released by the first token, the outcome or time.
2. What is left to try, in this order: the fallbacks that are usable, this node's own endpoints, everybody else. Nobody
   is tried twice for one request.
3. Late, repeated and missing reports are harmless.
4. Whether peers answer at all is judged in `answers`, also without any report.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from ..errors import UsageError
from ..events import Journal
from ..keys.chain import TokenChain
from ..policy.interface import Candidate
from .answers import Answers, Flight
from .decision import FORWARDED, Decision, Outcome, OutcomeKind
from .fleet import Offer
from .router import Router
from .standing import PeerStanding, Standing
from .trust import LATE, LATE_S, MAX_DECLINES, MISSED

_FAILURES = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT)
_SERVED, _DECLINED, _REFUSED, _CANCELLED = (
    OutcomeKind.SERVED,
    OutcomeKind.DECLINED,
    OutcomeKind.REFUSED,
    OutcomeKind.CANCELLED,
)
"""By names of their own: to look one up in its class takes 0.35 us."""
_OUTCOMES = {kind: kind.value.replace(" ", "_") for kind in OutcomeKind}

KEPT_S = 600.0
"""Seconds for which an attempt that was given up may still fail and be passed on: more than callers wait."""

KEPT_TOKENS = 1 << 22
"""Tokens of the prompts of all those attempts: 16 MB of them."""


class FlightBounds(NamedTuple):
    """How long an outcome is waited for, how long a refusal counts, both in seconds, and how many attempts are kept."""

    timeout_s: float
    refusal_s: float
    most: int


class Hooks(NamedTuple):
    """What the owner of the local endpoints is told."""

    served: Callable[[Flight, Standing, Outcome, float], None]
    """A request was served, here or elsewhere, at a time."""
    begun: Callable[[int, TokenChain, Standing, int, float], None]
    """(ticket, chain, standing, depth, now): a local endpoint is to serve a prompt, and holds `depth` blocks of it."""
    ended: Callable[[int, Standing], None]
    """That attempt is over."""


class Flights:
    """The attempts under way of one node. Calls are O(1) but for a new decision, `expire` and a failure."""

    def __init__(self, router: Router, bounds: FlightBounds, hooks: Hooks, journal: Journal, now: float) -> None:
        self.open: dict[int, Flight] = {}
        """By decision, the oldest first. To be read only."""
        self._router = router
        self._fleet = router.fleet
        self._gate = router.fleet.gate
        self._predictions = router.predictions
        self._bounds = bounds
        self._hooks = hooks
        self._journal = journal
        self._answers = Answers(self._fleet, self._predictions, journal, now)
        self._tickets = 0
        self._kept: dict[int, Flight] = {}
        """Attempts that were given up, the oldest first."""
        self._kept_tokens = 0

    @property
    def judge_at(self) -> float:
        """When `judge` is to be called; it may find nothing to do."""
        return self._answers.judge_at

    def judge(self, now: float) -> None:
        """Judge attempts of which no word comes, if it is time. O(attempts) then."""
        if now >= self._answers.judge_at:
            self._answers.judge(self.open.values(), now)

    def route(
        self, chain: TokenChain, forwarded: bool, now: float, budget_s: float = inf, offer: Offer | None = None
    ) -> Decision:
        """Decide who serves `chain`, and book the work there. Raises `NoEndpointError` when nobody is there."""
        if now >= self._answers.judge_at:
            self.judge(now)
        self._tickets += 1
        offered = -1 if offer is None else self._fleet.mask(offer)
        decision, best = self._router.decide(self._tickets, chain, forwarded, now, offered)
        if chain.fault:
            raise UsageError(chain.fault)
        chain.fault = ""
        if forwarded:
            self._fleet.entry.forwarded(chain)
        if forwarded and best.cost_s > budget_s:
            self._journal.count("decisions", "declined")
            reason = f"declined: longer here than the budget of {1000 * budget_s:.0f} ms"
            return decision._replace(declined=True, reason=reason)
        flight = Flight(decision, chain, best, decision.fallbacks, now, offer)
        self.open[decision.id] = flight
        if len(self.open) > self._bounds.most:
            self._give_up(next(iter(self.open)), now)
        self._book(flight, self._fleet.standings[best.endpoint], now)
        self._journal.count("decisions", "local" if best.local else "forward")
        return decision

    def booked(self, ticket: int) -> Standing | None:
        """Return where an attempt under way is booked, None if there is none."""
        flight = self.open.get(ticket)
        return flight.booked if flight is not None else None

    def first_token(self, ticket: int, now: float) -> None:
        """Release a request's booked work: its prefill is done."""
        flight = self.open.get(ticket) or self._kept.get(ticket)
        standing = self._fleet.known(flight.weighed.endpoint) if flight is not None else None
        if flight is None or standing is None or flight.heard:
            return
        self._answers.heard(flight, standing, True, now)
        self._release(flight, standing, now)
        if standing.local:
            self._fleet.rank(standing, now)
        else:
            self._fleet.refresh(standing, now)

    def report(
        self, ticket: int, outcome: Outcome, now: float, endpoint: str | None = None, served_by: str | None = None
    ) -> str | None:
        """Take an attempt's outcome; return the endpoint to try next, or None."""
        flight, kind = self.open.get(ticket), outcome.kind
        if flight is None:
            flight = self._kept.get(ticket)
        if flight is None or (endpoint is not None and endpoint != flight.weighed.endpoint):
            self._journal.count("outcomes", "late")
            return None
        if self._kept and ticket in self._kept:
            del self._kept[ticket]
            self._kept_tokens -= flight.chain.n_tokens
            if kind is _SERVED or kind is _CANCELLED:
                self._late(flight, kind is _SERVED and served_by in (None, flight.weighed.endpoint), now)
                return None
            self.open[ticket] = flight
        self._journal.count("outcomes", _OUTCOMES[kind])
        if served_by is not None and served_by != flight.weighed.endpoint and not self._moved(flight, served_by, now):
            del self.open[ticket]
            return None
        standing = flight.booked
        if standing is None or standing.away:
            standing = self._fleet.known(flight.weighed.endpoint)
        if standing is not flight.booked and standing is not None and standing.local:
            # Its endpoint was removed and added again meanwhile: the outcome says nothing of the new life.
            self._journal.count("older_life", "outcomes")
            standing = None
        if standing is not None:
            self._landed(flight, standing, now)
            if kind is not _CANCELLED:
                self._judge(flight, standing, outcome, now)
            elif isinstance(standing, PeerStanding):
                self._answers.cancelled(flight, standing, now)
            self._fleet.refresh(standing, now)
        if kind is not _SERVED:
            self._predictions.drop(ticket)
        if kind is _SERVED or kind is _CANCELLED:
            del self.open[ticket]
            return None
        if kind is _DECLINED and not flight.handed_back:
            return self._anew(flight, now)
        return self._next(flight, now)

    def expire(self, now: float) -> None:
        """Give up attempts whose outcome never came. O(attempts)."""
        limit = now - self._bounds.timeout_s
        for ticket in [ticket for ticket, flight in self.open.items() if flight.sent_at < limit]:
            flight = self._give_up(ticket, now)
            self._kept[ticket] = flight
            self._kept_tokens += flight.chain.n_tokens
        # The oldest first, but for those that waited longer: they may stay a little longer too.
        while self._kept:
            ticket, flight = next(iter(self._kept.items()))
            if self._kept_tokens <= KEPT_TOKENS and now - flight.sent_at < self._bounds.timeout_s + KEPT_S:
                break
            del self._kept[ticket]
            self._kept_tokens -= flight.chain.n_tokens

    def _late(self, flight: Flight, answered: bool, now: float) -> None:
        """Take the end of an attempt that was given up: if it was answered, its target is there after all."""
        self._journal.count("outcomes", "late")
        standing = self._fleet.known(flight.weighed.endpoint)
        if answered and standing is not None and not flight.heard:
            self._answers.heard(flight, standing, True, now)
            self._fleet.refresh(standing, now)

    # --- where an attempt goes -----------------------------------------------------------------------------

    def _book(self, flight: Flight, standing: Standing, now: float) -> None:
        """Book the expected work at a target, and let everybody know who has to."""
        ticket, weighed, flight.booked = flight.decision.id, flight.weighed, standing
        flight.queued = bool(standing.ledger.open)
        work_s, until = weighed.overhead_s + weighed.prefill_s, now + self._bounds.timeout_s
        if self._gate is not None and not standing.local:
            self._gate.forwarded(standing.zone)
        self._fleet.book(standing, ticket, work_s, weighed.matched_tokens > 0, now, until)
        self._predictions.sent(ticket, flight.chain, standing, now)
        if standing.local:
            # What is only expected here may not come: it is promised along with the rest.
            self._hooks.begun(ticket, flight.chain, standing, 0 if weighed.predicted else weighed.depth, now)
        elif isinstance(standing, PeerStanding):
            silence = standing.silence
            if silence.late_at == inf:
                silence.late_at = now + standing.slack_s + LATE * weighed.cost_s + LATE_S
            if standing.doubted or now > silence.late_at:
                self._answers.doubt(flight, standing, now)

    def _landed(self, flight: Flight, standing: Standing, now: float) -> None:
        """Take back what was booked for an attempt, which is over."""
        self._release(flight, standing, now)
        if standing.local:
            self._hooks.ended(flight.decision.id, standing)

    def _release(self, flight: Flight, standing: Standing, now: float) -> None:
        """Take back what was booked for an attempt."""
        if self._fleet.release(standing, flight.decision.id, now) and flight.charged >= 0:
            standing.overdue -= 1

    def _moved(self, flight: Flight, served_by: str, now: float) -> bool:
        """Book an attempt at the endpoint to which its caller gave it instead; return whether that is known.

        Of the one that was decided for it says nothing.
        """
        ticket, old, sent_at = flight.decision.id, self._fleet.known(flight.weighed.endpoint), flight.sent_at
        if old is not None:
            self._landed(flight, old, now)
            flight.end_trial()
            if isinstance(old, PeerStanding) and not old.queue.sends:
                old.silence.late_at = inf
            self._fleet.refresh(old, now)
        self._predictions.drop(ticket)
        self._journal.count("elsewhere")
        new = self._fleet.standings.get(served_by)
        if new is None:
            return False
        weighed = flight.decision.candidate(served_by)
        flight.foreseen = weighed is not None
        flight.weighed = weighed or new.weigh(0, flight.chain.n_tokens, self._router.block_tokens, now)
        self._book(flight, new, now)
        flight.sent_at, flight.heard, flight.charged = sent_at, False, -1
        return True

    def _anew(self, flight: Flight, now: float) -> str | None:
        """Decide again for a prompt that its target handed back. The endpoint that gets it now keeps it."""
        flight.handed_back = True
        declined = flight.weighed.endpoint
        offered = -1 if flight.offer is None else self._fleet.mask(flight.offer)
        try:
            flight.decision, best = self._router.decide(flight.decision.id, flight.chain, False, now, offered, declined)
        except UsageError:
            # Nobody is left to decide between: those there were have gone, or to where nothing may follow.
            return self._next(flight, now)
        if best.endpoint != declined:
            # Where there is nobody else it gets the prompt back.
            flight.tried += (declined,)
        flight.left = flight.decision.fallbacks
        return self._go(flight, self._fleet.standings[best.endpoint], best, now)

    def _next(self, flight: Flight, now: float) -> str | None:
        """Send the request on to the next that may serve it, in the order of rule 2."""
        fleet = self._fleet
        flight.tried += (flight.weighed.endpoint,)
        left = [fleet.standings[name] for name in flight.left if name in fleet.standings]
        if self._gate is not None:
            # One may have begun anew in another zone meanwhile.
            left = [standing for standing in left if standing.needs_s < inf]
        standing = next((s for s in left if s.bit & fleet.usable), None) or self._last(flight)
        if standing is None:
            del self.open[flight.decision.id]
            self._journal.count("exhausted")
            return None
        flight.left = tuple([name for name in flight.left if name != standing.name and name not in flight.tried])
        weighed = flight.decision.candidate(standing.name)
        flight.foreseen = weighed is not None
        self._journal.count("fallbacks")
        return self._go(flight, standing, weighed or self._router.weigh(flight.chain, standing, now), now)

    def _last(self, flight: Flight) -> Standing | None:
        """Return who is tried when no fallback is usable: this node's own, else who is most likely to be there.

        Behind a rule for zones come last those that have to save something. O(endpoints).
        """
        fleet, tried, offer = self._fleet, flight.tried, flight.offer
        others = [
            s
            for s in fleet.standings.values()
            if s.name not in tried
            and s.needs_s < inf
            and (s.local or flight.decision.reason != FORWARDED)
            and (offer is None or s.name in offer)
        ]
        return min(others, key=lambda s: (not s.local, s.needs_s, *fleet.doubts(s), s.rank or ()), default=None)

    def _go(self, flight: Flight, standing: Standing, weighed: Candidate, now: float) -> str:
        """Let an attempt begin at another endpoint."""
        flight.weighed, flight.sent_at, flight.heard = weighed, now, False
        flight.charged, flight.excess_s = -1, 0.0
        self._book(flight, standing, now)
        return standing.name

    def _give_up(self, ticket: int, now: float) -> Flight:
        """Give up an attempt whose outcome never came, and return it."""
        flight = self.open.pop(ticket)
        standing = self._fleet.known(flight.weighed.endpoint)
        if standing is not None:
            if not flight.heard and now - flight.sent_at > self._bounds.timeout_s:
                self._answers.silent(flight, standing, f"no outcome within {self._bounds.timeout_s:.1f} s", now)
            self._landed(flight, standing, now)
            self._fleet.refresh(standing, now)
        flight.end_trial()
        self._journal.count("outcomes", "missing")
        return flight

    # --- what an outcome says of its target ----------------------------------------------------------------

    def _judge(self, flight: Flight, standing: Standing, outcome: Outcome, now: float) -> None:
        """Learn from an outcome: is the target there, did it hold what was predicted and answer in time, is it busy."""
        kind, load = outcome.kind, None
        if kind in _FAILURES:
            flight.end_trial()
            self._answers.suspend(flight, standing, outcome.reason or kind.value, now)
        elif not flight.heard:
            self._answers.heard(flight, standing, kind is _SERVED, now)
        if kind is _SERVED or kind is _DECLINED:
            if flight.foreseen and outcome.read_cache:
                self._compare_hit(flight, standing, outcome.cached_tokens, now)
            if kind is _SERVED:
                self._judge_answer(flight, standing, outcome, now)
        if not standing.local and isinstance(standing, PeerStanding):
            load = outcome.load
            if load is not None:
                # No older than gossip that came before it: of that the way is not subtracted.
                standing.reply = (load, max(now - standing.rtt_s / 2, standing.copy.load_at))
            if kind is _SERVED:
                standing.lateness.declines = 0
            elif kind is _DECLINED:
                # To hand back what it could serve is no answer.
                if not standing.lateness.declines:
                    self._answers.resume(flight, standing)
                self._judge_decline(flight, standing, outcome.cached_tokens, now)
        if kind is _REFUSED or (load is not None and load.refusing):
            standing.refused_until = now + self._bounds.refusal_s
            standing.refusal = outcome.reason or (load.reason if load is not None else "")

    def _judge_answer(self, flight: Flight, standing: Standing, outcome: Outcome, now: float) -> None:
        """Count what an answer tells of its cached tokens, and whether it was in time, but for the work it had."""
        cached, weighed = outcome.counted_tokens, flight.weighed
        self._predictions.served(flight.decision.id)
        if cached is not None and flight.foreseen:
            self._journal.count("predicted_tokens", n=weighed.matched_tokens)
            self._journal.count("cached_tokens", n=cached)
            block = self._router.block_tokens
            unit = standing.hit_unit or block
            if weighed.depth:
                held = min(weighed.depth * block, weighed.prompt_tokens - 1)
                standing.reuse.note(held, cached, standing.copy.advert.hit_unit or block, now)
            standing.accuracy = standing.accuracy.and_one(weighed.matched_tokens, cached, unit)
            if outcome.ttft_s is not None and isinstance(standing, PeerStanding):
                told_s = weighed.rtt_s + weighed.wait_s - flight.excess_s + weighed.overhead_s
                work_s = (weighed.prompt_tokens - cached) * weighed.s_per_token
                standing.lateness.surprised(outcome.ttft_s, told_s + work_s, now)
        self._hooks.served(flight, standing, outcome, now)

    def _compare_hit(self, flight: Flight, standing: Standing, cached: int | None, now: float) -> None:
        """Hold what was predicted against the engine's own count; misses lower the trust in this endpoint's digest."""
        weighed = flight.weighed
        predicted = weighed.matched_tokens
        if cached is None:
            return
        if not weighed.predicted:
            if cached >= predicted + self._router.block_tokens:
                # More than its digest told: what was sent there does come true.
                standing.refuted = 0
            if predicted and not standing.exact:
                standing.compared(min(1.0, cached / predicted), now)
        elif predicted:
            standing.refuted = standing.refuted + 1 if cached < MISSED * predicted else 0
            if cached < predicted:
                # The digest has told nothing wrong: it was the prompt before this one that left less than expected.
                self._predictions.refute(flight.chain, standing)

    def _judge_decline(self, flight: Flight, standing: PeerStanding, held_tokens: int | None, now: float) -> None:
        """Charge an endpoint that declines although, by what it tells of itself, it would have been in time."""
        weighed, budget_s, lateness = flight.weighed, flight.decision.budget_s, standing.lateness
        standing.refresh(now)
        uncached = weighed.prompt_tokens - (weighed.matched_tokens if held_tokens is None else held_tokens)
        told_s = standing.queue.reported_s + standing.overhead_s + uncached / standing.rate
        if told_s < budget_s < inf:
            lateness.surprised(budget_s, told_s, now)
            lateness.declines += 1
            if lateness.declines > MAX_DECLINES:
                self._answers.suspend(flight, standing, "it declines what it would serve in time by its own word", now)
