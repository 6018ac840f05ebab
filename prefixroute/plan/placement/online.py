"""The online planner: it routes requests as they come, and slowly changes the placement when load or fleet change.

Rules:
1. There are two time scales. Each request is routed by the present bookings. The placement is reviewed when the rate
   has changed beyond chance, when servers come or go, and every `review_s` if speeds or round trips have changed; it
   changes only for a sufficient gain, or because the load does not fit.
2. Placements change by moves of few blocks at a time, and no move leaves a block without a server: see migration.py.
3. Delays, bandwidths and speeds are measured: averages over a minute for routes, over ten minutes for the placement. So
   routes avoid congestion at once, and only lasting changes move blocks.
4. The planner holds no clock and moves nothing: `tick` returns moves, the caller carries them out and reports them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from prefixroute.errors import UsageError

from .chains import Chain, Links, assign
from .design_load import at_rate, share_out
from .estimates import LEAST_MS, Fading, LinkEstimate, LinkFit, RateWatch
from .migration import Move, deal_alike, next_movers
from .problem import Floats, Problem, Span, with_requests
from .slots import Booking, Ledger
from .spans import Adaptive, adaptive


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """How quickly the planner learns, and when it moves blocks."""

    review_s: float = 60.0
    """Seconds between two reviews of the placement, if there were measurements in between."""
    retry_s: float = 5.0
    """Seconds between reviews in the first `review_s` after a change of the rate, whose estimate still improves."""
    least_gain: float = 0.05
    """Share of a token's time, 0 to 1, that a new placement must save to be worth its moves."""
    headroom: float = 0.05
    """Share of a token's time that room for more sessions may cost at the present load. Within that cost the placement
    is made for twice the load, four times the load and so on, so that a jump of the load needs no move."""
    blocks_per_step: int = 16
    """Blocks that may be loading at once over all servers; a server with a larger span moves alone."""
    horizon_s: float = 600.0
    """Seconds that a load is expected to last when a placement that cannot keep up is compared with another; also the
    time over which measurements are averaged for the placement."""
    fade_s: float = 60.0
    """Seconds over which measurements are averaged for routes."""
    known_within: float = 0.05
    """Share by which an estimate may differ from the prices in use before routes are priced anew."""
    token_bytes: float = 0.0
    """Bytes that a step carries for a decoded token; with 0 all measured time of a link counts as delay."""
    prompt_bytes: float = 0.0
    """Bytes that a step carries for a prompt."""

    def __post_init__(self) -> None:
        if min(self.review_s, self.retry_s, self.fade_s) <= 0 or self.blocks_per_step < 1:
            raise UsageError("review_s, retry_s and fade_s are above 0, and blocks_per_step is 1 or more")
        if not 0 <= self.least_gain < 1 or self.headroom < 0:
            raise UsageError("least_gain is from 0 to 1, and headroom 0 or more")


class Routed(NamedTuple):
    """A request's chain, its expected wait for slots in seconds, and its booking, which `finished` takes at the end."""

    chain: Chain
    wait_s: float
    booking: Booking


class _Judged(NamedTuple):
    """A request's seconds with and without queues, and the requests a second that all slots together carry."""

    whole_s: float
    served_s: float
    per_s: float


class OnlinePlanner:
    """Routes requests over a placement that follows load and fleet. Routing is O(links); a review takes one plan."""

    def __init__(
        self,
        problem: Problem,
        requests_per_s: float,
        now: float,
        settings: OnlineSettings | None = None,
        spans: Sequence[Span | None] | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        self.settings = settings or OnlineSettings()
        self._shares = list(shares) if shares is not None else [1.0] * problem.clients
        self.problem = at_rate(problem, requests_per_s, self._shares)
        plan = self._roomy(self.problem, adaptive(self.problem), {}) if spans is None else None
        self.spans: list[Span | None] = list(plan.placement.spans if plan else spans or ())
        """The span of each server, as far as the caller has said."""
        self._order = plan.placement.order if plan else ()
        self._rate = RateWatch(requests_per_s, now)
        self._links_ms = [[self._link(c, j, now) for j in range(problem.servers)] for c in range(problem.clients)]
        self._decode = [Fading(now, float(ms), self.settings.fade_s) for ms in problem.decode_ms]
        slowly = self.settings.horizon_s
        self._usual_rtt = [[Fading(now, float(ms) or LEAST_MS, slowly) for ms in row] for row in problem.rtt_ms]
        self._usual_decode = [Fading(now, float(ms), slowly) for ms in problem.decode_ms]
        self._pending: dict[int, Move] = {}
        self._moving: dict[int, Move] = {}
        self._loading: set[int] = set()
        self._reviewed_at = self._doubtful_until = now
        self._fixed: set[int] = set()
        self._learnt = self._urgent = False
        self.ledger = Ledger([0] * problem.servers)
        self.reviews = self.stuck = 0
        """How often the placement was reviewed, and how often moves were given up because each would open a gap."""
        self._serve()

    # --- requests ------------------------------------------------------------------------------------------

    def route(self, client: int, now: float, again: bool = False) -> Routed | None:
        """Choose and book a chain; None while no chain of serving servers holds every block and has any slots.

        Pass `again` for a request that was routed before, so that it does not count as another arrival.
        """
        if not again:
            self._rate.arrived(now)
        ledger = self.ledger
        chain = self._links.shortest(
            self._links.request_ms(client), ledger.free, lambda server, slots: 1000 * ledger.wait_s(server, slots, now)
        )
        if chain is None:
            return None
        wait_s = max(ledger.wait_s(hop.server, hop.blocks, now) for hop in chain.hops)
        work_ms = self.problem.setup_ms + self._links.cost(chain.hops, self._links.request_ms(client))
        end_s = now + wait_s + work_ms / 1000
        return Routed(chain, wait_s, ledger.book(chain.hops, now + wait_s, end_s))

    def finished(self, booking: Booking) -> None:
        """Give back the slots of a request that ended, in whatever way."""
        self.ledger.release(booking)

    # --- what is learnt ------------------------------------------------------------------------------------

    def observe_link(self, client: int, server: int, ms: float, now: float, payload_bytes: float | None = None) -> None:
        """Learn the milliseconds that one step between client and server took; the payload defaults to a token's."""
        payload = self.settings.token_bytes if payload_bytes is None else payload_bytes
        self._links_ms[client][server].observe(payload, ms, now)
        fit = self._links_ms[client][server].fit
        self._usual_rtt[client][server].observe(fit.ms(self.settings.token_bytes), now)
        self._notice(fit.ms(self.settings.token_bytes), float(self.problem.rtt_ms[client, server]))

    def observe_server(self, server: int, decode_ms: float, now: float) -> None:
        """Learn the milliseconds that one token took in one block on a server."""
        self._decode[server].observe(decode_ms, now)
        self._usual_decode[server].observe(decode_ms, now)
        self._notice(self._decode[server].value, float(self.problem.decode_ms[server]))

    def _notice(self, found: float, known: float) -> None:
        self._learnt = self._learnt or abs(found - known) > self.settings.known_within * known

    # --- the fleet -----------------------------------------------------------------------------------------

    def join(self, memory_bytes: float, decode_ms: float, rtt_ms: Sequence[float], now: float) -> int:
        """Take in a new server without blocks; return its number. The next `tick` decides which blocks it holds.

        Raises `UsageError` for values out of range, and in fleets whose servers pass tokens on to each other.
        """
        problem = self.problem
        if problem.hop_ms is not None:
            raise UsageError("servers that pass on to each other need a new planner when one joins")
        if len(rtt_ms) != problem.clients:
            raise UsageError(f"rtt_ms needs a number for each of {problem.clients} clients")
        column = np.array(rtt_ms, np.float64)[:, None]
        ratio = float((problem.prefill_ms / problem.decode_ms).mean())
        extra = float((problem.prompt_rtt_ms - problem.rtt_ms).mean())
        self.problem = _with(
            problem,
            memory_bytes=np.append(problem.memory_bytes, memory_bytes),
            decode_ms=np.append(problem.decode_ms, decode_ms),
            prefill_ms=np.append(problem.prefill_ms, decode_ms * ratio),
            rtt_ms=np.hstack([problem.rtt_ms, column]),
            prompt_rtt_ms=np.hstack([problem.prompt_rtt_ms, np.maximum(column + extra, 0.0)]),
            most_blocks=(*problem.most_blocks, problem.blocks),
        )
        server = self.ledger.add_server()
        self.spans.append(None)
        for c, row in enumerate(self._links_ms):
            row.append(self._link(c, server, now))
            self._usual_rtt[c].append(Fading(now, float(rtt_ms[c]) or LEAST_MS, self.settings.horizon_s))
        self._decode.append(Fading(now, decode_ms, self.settings.fade_s))
        self._usual_decode.append(Fading(now, decode_ms, self.settings.horizon_s))
        self._urgent = True
        self._serve()
        return server

    def leave(self, server: int, now: float) -> list[Booking]:
        """Take out a server that is gone; return the bookings that ran through it, whose slots are free again."""
        memory = self.problem.memory_bytes.copy()
        memory[server] = 0.0
        self.problem = _with(self.problem, memory_bytes=memory)
        self.spans[server] = None
        # Servers that only drain for a move go on serving, since the fleet has less to spare now.
        self._pending.clear()
        self._moving = {j: move for j, move in self._moving.items() if j in self._loading and j != server}
        self._loading.discard(server)
        lost = [b for b in self.ledger.bookings() if any(hop.server == server for hop in b.hops)]
        for booking in lost:
            self.ledger.release(booking)
        self._urgent = True
        self._serve()
        return lost

    # --- the slow loop -------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Move]:
        """Look at what changed, and return the moves to begin now. Call it every second or so."""
        rate = self._rate.changed(now)
        # A migration under way is finished first: new measurements would only send servers back and forth.
        due = now - self._reviewed_at >= self.settings.review_s and self._learnt and self.settled
        if self._learnt:
            self._reprice()
        # A falling load is not urgent, and does not interrupt a migration under way.
        rising = rate is not None and (rate > self._rate.planned_per_s or self.settled)
        if rate is not None:
            self._rate.plan_for(rate, now)
        if rate is not None:
            self._doubtful_until = now + self.settings.review_s
        elif now < self._doubtful_until and self.settled and now - self._reviewed_at >= self.settings.retry_s:
            # The estimate from few arrivals may be higher than any placement carries, or lower than the true rate.
            self._rate.planned_per_s = self._rate.refined(now)
            rising = True
        if rising or due or self._urgent:
            self._review(now)
        return self._begin()

    def moved(self, server: int) -> None:
        """Note that a server has loaded the span of its move."""
        move = self._moving.pop(server, None)
        if move is None:
            raise UsageError(f"server {server} was not told to move")
        self._loading.discard(server)
        self.spans[server] = move.new
        self._serve()

    def serving(self) -> list[Span | None]:
        """Return the spans that requests can use: those of servers that do not move."""
        return [None if j in self._moving else span for j, span in enumerate(self.spans)]

    @property
    def moving(self) -> frozenset[int]:
        """Servers that drain or load. The caller should release requests that wait for one, and route them again."""
        return frozenset(self._moving)

    @property
    def settled(self) -> bool:
        """Whether no server is moving or about to move."""
        return not self._pending and not self._moving

    def _review(self, now: float) -> None:
        self.reviews += 1
        self._reviewed_at, self._urgent = now, False
        self._reprice()
        routing = self.problem
        rtt = np.array([[each.value for each in row] for row in self._usual_rtt])
        self.problem = _priced(routing, rtt, np.array([each.value for each in self._usual_decode]))
        try:
            self._pending = self._wanted()
        except UsageError:
            # The remaining servers cannot hold the model: they keep their blocks until others join.
            self._pending = {}
        self.problem = with_requests(routing, self.problem.requests)

    def _wanted(self) -> dict[int, Move]:
        """The moves to a better placement, in order; none if it is not worth them."""
        plan = self._plan()
        current = [self._moving[j].new if j in self._moving else span for j, span in enumerate(self.spans)]
        dealt = self._near(current, plan)
        if not self._pays(current, dealt):
            return {}
        self._order = plan.placement.order
        rank = {j: at for at, j in enumerate(self._order)}
        moves = [Move(j, old, new) for j, (old, new) in enumerate(zip(current, dealt, strict=True)) if old != new]
        moves.sort(key=lambda move: (move.old is not None, rank.get(move.server, len(rank)), move.server))
        return {move.server: move for move in moves if move.server not in self._moving}

    def _pays(self, current: Sequence[Span | None], target: Sequence[Span | None]) -> bool:
        """Return whether a placement gains more than `least_gain`, and more than the moves cost the requests served.

        Servers drain for about a request's time, half of them at once, so that others wait half that time longer. If
        the target cannot keep up with the load either, moving would only make the queue longer.
        """
        now, then = self._judge(current), self._judge(target)
        if not now.per_s:
            return True
        if then.per_s < self._rate.planned_per_s:
            return False
        return then.whole_s < min(now.whole_s * (1 - self.settings.least_gain), now.whole_s - now.served_s / 2)

    def _slots(self, spans: Sequence[Span | None]) -> list[int]:
        return [max(each, 0) for each in self.problem.slots(spans)]

    def _near(self, current: Sequence[Span | None], plan: Adaptive) -> list[Span | None]:
        """Return the plan's spans, exchanged among alike servers, also of different places if that costs little."""
        problem = self.problem
        loose = deal_alike(problem, current, plan.placement.spans, any_place=True)
        strict = deal_alike(problem, current, plan.placement.spans)
        worth = 1 + self.settings.least_gain / 2
        return loose if self._judge(loose).whole_s <= self._judge(strict).whole_s * worth else strict

    def _plan(self) -> Adaptive:
        """Return the placement on which a request takes the least time at the present rate."""
        fixed = {j: span for j, span in enumerate(self.spans) if j in self._fixed and span is not None}
        self.problem = problem = at_rate(self.problem, self._rate.planned_per_s, self._shares)
        plan = adaptive(problem, fixed=fixed)
        plans = [plan, self._roomy(problem, plan, fixed)]
        return min(plans, key=lambda each: self._judge(each.placement.spans).whole_s)

    def _judge(self, spans: Sequence[Span | None]) -> _Judged:
        """Judge spans at the present rate; queues count over the horizon."""
        problem = self.problem
        links, slots = Links(problem, spans), self._slots(spans)
        crowd = max(problem.most_requests(), problem.concurrent)
        full = assign(with_requests(problem, share_out(crowd, self._shares)), links, slots, partly=True)
        usual = assign(problem, links, slots, partly=True)
        if not full or not usual or not full.chains or not usual.chains:
            return _Judged(math.inf, math.inf, 0.0)
        per_s = full.flow * 1000 / problem.output_tokens
        queue = max(self._rate.planned_per_s - per_s, 0.0) * self.settings.horizon_s
        served_s = usual.ms_per_token * problem.output_tokens / 1000
        return _Judged(served_s + queue / 2 / per_s, served_s, per_s)

    def _roomy(self, problem: Problem, plan: Adaptive, fixed: Mapping[int, Span]) -> Adaptive:
        """Return a placement for the largest load, by doubling, that costs little more than `plan` at the load now."""
        worth = plan.assignment.ms_per_token * (1 + self.settings.headroom)
        load, most = 2 * problem.concurrent, problem.most_requests()
        while self.settings.headroom and load <= most:
            placement = adaptive(with_requests(problem, share_out(load, self._shares)), fixed=fixed).placement
            found = assign(problem, Links(problem, placement.spans), problem.slots(placement.spans))
            if found is None or found.ms_per_token > worth:
                break
            plan = Adaptive(placement, found)
            load *= 2
        return plan

    def _begin(self) -> list[Move]:
        """Let servers leave service as the bound and coverage allow; return the moves of those that are drained."""
        loading = sum(move.loaded_blocks for move in self._moving.values())
        movers = next_movers(self.problem, self.serving(), self._pending, loading, self.settings.blocks_per_step)
        for j in movers:
            self._moving[j] = self._pending.pop(j)
        if self._pending and not self._moving:
            # Servers whose moves would open a gap stay; the next review, which is due at once, plans around them.
            self.stuck += 1
            self._urgent = not self._fixed
            self._fixed = set(self._pending) if self._urgent else set()
            self._pending = {}
        if movers:
            self._serve()
        begun = []
        for j, move in self._moving.items():
            if j not in self._loading and not self.ledger.sessions(j):
                self._loading.add(j)
                begun.append(move)
        return begun

    # --- costs ---------------------------------------------------------------------------------------------

    def _link(self, client: int, server: int, now: float) -> LinkEstimate:
        """Return a link's estimate, which begins with the plan's assumptions for a token's and a prompt's step."""
        token, prompt = self.settings.token_bytes, self.settings.prompt_bytes
        token_ms = float(self.problem.rtt_ms[client, server])
        prompt_ms = float(self.problem.prompt_rtt_ms[client, server])
        per_byte = max((prompt_ms - token_ms) / (prompt - token), 0.0) if prompt > token else 0.0
        fit = LinkFit(max(token_ms - per_byte * token, 0.0), per_byte)
        return LinkEstimate(now, fit, self.settings.fade_s)

    def _reprice(self) -> None:
        """Take the recent measurements as the costs of the problem."""
        problem, settings = self.problem, self.settings
        fits = [[estimate.fit for estimate in row] for row in self._links_ms]
        rtt = np.array([[fit.ms(settings.token_bytes) for fit in row] for row in fits])
        prompt = None
        if settings.prompt_bytes > settings.token_bytes:
            prompt = np.array([[fit.ms(settings.prompt_bytes) for fit in row] for row in fits])
        decode = np.array([each.value for each in self._decode])
        self.problem = _priced(problem, rtt, decode, prompt)
        self._learnt = False
        self._serve()

    def _serve(self) -> None:
        """Make the links and slots of the servers that serve now."""
        serving = self.serving()
        self._links = Links(self.problem, serving)
        for j, slots in enumerate(self.problem.slots(serving)):
            self.ledger.set_slots(j, max(slots, 0))


def _priced(problem: Problem, rtt_ms: Floats, decode_ms: Floats, prompt_rtt_ms: Floats | None = None) -> Problem:
    """Return the problem at other prices; prices of prompts change in proportion to those of tokens, unless given."""
    if prompt_rtt_ms is None:
        prompt_rtt_ms = np.maximum(problem.prompt_rtt_ms + rtt_ms - problem.rtt_ms, 0.0)
    prefill = problem.prefill_ms * decode_ms / problem.decode_ms
    return _with(problem, rtt_ms=rtt_ms, prompt_rtt_ms=prompt_rtt_ms, decode_ms=decode_ms, prefill_ms=prefill)


def _with(problem: Problem, **changes: Floats | tuple[int, ...]) -> Problem:
    """Return the problem with other arrays, which are made read-only."""
    for value in changes.values():
        if isinstance(value, np.ndarray):
            if not np.isfinite(value).all() or (value < 0).any():
                raise UsageError("memory and times are numbers of 0 or more")
            value.setflags(write=False)
    return replace(problem, **changes)  # type: ignore[arg-type]
