"""Deciding where prompts go, and following each decision to its outcome.

Rules:
1. A decision is a look at the index, at a handful of standings, and one call of the policy.
2. The expected work is booked at the target with the decision, and released by the first token, the outcome or time.
3. A failed attempt goes to the next fallback; local execution is the last one.
4. A target that finds itself slower than the decision's budget hands the prompt back, once; it is decided anew.
5. Late, repeated and missing reports are harmless.
6. Rules for zones (`zones`) come before the policy, so that each policy obeys them: where nothing may go there is no
   candidate, no fallback and no last resort; what would have to save more than it does waits behind all others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ..errors import UsageError
from ..events import Journal, PeerChanged
from ..keys.chain import TokenChain
from ..policy.interface import Candidate, Policy, Request, Withheld
from .decision import Decision, Outcome, OutcomeKind
from .fleet import Fleet
from .index import DEEPEST, MergedIndex
from .predictions import Predictions
from .standing import Standing
from .trust import MAX_DECLINES
from .zones import Gate

MAX_FALLBACKS = 3
MAX_LOCAL = 64
"""Local endpoints weighed: more ranks than one node serves."""

_COST = attrgetter("cost_s")
_NOBODY: tuple[Candidate, ...] = ()
_FAILURES = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT)
_OUTCOMES = {kind: kind.value.replace(" ", "_") for kind in OutcomeKind}


@dataclass(slots=True)
class Flight:
    """An attempt under way: who has the request, who is left to try, and whether it had to queue behind others.

    What was handed back once stays where it goes next; whoever declines it all the same is passed over.
    """

    decision: Decision
    chain: TokenChain
    target: str
    left: list[str]
    sent_at: float
    queued: bool = False
    handed_back: bool = False


class Hooks(NamedTuple):
    """What the owner of the local endpoints is told.

    `served(flight, standing, outcome, now)`: a request was served, here or elsewhere. `begun(ticket, chain, standing,
    depth, now)`: a local endpoint, which holds `depth` blocks of it, is to serve one. `ended(ticket, standing)`: that
    attempt is over.
    """

    served: Callable[[Flight, Standing, Outcome, float], None]
    begun: Callable[[int, TokenChain, Standing, int, float], None]
    ended: Callable[[int, Standing], None]


class Router:
    """Index, fleet and policy put together."""

    def __init__(
        self,
        policy: Policy,
        block_tokens: int,
        timeout_s: float,
        refusal_s: float,
        max_flights: int,
        rng: random.Random,
        journal: Journal,
        hooks: Hooks,
        gate: Gate | None = None,
    ) -> None:
        self.policy = policy
        self._keeps_local = bool(getattr(policy, "keeps_local", False))
        self.index = MergedIndex()
        self.fleet = Fleet(rng, gate)
        self.flights: dict[int, Flight] = {}
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._refusal_s = refusal_s
        self._max_flights = max_flights
        self._rng = rng
        self._journal = journal
        self._hooks = hooks
        self._gate = gate
        self._predictions = Predictions()
        self._tickets = 0

    def route(self, chain: TokenChain, forwarded: bool, now: float, budget_s: float = inf) -> Decision:
        """Decide who serves `chain`, and book the work there. Raises `UsageError` when no endpoint is known."""
        self._tickets += 1
        decision, best = self._decide(self._tickets, chain, forwarded, now)
        if forwarded and best.cost_s > budget_s:
            self._journal.count("decisions", "declined")
            reason = f"declined: longer here than the budget of {1000 * budget_s:.0f} ms"
            return decision._replace(declined=True, reason=reason)
        flight = Flight(decision, chain, best.endpoint, list(decision.fallbacks), now)
        self.flights[decision.id] = flight
        if len(self.flights) > self._max_flights:
            self._give_up(next(iter(self.flights)), now)
        self._book(flight, self.fleet.standings[best.endpoint], best, now)
        self._journal.count("decisions", "local" if best.local else "forward")
        return decision

    def _decide(
        self, ticket: int, chain: TokenChain, forwarded: bool, now: float, without: str = ""
    ) -> tuple[Decision, Candidate]:
        """Weigh all but `without` and let the policy choose."""
        candidates, reserve = self._candidates(chain, forwarded, now)
        if without:
            others = [c for c in candidates if c.endpoint != without]
            candidates, reserve = (others, reserve) if others else (reserve or candidates, [])
        gate = self._gate
        if gate is not None and not forwarded:
            candidates, withheld = self._sift(candidates, gate)
        # All named tuples of this path are made so: without the call that checks their fields' names.
        request = tuple.__new__(Request, (chain, now))
        order, reason, budget_s = self.policy.choose(request, candidates, self._rng)
        best = order[0]
        candidates += reserve
        origin_s = inf
        for c in candidates:
            if c.local and c.cost_s < origin_s:
                origin_s = c.cost_s
        remote: list[str] = []
        local: list[str] = []
        for c in (*order[1:], *reserve) if reserve else order[1:]:
            (local if c.local else remote).append(c.endpoint)
        zone, excluded = "", _NOBODY
        if gate is not None and not forwarded:
            candidates += withheld
            local += [c.endpoint for c in withheld[:MAX_FALLBACKS]]
            zone, excluded = gate.zone, self._excluded(chain, candidates, gate, now)
            if _quicker(withheld) or _quicker(excluded):
                reason += ", by the rules for zones"
        decision = tuple.__new__(
            Decision,
            (
                ticket,
                best.endpoint,
                best.local,
                self.fleet.standings[best.endpoint].copy.url,
                (*remote[:MAX_FALLBACKS], *local),
                chain.n_tokens,
                best.matched_tokens,
                best.cost_s,
                origin_s - best.cost_s if best.cost_s < origin_s < inf else 0.0,
                "forwarded here" if forwarded else reason,
                tuple(candidates),
                inf if best.local else budget_s,
                False,
                zone,
                excluded,
            ),
        )
        return decision, best

    def first_token(self, ticket: int, now: float) -> None:
        """Release a request's booked work: its prefill is done."""
        flight = self.flights.get(ticket)
        if flight is not None:
            self._release(flight, now)

    def report(self, ticket: int, outcome: Outcome, now: float, endpoint: str | None = None) -> str | None:
        """Take an attempt's outcome; return the endpoint to try next, or None."""
        flight = self.flights.get(ticket)
        if flight is None or (endpoint is not None and endpoint != flight.target):
            self._journal.count("outcomes", "late")
            return None
        self._journal.count("outcomes", _OUTCOMES[outcome.kind])
        standing = self.fleet.standings.get(flight.target)
        if standing is not None:
            self.fleet.release(standing, ticket, now)
            if standing.local:
                self._hooks.ended(ticket, standing)
            self._judge(flight, standing, outcome, now)
            self.fleet.refresh(standing, now)
        if outcome.kind is not OutcomeKind.SERVED:
            self._predictions.drop(ticket)
        if outcome.kind in (OutcomeKind.SERVED, OutcomeKind.CANCELLED):
            del self.flights[ticket]
            return None
        if outcome.kind is OutcomeKind.DECLINED and not flight.handed_back:
            return self._anew(flight, now)
        return self._next(flight, now)

    def expire(self, now: float) -> None:
        """Give up attempts whose outcome never came."""
        limit = now - self._timeout_s
        for ticket in [ticket for ticket, flight in self.flights.items() if flight.sent_at < limit]:
            self._give_up(ticket, now)

    # --- deciding ------------------------------------------------------------------------------------------

    def _candidates(self, chain: TokenChain, forwarded: bool, now: float) -> tuple[list[Candidate], list[Candidate]]:
        """Weigh whom to choose from, and the local endpoints kept in reserve because they push back.

        Looked at are all local endpoints, the cheapest holders of the deepest prefixes and the cheapest of the others:
        a handful, however many there are.
        """
        fleet, index, block, n = self.fleet, self.index, self._block_tokens, chain.n_tokens
        # Push-back is relative: it is honoured while somebody who does not push back exists. This node's own endpoints
        # stay: how long they are busy is known here, and counts.
        usable, ours, guarded = fleet.usable, fleet.local, 0 if forwarded else fleet.guarded
        free = usable & ~fleet.overloaded
        eligible = ours if forwarded else (free | usable & ours if free else usable)
        if guarded:
            # Who has to save something is compared with the others, busy or not: it is no reason to leave them alone.
            near = usable & ~guarded
            eligible = free & ~guarded | near & ours if free & ~guarded else near
            eligible |= (free if free else usable) & guarded
        if self._keeps_local:
            eligible |= ours
        looked_at = eligible | ours
        depths: dict[Standing, int] = {}
        # Far ones must not be looked at instead of near ones: they may come to nothing.
        for within in (looked_at & ~guarded, looked_at & guarded) if guarded else (looked_at,):
            strata = index.search(chain, DEEPEST, within)
            unseen, most = within, 2
            for depth, mask in strata:
                unseen &= ~mask
                if mask & ours:
                    for standing in fleet.cheapest(mask & ours, MAX_LOCAL):
                        depths[standing] = depth
                    mask &= ~ours
                if mask:
                    for standing in fleet.cheapest(mask, most):
                        depths[standing] = depth
                most = 1
            if unseen:
                # Beyond the strata that were asked for, an endpoint may still hold a shorter prefix.
                more = len(strata) == DEEPEST
                for standing in fleet.cheapest(unseen & ~ours, 1):
                    depths[standing] = index.depth(chain, standing.bit) if more else 0
                for standing in fleet.cheapest(unseen & ours, MAX_LOCAL):
                    depths[standing] = index.depth(chain, standing.bit) if more else 0
        predicted = 0
        for standing, depth in self._predictions.match(chain, now, depths, index.sparse):
            # An endpoint that left is still in the predictions, and its bit may be another's by now.
            here = fleet.standings.get(standing.name) is standing
            if here and standing.bit & looked_at and depth > depths.get(standing, 0):
                depths[standing] = depth
                predicted |= standing.bit
        chosen_from: list[Candidate] = []
        reserve: list[Candidate] = []
        for standing, depth in depths.items():
            bit = standing.bit
            weighed = standing.weigh(depth, n, block, now, bool(bit & predicted))
            (chosen_from if bit & eligible else reserve).append(weighed)
        if not chosen_from:
            chosen_from, reserve = reserve, []
        if not chosen_from and forwarded:
            raise UsageError("a forwarded request is served where it arrives, and this node has no endpoint of its own")
        return chosen_from or self._last_resort(n, block, now), reserve

    def _last_resort(self, n_tokens: int, block: int, now: float) -> list[Candidate]:
        """A gateway whose peers are all suspended or unheard still tries them: one may be back."""
        standings = self.fleet.standings.values()
        if not standings:
            raise UsageError("no endpoint is known: add_endpoint, or add_peer and let gossip run first")
        allowed = [standing.weigh(0, n_tokens, block, now) for standing in standings if standing.needs_s < inf]
        if not allowed and self._gate is not None:
            raise UsageError(f"the rules of zone {self._gate.zone!r} forbid forwards to every endpoint that is known")
        return allowed

    def _sift(self, candidates: list[Candidate], gate: Gate) -> tuple[list[Candidate], list[Candidate]]:
        """Return those to choose from, and by cost those that save too little against the best that need not save."""
        guarded, standings = self.fleet.guarded, self.fleet.standings
        if not guarded:
            return candidates, []
        best_s = inf
        for c in candidates:
            if c.cost_s < best_s and not standings[c.endpoint].bit & guarded:
                best_s = c.cost_s
        kept: list[Candidate] = []
        withheld: list[Candidate] = []
        for c in candidates:
            needs_s, saves_s = standings[c.endpoint].needs_s, best_s - c.cost_s
            if saves_s >= needs_s or not needs_s:
                kept.append(c)
                continue
            withheld.append(c._replace(withheld=Withheld(needs_s, saves_s)))
            if saves_s > 0:
                gate.withheld("above", c.zone)
        withheld.sort(key=_COST)
        return kept, withheld

    def _excluded(
        self, chain: TokenChain, candidates: list[Candidate], gate: Gate, now: float
    ) -> tuple[Candidate, ...]:
        """The endpoint to which nothing may go, if it holds more of the prompt than any candidate does."""
        barred = self.fleet.barred
        if not barred:
            return ()
        for depth, mask in self.index.search(chain, 1, barred):
            if depth > max([c.depth for c in candidates]):
                standing = self.fleet.cheapest(mask & barred, 1)[0]
                c = standing.weigh(depth, chain.n_tokens, self._block_tokens, now)
                saves_s = min([other.cost_s for other in candidates if other.withheld is None]) - c.cost_s
                if saves_s > 0:
                    gate.withheld("never", c.zone)
                return (c._replace(withheld=Withheld(inf, saves_s)),)
        return ()

    # --- following up --------------------------------------------------------------------------------------

    def _book(self, flight: Flight, standing: Standing, candidate: Candidate, now: float) -> None:
        flight.queued = len(standing.ledger) > 0
        tokens = candidate.prompt_tokens - candidate.matched_tokens
        work_s = candidate.overhead_s + candidate.prefill_s
        hit, until = candidate.matched_tokens > 0, now + self._timeout_s
        if self._gate is not None and not standing.local:
            self._gate.forwarded(standing.zone)
        self.fleet.book(standing, flight.decision.id, work_s, tokens, hit, now, until)
        self._predictions.sent(flight.decision.id, flight.chain, standing, now)
        if standing.local:
            # What is only expected here may not come: it is promised along with the rest.
            held = 0 if candidate.predicted else candidate.depth
            self._hooks.begun(flight.decision.id, flight.chain, standing, held, now)
        if standing.suspension.failures:
            # This is the one trial: the endpoint is out again until it ends.
            standing.suspension.sent(now)
            self.fleet.refresh_sharing(standing, now)

    def _release(self, flight: Flight, now: float) -> None:
        standing = self.fleet.standings.get(flight.target)
        if standing is not None and self.fleet.release(standing, flight.decision.id, now):
            self.fleet.rank(standing, now)

    def _anew(self, flight: Flight, now: float) -> str | None:
        """Decide again for a prompt that its target handed back. Whoever gets it now keeps it."""
        flight.handed_back = True
        try:
            flight.decision, best = self._decide(flight.decision.id, flight.chain, False, now, flight.target)
        except UsageError:
            # Nobody is left to decide between: those there were have gone, or to where nothing may follow.
            return self._next(flight, now)
        flight.target, flight.left, flight.sent_at = best.endpoint, list(flight.decision.fallbacks), now
        self._book(flight, self.fleet.standings[best.endpoint], best, now)
        return best.endpoint

    def _next(self, flight: Flight, now: float) -> str | None:
        """Send the request on to the next fallback that is usable; else to a local one; else to whoever is left."""
        left = [self.fleet.standings[name] for name in flight.left if name in self.fleet.standings]
        if self._gate is not None:
            # One may have begun anew in another zone meanwhile.
            left = [standing for standing in left if standing.needs_s < inf]
        if not left:
            del self.flights[flight.decision.id]
            self._journal.count("exhausted")
            return None
        usable = (standing for standing in left if standing.bit & self.fleet.usable)
        locals_ = (standing for standing in left if standing.local)
        standing = next(usable, None) or next(locals_, left[0])
        at = left.index(standing)
        # A local one comes before those that save too little; passed by while it refuses, it is the last one again.
        passed = [] if standing.local else [other for other in left[:at] if other.local]
        flight.left = [other.name for other in (*left[at + 1 :], *passed)]
        flight.target, flight.sent_at = standing.name, now
        self._book(flight, standing, self._candidate(flight, standing), now)
        self._journal.count("fallbacks")
        return standing.name

    @staticmethod
    def _candidate(flight: Flight, standing: Standing) -> Candidate:
        return next(c for c in flight.decision.candidates if c.endpoint == standing.name)

    def _judge(self, flight: Flight, standing: Standing, outcome: Outcome, now: float) -> None:
        """Learn from an outcome: liveness, push-back, and whether the predicted hit was there."""
        peer = standing.name.partition("/")[0]
        if outcome.kind is OutcomeKind.SERVED:
            standing.lateness.declines = 0
        # A prompt that is handed back shows that an endpoint is there, unless it hands back what it could serve.
        answers = outcome.kind is OutcomeKind.SERVED or (
            outcome.kind is OutcomeKind.DECLINED and not standing.lateness.declines
        )
        if answers and self.fleet.served(standing):
            self._journal.tell(PeerChanged(peer, "resumed", standing.name))
        if outcome.kind is OutcomeKind.DECLINED:
            self._compare_hit(flight, standing, outcome.cached_tokens, now)
        elif outcome.kind is OutcomeKind.SERVED:
            self._predictions.served(flight.decision.id)
            self._compare_hit(flight, standing, outcome.cached_tokens, now)
            if outcome.cached_tokens is not None:
                predicted, unit = self._candidate(flight, standing).matched_tokens, standing.hit_unit
                self._journal.count("predicted_tokens", n=predicted)
                self._journal.count("cached_tokens", n=outcome.cached_tokens)
                standing.accuracy = standing.accuracy.and_one(
                    predicted, outcome.cached_tokens, unit or self._block_tokens
                )
            if not standing.local and outcome.ttft_s is not None and outcome.cached_tokens is not None:
                c = self._candidate(flight, standing)
                work_s = (c.prompt_tokens - outcome.cached_tokens) * c.s_per_token
                told_s = c.rtt_s + c.wait_s - standing.excess_s(flight.sent_at) + c.overhead_s + work_s
                standing.surprised(outcome.ttft_s, told_s, now)
            self._hooks.served(flight, standing, outcome, now)
        elif outcome.kind in _FAILURES and not standing.local and standing.suspension.failed(flight.sent_at, now):
            self.fleet.refresh_sharing(standing, now)
            self._journal.tell(PeerChanged(peer, "suspended", outcome.reason or outcome.kind.value))
        load = outcome.load if not standing.local else None
        if load is not None:
            # It was true when the reply was sent.
            standing.reply = (load, now - standing.rtt_s / 2)
        if outcome.kind is OutcomeKind.DECLINED:
            self._judge_decline(flight, standing, outcome.cached_tokens, now)
        if outcome.kind is OutcomeKind.REFUSED or (load is not None and load.refusing):
            standing.refused_until = now + self._refusal_s
            standing.refusal = outcome.reason or (load.reason if load is not None else "")

    def _judge_decline(self, flight: Flight, standing: Standing, held_tokens: int | None, now: float) -> None:
        """Charge an endpoint that declines although, by what it tells of itself, it would have been in time."""
        candidate, budget_s = self._candidate(flight, standing), flight.decision.budget_s
        standing.refresh(now)
        held = candidate.matched_tokens if held_tokens is None else held_tokens
        told_s = standing.told_s(candidate.prompt_tokens - held)
        if not standing.local and told_s < budget_s < inf:
            standing.surprised(budget_s, told_s, now)
            standing.lateness.declines += 1
            if standing.lateness.declines > MAX_DECLINES and standing.suspension.failed(flight.sent_at, now):
                self.fleet.refresh_sharing(standing, now)
                reason = "it declines what it would serve in time by its own word"
                self._journal.tell(PeerChanged(standing.name.partition("/")[0], "suspended", reason))

    def _compare_hit(self, flight: Flight, standing: Standing, cached_tokens: int | None, now: float) -> None:
        """Hold what was predicted against the engine's own count; misses lower the trust in this endpoint's digest."""
        if cached_tokens is None:
            return
        candidate = self._candidate(flight, standing)
        predicted = candidate.matched_tokens
        if candidate.predicted:
            if cached_tokens < predicted:
                # The digest has told nothing wrong: it was the prompt before this one that left less than expected.
                self._predictions.refute(flight.chain, standing)
        elif predicted:
            share = min(1.0, cached_tokens / predicted)
            standing.trust += standing.misses.weight(share, now) * (share - standing.trust)

    def _give_up(self, ticket: int, now: float) -> None:
        flight = self.flights.pop(ticket)
        self._release(flight, now)
        standing = self.fleet.standings.get(flight.target)
        if standing is not None and standing.local:
            self._hooks.ended(ticket, standing)
        self._journal.count("outcomes", "missing")


def _quicker(passed_over: Sequence[Candidate]) -> bool:
    """Whether one of those that a rule passed over would have been quicker than the best that it let in."""
    return any(c.withheld.saves_s > 0 for c in passed_over if c.withheld is not None)
