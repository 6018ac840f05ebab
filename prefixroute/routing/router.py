"""Deciding where a prompt goes: index, fleet and policy put together. What follows a decision is in `flights`.

1. who may be chosen            masks of the fleet: usable, overloaded, behind a rule for zones
2. who holds how much           the index, and prompts that were sent a moment ago (`predictions`): all local endpoints,
                                the cheapest holders of the deepest prefixes, the cheapest of the others: a handful
3. what each would take         a `Candidate` each
4. rules for zones              set apart what saves too little
5. the policy                   candidates in order, a reason, a budget
6. the decision                 target, fallbacks, gain, and all that was weighed

Rules:
1. Push-back is relative: it is honoured while there is somebody who does not push back. This node's own endpoints stay
   candidates: how long they are busy is known here, and counts.
2. Rules for zones (`zones`) come before the policy, so that each policy obeys them.
3. A caller may offer some endpoints only: nobody else is a candidate then, or a fallback.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import inf

from ..errors import NoEndpointError
from ..keys.chain import TokenChain
from ..policy.entry import Entry
from ..policy.interface import Candidate, Policy, Request, Withheld
from .decision import FORWARDED, Decision, decided
from .fleet import Fleet
from .index import DEEPEST, MergedIndex
from .predictions import Predictions
from .standing import Standing
from .zones import Gate

MAX_FALLBACKS = 3
"""Peers that a decision names to fall back on, and endpoints behind a rule for zones."""

MAX_LOCAL = 64
"""Local endpoints weighed: more ranks than one node serves."""

_NOBODY: tuple[Candidate, ...] = ()


class Router:
    """Decides. It books nothing and remembers nothing of a prompt, but reads what `Flights` writes."""

    def __init__(self, policy: Policy, index: MergedIndex, fleet: Fleet, block_tokens: int, rng: random.Random) -> None:
        self.index = index
        self.fleet = fleet
        self.block_tokens = block_tokens
        self.predictions = Predictions()
        self._policy = policy
        self._keeps_local = bool(getattr(policy, "keeps_local", False))
        self._rng = rng

    def decide(
        self, ticket: int, chain: TokenChain, forwarded: bool, now: float, offered: int = -1, without: str = ""
    ) -> tuple[Decision, Candidate]:
        """Weigh all but `without` and let the policy choose; return the decision and what its target was weighed at.

        What was `forwarded` here is served here. `offered` is the mask of those to choose from. Raises
        `NoEndpointError` when nobody can be chosen.
        """
        candidates, reserve, eligible = self._weigh(chain, forwarded, now, offered)
        if without:
            others = [c for c in candidates if c.endpoint != without]
            candidates, reserve = (others, reserve) if others else (reserve or candidates, [])
        gate, withheld = (None if forwarded else self.fleet.gate), _NOBODY
        if gate is not None:
            candidates, withheld = self._sift(candidates, gate)
        entry = None
        if not forwarded and self.fleet.local:
            entry = self.fleet.entry
            if not without:
                self._enters(chain, candidates, entry, now)
        order, reason, budget_s = self._policy.choose(
            tuple.__new__(Request, (chain, now, entry)), candidates, self._rng
        )
        best = order[0]
        if entry is not None and not best.local and not best.depth:
            entry.strayed(chain, self.fleet.standings[best.endpoint].bit, now)
        candidates += reserve
        fallbacks, origin_s = _others((*order[1:], *reserve) if reserve else order[1:], withheld)
        if origin_s == inf and not best.local and len(fallbacks) < MAX_FALLBACKS:
            fallbacks += self._more(order, fallbacks, offered, without)
        zone, excluded = "", _NOBODY
        if gate is not None:
            candidates += withheld
            zone, excluded = gate.zone, self._excluded(chain, candidates, gate, now)
            # One of those that a rule passed over would have been quicker than the best that it let in.
            if any(c.withheld.saves_s > 0 for c in (*withheld, *excluded) if c.withheld is not None):
                reason += ", by the rules for zones"
        if forwarded:
            reason = FORWARDED
        url, weighed = self.fleet.standings[best.endpoint].copy.url, tuple(candidates)
        masks = (eligible, offered)
        return decided(ticket, best, url, fallbacks, origin_s, reason, weighed, budget_s, zone, excluded, masks), best

    def weigh(self, chain: TokenChain, standing: Standing, now: float) -> Candidate:
        """Weigh one endpoint."""
        depth = self.index.depth(chain, standing.bit)
        return standing.weigh(depth, chain.n_tokens, self.block_tokens, now)

    def _enters(self, chain: TokenChain, candidates: Sequence[Candidate], entry: Entry, now: float) -> None:
        """Note what a prompt tells of what enters here."""
        work_s = min([c.overhead_s + c.prefill_s for c in candidates if c.local], default=inf)
        if work_s < inf:
            fleet = self.fleet
            holders = self.index.first_holders(chain) & ~fleet.local
            entry.arrived(chain, holders, fleet.heard, work_s / fleet.local.bit_count(), now)

    def _weigh(
        self, chain: TokenChain, forwarded: bool, now: float, offered: int
    ) -> tuple[list[Candidate], list[Candidate], int]:
        """Return the candidates, the local endpoints kept in reserve because they push back, and the eligible ones."""
        fleet, block, n_tokens = self.fleet, self.block_tokens, chain.n_tokens
        guarded = 0 if forwarded else fleet.guarded
        ours = fleet.local & offered
        eligible = ours if forwarded else self._eligible(guarded, offered)
        looked_at = eligible | ours
        # Far endpoints must not be looked at instead of near ones: they may come to nothing.
        depths: dict[Standing, int] = {}
        self._find(chain, looked_at & ~guarded, depths)
        if guarded:
            self._find(chain, looked_at & guarded, depths)
        predicted = 0
        for standing, depth in self.predictions.match(chain, now, depths, self.index.sparse):
            # An endpoint that left is still in the predictions, and its bit may be another's by now.
            here = fleet.standings.get(standing.name) is standing
            if here and standing.bit & looked_at and depth > depths.get(standing, 0):
                depths[standing] = depth
                predicted |= standing.bit
        candidates: list[Candidate] = []
        reserve: list[Candidate] = []
        for standing, depth in depths.items():
            bit = standing.bit
            weighed = standing.weigh(depth, n_tokens, block, now, bit & predicted != 0)
            (candidates if bit & eligible else reserve).append(weighed)
        if candidates or reserve:
            return (candidates, reserve, eligible) if candidates else (reserve, [], looked_at)
        if forwarded:
            own = "this node has no endpoint of its own" + (" that was offered" if fleet.local else "")
            raise NoEndpointError(f"a forwarded request is served where it arrives, and {own}")
        return self._last_resort(chain, now, offered)

    def _eligible(self, guarded: int, offered: int) -> int:
        """Return the mask of who may be chosen; `guarded` are those behind a saving."""
        fleet = self.fleet
        usable, ours = fleet.usable & offered, fleet.local & offered
        if not guarded and not self._keeps_local:
            free = usable & ~fleet.overloaded
            return free | usable & ours if free else usable
        free = usable & ~fleet.overloaded
        # An endpoint that has to save something is compared with the others, busy or not: that they are busy is no
        # reason to leave them alone.
        near = usable & ~guarded
        eligible = free & near | near & ours if free & near else near
        eligible |= (free or usable) & guarded
        return eligible | ours if self._keeps_local else eligible

    def _find(self, chain: TokenChain, within: int, depths: dict[Standing, int]) -> None:
        """Add who is worth a look among the endpoints `within`, and how many blocks of the prompt each holds."""
        fleet, index = self.fleet, self.index
        ours = fleet.local
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
            for standing in (*fleet.cheapest(unseen & ~ours, 1), *fleet.cheapest(unseen & ours, MAX_LOCAL)):
                depths[standing] = index.depth(chain, standing.bit) if more else 0

    def _last_resort(self, chain: TokenChain, now: float, offered: int) -> tuple[list[Candidate], list[Candidate], int]:
        """A gateway whose peers are all suspended or unheard still tries those least in doubt. O(endpoints)."""
        fleet = self.fleet
        standings = [standing for standing in fleet.standings.values() if standing.bit & offered]
        if not standings:
            if fleet.standings:
                raise NoEndpointError(
                    "none of the endpoints that were offered is known: offer others, or let gossip run"
                )
            raise NoEndpointError("no endpoint is known: add_endpoint, or add_peer and let gossip run first")
        allowed = [standing for standing in standings if standing.needs_s < inf]
        if not allowed:
            zone = fleet.gate.zone if fleet.gate is not None else ""
            raise NoEndpointError(f"the rules of zone {zone!r} forbid forwards to every endpoint that is known")
        least = min(map(fleet.doubts, allowed))
        mask = sum(standing.bit for standing in allowed if fleet.doubts(standing) == least)
        depths: dict[Standing, int] = {}
        self._find(chain, mask, depths)
        return [s.weigh(depth, chain.n_tokens, self.block_tokens, now) for s, depth in depths.items()], [], mask

    def _sift(self, candidates: list[Candidate], gate: Gate) -> tuple[list[Candidate], tuple[Candidate, ...]]:
        """Return those to choose from, and by cost those that save too little against the best that need not save."""
        guarded, standings = self.fleet.guarded, self.fleet.standings
        if not guarded:
            return candidates, _NOBODY
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
        withheld.sort(key=lambda c: c.cost_s)
        return kept, tuple(withheld)

    def _more(
        self, weighed: Sequence[Candidate], fallbacks: tuple[str, ...], offered: int, without: str
    ) -> tuple[str, ...]:
        """Return fallbacks for a gateway, which has none of its own: who was not weighed, busy ones too."""
        fleet = self.fleet
        others = fleet.usable & offered & ~fleet.guarded
        for name in (without, *[c.endpoint for c in weighed]):
            if name in fleet.standings:
                others &= ~fleet.standings[name].bit
        return tuple([standing.name for standing in fleet.cheapest(others, MAX_FALLBACKS - len(fallbacks))])

    def _excluded(
        self, chain: TokenChain, candidates: list[Candidate], gate: Gate, now: float
    ) -> tuple[Candidate, ...]:
        """Return the endpoint to which nothing may go, if it holds more of the prompt than any candidate does."""
        barred = self.fleet.barred
        if not barred:
            return _NOBODY
        for depth, mask in self.index.search(chain, 1, barred):
            if depth > max([c.depth for c in candidates]):
                standing = self.fleet.cheapest(mask & barred, 1)[0]
                c = standing.weigh(depth, chain.n_tokens, self.block_tokens, now)
                saves_s = min([other.cost_s for other in candidates if other.withheld is None]) - c.cost_s
                if saves_s > 0:
                    gate.withheld("never", c.zone)
                return (c._replace(withheld=Withheld(inf, saves_s)),)
        return _NOBODY


def _others(others: Iterable[Candidate], withheld: Sequence[Candidate]) -> tuple[tuple[str, ...], float]:
    """Return the fallbacks, and the least cost of a local one of them; infinite if there is none.

    First come the next of the peers, then this node's own, then those behind a rule for zones.
    """
    remote: list[str] = []
    local: list[str] = []
    origin_s = inf
    for c in others:
        if c.local:
            local.append(c.endpoint)
            if c.cost_s < origin_s:
                origin_s = c.cost_s
        else:
            remote.append(c.endpoint)
    if withheld:
        local += [c.endpoint for c in withheld[:MAX_FALLBACKS]]
    return (*remote[:MAX_FALLBACKS], *local), origin_s
