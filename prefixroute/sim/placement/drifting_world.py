"""The online planner in a world that changes: congestion comes and goes, servers slow down, leave and join, load jumps.

Rules:
1. The world knows the true times; the planner sees only noisy measurements of requests that have ended.
2. Requests start in the order in which slots really become free, whatever the planner expected.
3. A request that loses a server begins anew; its time still counts from its first arrival.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from prefixroute.plan import Booking, Hop, OnlinePlanner, OnlineSettings, Problem, Span

from ..clock import Agenda
from .sessions import Ask, Done

TICK_S = 1.0
LOAD_S_PER_BLOCK = 2.0
NOISE = 0.05
PING_S = 10.0
GIVE_UP_S = 3600.0


class WorldChange(NamedTuple):
    """A change of the world: at `at_s` the round trips or block times of servers are multiplied, or servers leave.

    "congest" multiplies round trips between every client and these servers, "slow" multiplies their block times; a
    factor of 1.0 ends either.
    """

    at_s: float
    kind: Literal["congest", "slow", "leave"]
    servers: tuple[int, ...]
    factor: float = 1.0


class WorldStory(NamedTuple):
    """The served requests, in the order of arrival, and what the planner did."""

    done: list[tuple[Ask, Done]]
    unserved: int
    restarts: int
    moves: list[tuple[float, int, int]]
    """(seconds at which it began, server, blocks loaded) of each move."""
    gaps_s: float
    """Seconds in which some block was on no serving server."""
    decided_s: list[float]
    """Moments, in seconds, at which servers were told to drain, or to load at once."""


class _Session(NamedTuple):
    ask: Ask
    booking: Booking


class ChangingWorld:
    """One run. With `adapt=False` placement and costs stay as at the beginning; routing still sees the bookings."""

    def __init__(
        self,
        problem: Problem,
        requests_per_s: float,
        asks: Sequence[Ask],
        changes: Sequence[WorldChange],
        seed: int,
        adapt: bool = True,
        settings: OnlineSettings | None = None,
        spans: Sequence[Span | None] | None = None,
    ) -> None:
        self.planner = OnlinePlanner(problem, requests_per_s, 0.0, settings, spans)
        self._truth = problem
        self._rtt = np.ones(problem.servers)
        self._speed = np.ones(problem.servers)
        self._gone: set[int] = set()
        self._adapt = adapt
        self._rng = random.Random(seed)
        self._agenda = Agenda(0.0)
        self._restarts = 0
        self._gaps_s = 0.0
        self._waiting: list[_Session] = []
        self._running: dict[int, _Session] = {}
        self._ends_as: dict[int, Done] = {}
        self._used = [0] * problem.servers
        self._story = WorldStory([], 0, 0, [], 0.0, [])
        for ask in asks:
            self._agenda.plan(ask.at_s, self._ask, ask)
        for change in changes:
            self._agenda.plan(change.at_s, self._change, change)
        self._left = len(asks)
        self._last_s = max([*(ask.at_s for ask in asks), *(change.at_s for change in changes)], default=0.0)
        self._agenda.plan(TICK_S, self._tick, None)

    def run(self) -> WorldStory:
        """Run until every request is served, or is given up because no server will ever serve it."""
        unserved = 0
        while self._left:
            if self._agenda.next_at() > self._last_s + GIVE_UP_S:
                unserved = self._left
                break
            self._agenda.step()
            self._start(self._agenda.now)
        done = sorted(self._story.done, key=lambda pair: pair[0])
        return self._story._replace(done=done, unserved=unserved, restarts=self._restarts, gaps_s=self._gaps_s)

    def _ask(self, ask: Ask, now: float) -> None:
        self._route(ask, now, again=False)

    def _ask_again(self, ask: Ask, now: float) -> None:
        self._route(ask, now, again=True)

    def _route(self, ask: Ask, now: float, again: bool) -> None:
        routed = self.planner.route(ask.client, now, again)
        if routed is None:
            self._agenda.plan(now + TICK_S, self._ask_again, ask)
            return
        self._waiting.append(_Session(ask, routed.booking))

    def _start(self, now: float) -> None:
        """Start every waiting request that finds slots on its whole chain, the oldest first."""
        slots = self._truth.slots(self.planner.spans)
        still = []
        for session in self._waiting:
            hops = session.booking.hops
            if any(self._used[hop.server] + hop.blocks > slots[hop.server] for hop in hops):
                still.append(session)
                continue
            for hop in hops:
                self._used[hop.server] += hop.blocks
            first_s, whole_s = self._times(session.ask.client, hops)
            self._running[session.booking.session] = session
            waited = now - session.ask.at_s
            self._agenda.plan(now + whole_s, self._end, session.booking.session)
            self._ends_as[session.booking.session] = Done(waited, waited + first_s, waited + whole_s)
        self._waiting = still

    def _times(self, client: int, hops: Sequence[Hop]) -> tuple[float, float]:
        truth, further = self._truth, self._truth.output_tokens - 1
        first = whole = truth.setup_ms
        for server, blocks in hops:
            extra = float(truth.rtt_ms[client, server]) * (float(self._rtt[server]) - 1)
            prompt = float(truth.prompt_rtt_ms[client, server]) + extra
            token = float(truth.rtt_ms[client, server]) + extra
            slow = float(self._speed[server])
            first += prompt + slow * float(truth.prefill_ms[server]) * blocks
            whole += prompt + slow * float(truth.prefill_ms[server]) * blocks
            whole += further * (token + slow * float(truth.decode_ms[server]) * blocks)
        return first / 1000, whole / 1000

    def _end(self, number: int, now: float) -> None:
        session = self._running.pop(number, None)
        if session is None:
            return
        self._story.done.append((session.ask, self._ends_as.pop(number)))
        self._left -= 1
        self.planner.finished(session.booking)
        for server, blocks in session.booking.hops:
            self._used[server] -= blocks
            if self._adapt:
                rtt = float(self._truth.rtt_ms[session.ask.client, server]) * float(self._rtt[server])
                work = float(self._truth.decode_ms[server]) * float(self._speed[server])
                self.planner.observe_link(session.ask.client, server, rtt * self._noise(), now)
                self.planner.observe_server(server, work * self._noise(), now)

    def _noise(self) -> float:
        return math.exp(self._rng.gauss(0.0, NOISE))

    def _change(self, change: WorldChange, now: float) -> None:
        if change.kind == "congest":
            self._rtt[list(change.servers)] = change.factor
        elif change.kind == "slow":
            self._speed[list(change.servers)] = change.factor
        else:
            lost = {booking.session for server in change.servers for booking in self.planner.leave(server, now)}
            self._gone |= set(change.servers)
            again = [session for number, session in self._running.items() if number in lost]
            for session in again:
                del self._running[session.booking.session]
                for server, blocks in session.booking.hops:
                    self._used[server] -= blocks
            waiting = [session for session in self._waiting if session.booking.session in lost]
            self._waiting = [session for session in self._waiting if session.booking.session not in lost]
            for session in (*again, *waiting):
                self._agenda.plan(now, self._ask_again, session.ask)
            self._restarts += len(again)

    def _loaded(self, server: int, now: float) -> None:
        if server not in self._gone:
            self.planner.moved(server)

    def _tick(self, _: None, now: float) -> None:
        self._gaps_s += TICK_S * self._has_gap()
        if self._adapt:
            self._adapt_to_what_was_seen(now)
        self._agenda.plan(now + TICK_S, self._tick, None)

    def _adapt_to_what_was_seen(self, now: float) -> None:
        if now % PING_S < TICK_S:
            self._ping(now)
        before = self.planner.moving
        moves = self.planner.tick(now)
        if self.planner.moving - before:
            self._story.decided_s.append(now)
        for move in moves:
            self._story.moves.append((now, move.server, move.loaded_blocks))
            self._agenda.plan(now + LOAD_S_PER_BLOCK * move.loaded_blocks, self._loaded, move.server)
        moving = self.planner.moving
        displaced = [s for s in self._waiting if any(hop.server in moving for hop in s.booking.hops)]
        for session in displaced:
            self._waiting.remove(session)
            self.planner.finished(session.booking)
        for session in displaced:
            self._route(session.ask, now, again=True)

    def _ping(self, now: float) -> None:
        """Measure every link, used or not; without that a link once congested would never be tried again."""
        for client in range(self._truth.clients):
            for server in range(self._truth.servers):
                if server not in self._gone:
                    rtt = float(self._truth.rtt_ms[client, server]) * float(self._rtt[server])
                    self.planner.observe_link(client, server, rtt * self._noise(), now)

    def _has_gap(self) -> bool:
        held = np.zeros(self._truth.blocks, bool)
        for span in self.planner.serving():
            if span is not None:
                held[span.first - 1 : span.end - 1] = True
        return not held.all()
