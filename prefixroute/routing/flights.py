"""Following decisions up: each attempt is booked at its target, judged by its outcome, and passed on where it failed.

| outcome | learnt of the target | the request |
|---|---|---|
| served | that it is there, its hit, its lateness, its load | is done |
| declined: over the budget | that it is there, its hit, its load, what it could have served | is decided anew, once |
| refused | that it refuses for a while | goes to the next fallback |
| failed, timed out | that forwards to it fail: it is suspended | goes to the next fallback |
| cancelled | nothing | is done |
| none in time | nothing | is given up |

Rules:
1. The expected work is booked at the target with the decision, and released by the first token, the outcome or time.
2. Local execution is the last fallback.
3. Late, repeated and missing reports are harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ..errors import UsageError
from ..events import Journal, PeerChanged
from ..keys.chain import TokenChain
from ..keys.names import owner_of
from ..policy.interface import Candidate
from .decision import Decision, Outcome, OutcomeKind
from .router import Router
from .standing import PeerStanding, Standing
from .trust import MAX_DECLINES

_FAILURES = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT)
_OUTCOMES = {kind: kind.value.replace(" ", "_") for kind in OutcomeKind}


class FlightBounds(NamedTuple):
    """How long an outcome is waited for, how long a refusal counts, both in seconds, and how many attempts are kept."""

    timeout_s: float
    refusal_s: float
    most: int


@dataclass(slots=True)
class Flight:
    """An attempt under way: what the endpoint that has the request was `weighed` at, and who is `left` to try."""

    decision: Decision
    chain: TokenChain
    weighed: Candidate
    left: list[str]
    sent_at: float
    queued: bool = False
    """Whether it had to queue behind others of this node's."""
    booked: Standing | None = None
    """Where: another life of an endpoint has another standing."""
    handed_back: bool = False
    """Such a prompt stays where it goes next; an endpoint that declines it all the same is passed over."""


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

    def __init__(self, router: Router, bounds: FlightBounds, hooks: Hooks, journal: Journal) -> None:
        self.open: dict[int, Flight] = {}
        """By decision, the oldest first. To be read only."""
        self._router = router
        self._fleet = router.fleet
        self._gate = router.fleet.gate
        self._predictions = router.predictions
        self._bounds = bounds
        self._hooks = hooks
        self._journal = journal
        self._tickets = 0

    def route(self, chain: TokenChain, forwarded: bool, now: float, budget_s: float = inf) -> Decision:
        """Decide who serves `chain`, and book the work there. Raises `UsageError` when no endpoint is known."""
        self._tickets += 1
        decision, best = self._router.decide(self._tickets, chain, forwarded, now)
        if chain.fault:
            raise UsageError(chain.fault)
        chain.fault = ""
        if forwarded and best.cost_s > budget_s:
            self._journal.count("decisions", "declined")
            reason = f"declined: longer here than the budget of {1000 * budget_s:.0f} ms"
            return decision._replace(declined=True, reason=reason)
        flight = Flight(decision, chain, best, list(decision.fallbacks), now)
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
        flight = self.open.get(ticket)
        standing = self._fleet.standings.get(flight.weighed.endpoint) if flight is not None else None
        if standing is not None and self._fleet.release(standing, ticket, now):
            self._fleet.rank(standing, now)

    def report(self, ticket: int, outcome: Outcome, now: float, endpoint: str | None = None) -> str | None:
        """Take an attempt's outcome; return the endpoint to try next, or None."""
        flight = self.open.get(ticket)
        if flight is None or (endpoint is not None and endpoint != flight.weighed.endpoint):
            self._journal.count("outcomes", "late")
            return None
        self._journal.count("outcomes", _OUTCOMES[outcome.kind])
        standing = self._fleet.standings.get(flight.weighed.endpoint)
        if standing is not flight.booked and standing is not None and standing.local:
            # Its endpoint was removed and added again meanwhile: the outcome says nothing of the new life.
            self._journal.count("older_life", "outcomes")
            standing = None
        if standing is not None:
            self._fleet.release(standing, ticket, now)
            if standing.local:
                self._hooks.ended(ticket, standing)
            self._judge(flight, standing, outcome, now)
            self._fleet.refresh(standing, now)
        if outcome.kind is not OutcomeKind.SERVED:
            self._predictions.drop(ticket)
        if outcome.kind in (OutcomeKind.SERVED, OutcomeKind.CANCELLED):
            del self.open[ticket]
            return None
        if outcome.kind is OutcomeKind.DECLINED and not flight.handed_back:
            return self._anew(flight, now)
        return self._next(flight, now)

    def expire(self, now: float) -> None:
        """Give up attempts whose outcome never came. O(attempts)."""
        limit = now - self._bounds.timeout_s
        for ticket in [ticket for ticket, flight in self.open.items() if flight.sent_at < limit]:
            self._give_up(ticket, now)

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
        if standing.suspension.failures:
            # This is the one trial: the endpoint is out again until it ends.
            standing.suspension.sent(now)
            self._fleet.refresh_sharing(standing, now)

    def _anew(self, flight: Flight, now: float) -> str | None:
        """Decide again for a prompt that its target handed back. The endpoint that gets it now keeps it."""
        flight.handed_back = True
        try:
            flight.decision, best = self._router.decide(
                flight.decision.id, flight.chain, False, now, flight.weighed.endpoint
            )
        except UsageError:
            # Nobody is left to decide between: those there were have gone, or to where nothing may follow.
            return self._next(flight, now)
        flight.weighed, flight.left, flight.sent_at = best, list(flight.decision.fallbacks), now
        self._book(flight, self._fleet.standings[best.endpoint], now)
        return best.endpoint

    def _next(self, flight: Flight, now: float) -> str | None:
        """Send the request on to the next fallback that is usable; else to a local one; else to the first one left."""
        left = [self._fleet.standings[name] for name in flight.left if name in self._fleet.standings]
        if self._gate is not None:
            # One may have begun anew in another zone meanwhile.
            left = [standing for standing in left if standing.needs_s < inf]
        if not left:
            del self.open[flight.decision.id]
            self._journal.count("exhausted")
            return None
        usable = (standing for standing in left if standing.bit & self._fleet.usable)
        locals_ = (standing for standing in left if standing.local)
        standing = next(usable, None) or next(locals_, left[0])
        at = left.index(standing)
        # A local one comes before those that save too little; passed by while it refuses, it is the last one again.
        passed = [] if standing.local else [other for other in left[:at] if other.local]
        flight.left = [other.name for other in (*left[at + 1 :], *passed)]
        weighed = flight.decision.candidate(standing.name)
        assert weighed is not None, "a fallback is one of the candidates"
        flight.weighed, flight.sent_at = weighed, now
        self._book(flight, standing, now)
        self._journal.count("fallbacks")
        return standing.name

    def _give_up(self, ticket: int, now: float) -> None:
        """Forget an attempt whose outcome never came."""
        self.first_token(ticket, now)
        standing = self._fleet.standings.get(self.open.pop(ticket).weighed.endpoint)
        if standing is not None and standing.local:
            self._hooks.ended(ticket, standing)
        self._journal.count("outcomes", "missing")

    # --- what an outcome says of its target ----------------------------------------------------------------

    def _judge(self, flight: Flight, standing: Standing, outcome: Outcome, now: float) -> None:
        """Learn from an outcome: is the target there, did it hold what was predicted and answer in time, is it busy."""
        kind, load = outcome.kind, None
        if kind in _FAILURES:
            self._suspend(flight, standing, outcome.reason or kind.value, now)
        elif kind is OutcomeKind.SERVED or kind is OutcomeKind.DECLINED:
            self._resume(standing, kind)
            self._compare_hit(flight, standing, outcome.cached_tokens, now)
            if kind is OutcomeKind.SERVED:
                self._judge_answer(flight, standing, outcome, now)
        if isinstance(standing, PeerStanding):
            load = outcome.load
            if load is not None:
                standing.reply = (load, now - standing.rtt_s / 2)
            if kind is OutcomeKind.DECLINED:
                self._judge_decline(flight, standing, outcome.cached_tokens, now)
        if kind is OutcomeKind.REFUSED or (load is not None and load.refusing):
            standing.refused_until = now + self._bounds.refusal_s
            standing.refusal = outcome.reason or (load.reason if load is not None else "")

    def _resume(self, standing: Standing, kind: OutcomeKind) -> None:
        """End a suspension: the target answers. To hand back what it could serve is no answer."""
        if isinstance(standing, PeerStanding):
            if kind is OutcomeKind.SERVED:
                standing.lateness.declines = 0
            elif standing.lateness.declines:
                return
        if self._fleet.served(standing):
            self._journal.tell(PeerChanged(owner_of(standing.name), "resumed", standing.name))

    def _suspend(self, flight: Flight, standing: Standing, reason: str, now: float) -> None:
        """Suspend a peer's endpoint, if the failure is news; this node's own endpoints never are suspended."""
        if not standing.local and standing.suspension.failed(flight.sent_at, now):
            self._fleet.refresh_sharing(standing, now)
            self._journal.tell(PeerChanged(owner_of(standing.name), "suspended", reason))

    def _judge_answer(self, flight: Flight, standing: Standing, outcome: Outcome, now: float) -> None:
        """Count what an answer tells of its cached tokens, and whether it was in time, but for the work it had."""
        cached, weighed = outcome.cached_tokens, flight.weighed
        self._predictions.served(flight.decision.id)
        if cached is not None:
            self._journal.count("predicted_tokens", n=weighed.matched_tokens)
            self._journal.count("cached_tokens", n=cached)
            unit = standing.hit_unit or self._router.block_tokens
            standing.accuracy = standing.accuracy.and_one(weighed.matched_tokens, cached, unit)
            if outcome.ttft_s is not None and isinstance(standing, PeerStanding):
                lateness = standing.lateness
                told_s = weighed.rtt_s + weighed.wait_s - lateness.excess_s(flight.sent_at) + weighed.overhead_s
                work_s = (weighed.prompt_tokens - cached) * weighed.s_per_token
                lateness.surprised(outcome.ttft_s, told_s + work_s, now)
        self._hooks.served(flight, standing, outcome, now)

    def _compare_hit(self, flight: Flight, standing: Standing, cached_tokens: int | None, now: float) -> None:
        """Hold what was predicted against the engine's own count; misses lower the trust in this endpoint's digest."""
        predicted = flight.weighed.matched_tokens
        if cached_tokens is None:
            return
        if not flight.weighed.predicted:
            if predicted:
                standing.compared(min(1.0, cached_tokens / predicted), now)
        elif cached_tokens < predicted:
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
                self._suspend(flight, standing, "it declines what it would serve in time by its own word", now)
