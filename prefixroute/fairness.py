"""One queue in front of an engine, in which tenants take turns: nobody's locality starves another.

A request whose prefix is cached costs its engine little, and a router sends it there for that very reason. So the
tenant with the hot prefix fills the engine's queue, first come first served, and everybody behind it waits.

    enter(ticket, tenant, uncached)   -> GO: hand it to the engine; HELD: a later call returns it; FULL: refuse it
    first_token(ticket), leave(ticket) -> the tickets to hand to the engine now

Rules:
1. Local and forwarded requests enter alike, and are charged the tokens that the engine has to compute: what is cached
   is free, so a tenant gains by its locality and pays for nobody's.
2. The engine is given work while less than a window of charged tokens is there without a first token. So it never idles
   while a request is held, and who waits in front of it waits a window at most; the rest is decided here.
3. The next one is of the tenant that has had least, in tokens by weight; within a tenant, first come first served.
   A tenant that comes back starts level with the others: neither what it used nor what it left counts for ever.
4. No tenant fills the queue: it may hold as many requests as there are places left (dynamic threshold).
5. Every ticket that entered leaves: served, failed, cancelled, held or not.

Rule 3 is deficit round robin with the turns made as short as one request (start-time fair queueing): two tenants that
both wait are never apart by more than a request of each, O(log tenants) a call, and a new tenant's first request is
next, where round robin would have it wait for a quantum of everybody.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from .errors import UsageError

MAX_TENANTS = 1024
"""Tenants told apart; while so many are busy or remembered, the rest share one account."""

OTHER = "other"
"""The account of the rest."""


class Entry(Enum):
    """What becomes of a request that enters."""

    GO = "go"
    HELD = "held"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class FairSettings:
    """Settings of a queue.

    `window_tokens` are given to the engine ahead: the budget of one of its steps keeps it busy. `overhead_tokens` are
    charged beside the uncached ones: a request's fixed time, in tokens. `weights` are shares by tenant, 1 unless told.
    `max_held` bounds the requests that wait here. Raises `UsageError` for what makes no sense.
    """

    window_tokens: int = 8192
    overhead_tokens: int = 16
    weights: Mapping[str, float] = field(default_factory=dict)
    max_held: int = 16384

    def __post_init__(self) -> None:
        if self.window_tokens < 1 or self.overhead_tokens < 1 or self.max_held < 2:
            raise UsageError("a fair queue needs window_tokens >= 1, overhead_tokens >= 1 and max_held >= 2")
        for tenant, weight in self.weights.items():
            if not 0 < weight < inf:
                raise UsageError(f"the weight of {tenant!r} must be above 0, not {weight!r}")


class FairStats(NamedTuple):
    """A tenant's account.

    `held` wait here, `released` went to the engine, charged `tokens` in all; `waited_s` is the sum of their waits here.
    `refused` found the queue full. `deficit_tokens` is what the tenant lacks of its fair share: 0 for who is next,
    below 0 for who had more.
    """

    tenant: str
    held: int
    held_tokens: int
    deficit_tokens: float
    released: int
    tokens: int
    waited_s: float
    refused: int


@dataclass(slots=True, eq=False)
class _Account:
    name: str
    held: OrderedDict[Hashable, _Request] = field(default_factory=OrderedDict)
    held_tokens: int = 0
    open: int = 0
    """Requests that entered and did not leave."""
    finish: float = 0.0
    """Tokens by weight that it has had, on the clock that all accounts share."""
    stamp: int = 0
    released: int = 0
    tokens: int = 0
    waited_s: float = 0.0
    refused: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    ticket: Hashable
    account: _Account
    charge: int
    weight: float
    entered_at: float
    waiting: bool = True
    """Held, or given to the engine and without a first token."""
    released: bool = False


class FairQueue:
    """The queue of one engine. All calls are O(log tenants) amortised; `stats` and `_check` look at everything.

    Its attributes are to be read only.
    """

    def __init__(self, settings: FairSettings | None = None) -> None:
        self.settings = settings or FairSettings()
        self.window_tokens = self.settings.window_tokens
        """The window now."""
        self.held = 0
        """Requests that wait here."""
        self.ahead_tokens = 0
        """Charged tokens that the engine has and that are without a first token."""
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._requests: dict[Hashable, _Request] = {}
        self._turns: list[tuple[float, int, int, _Account]] = []
        """(start, order, stamp, account) of each that holds requests; those with an older stamp are void."""
        self._order = 0
        self._clock = 0.0
        """Where the latest turn began, in tokens by weight."""
        self._last = 0.0
        """The furthest that any account has come."""

    def resize(self, window_tokens: int, now: float) -> list[Hashable]:
        """Set the window, as an engine's speed becomes known; return the tickets to release."""
        if window_tokens < 1:
            raise UsageError("a window has at least one token")
        self.window_tokens = window_tokens
        return self._release(now)

    def enter(self, ticket: Hashable, tenant: str, uncached_tokens: int, now: float) -> Entry:
        """Take a request that is to compute so many tokens. Raises `UsageError` for a ticket that is in already."""
        if ticket in self._requests:
            raise UsageError(f"the ticket {ticket!r} is in the queue already")
        account = self._account(tenant)
        if len(account.held) >= self.settings.max_held - self.held:
            account.refused += 1
            return Entry.FULL
        weight = self.settings.weights.get(account.name, 1.0)
        charge = max(uncached_tokens, 0) + self.settings.overhead_tokens
        request = self._requests[ticket] = _Request(ticket, account, charge, weight, now)
        account.open += 1
        account.held[ticket] = request
        account.held_tokens += charge
        self.held += 1
        if len(account.held) == 1:
            # Level with the others, unless it is ahead of them.
            account.finish = max(account.finish, self._clock)
            self._take_turn(account)
        self._release(now)
        return Entry.GO if request.released else Entry.HELD

    def first_token(self, ticket: Hashable, now: float) -> list[Hashable]:
        """Note that a request's prefill is done; return the tickets to release. An unknown one is harmless."""
        request = self._requests.get(ticket)
        if request is None or not request.released or not request.waiting:
            return []
        request.waiting = False
        self.ahead_tokens -= request.charge
        return self._release(now)

    def leave(self, ticket: Hashable, now: float, uncached_tokens: int | None = None) -> list[Hashable]:
        """Note that a request is over, however it ended; return the tickets to release. An unknown one is harmless.

        `uncached_tokens` is what the engine really computed, by its cached tokens: the tenant is charged the
        difference. Pass 0 for one that came to nothing. What was held is not charged.
        """
        request = self._requests.pop(ticket, None)
        if request is None:
            return []
        account = request.account
        account.open -= 1
        if not request.released:
            del account.held[ticket]
            account.held_tokens -= request.charge
            self.held -= 1
            return self._release(now)
        if request.waiting:
            self.ahead_tokens -= request.charge
        if uncached_tokens is not None:
            # What came to nothing took no fixed time either.
            charge = uncached_tokens and uncached_tokens + self.settings.overhead_tokens
            more = charge - request.charge
            account.tokens += more
            account.finish += more / request.weight
            self._last = max(self._last, account.finish)
            if more and account.held:
                self._take_turn(account)
        return self._release(now)

    def overtaken(self, tenant: str) -> int:
        """Return the tokens held here that would go after a request of this tenant that came now. O(tenants that wait).

        A node's own estimate of the wait counts all that it has booked; so much of it is no wait for this tenant.
        """
        account = self._accounts.get(tenant)
        mine, weight = (account.held_tokens if account else 0), self.settings.weights.get(tenant, 1.0)
        start = max(self._clock, account.finish if account else 0.0) + mine / weight
        after = 0
        for _, _, stamp, other in self._turns:
            if stamp == other.stamp and other.held and other is not account:
                share = (start - other.finish) * self.settings.weights.get(other.name, 1.0)
                after += round(other.held_tokens - min(max(share, 0.0), other.held_tokens))
        return after

    def stats(self) -> list[FairStats]:
        """Return the accounts, in the order in which they were last used. O(tenants)."""
        rows = []
        for a in self._accounts.values():
            lacks = min(0.0, self._clock - a.finish) * self.settings.weights.get(a.name, 1.0)
            row = (a.name, len(a.held), a.held_tokens, lacks, a.released, a.tokens, a.waited_s, a.refused)
            rows.append(FairStats(*row))
        return rows

    # --- inside --------------------------------------------------------------------------------------------

    def _account(self, tenant: str) -> _Account:
        accounts = self._accounts
        account = accounts.get(tenant)
        if account is None:
            if len(accounts) >= MAX_TENANTS:
                # The account that was used longest ago makes room, if nothing hangs on it.
                oldest = next(iter(accounts.values()))
                if oldest.open or oldest.finish > self._clock or oldest.name == OTHER:
                    tenant = OTHER
                else:
                    del accounts[oldest.name]
            account = accounts.setdefault(tenant, _Account(tenant))
        accounts.move_to_end(tenant)
        return account

    def _take_turn(self, account: _Account) -> None:
        account.stamp += 1
        self._order += 1
        heappush(self._turns, (account.finish, self._order, account.stamp, account))
        if len(self._turns) > 2 * len(self._accounts) + 64:
            self._turns = [turn for turn in self._turns if turn[2] == turn[3].stamp and turn[3].held]
            heapify(self._turns)

    def _release(self, now: float) -> list[Hashable]:
        """Give the engine work up to the window; return the tickets."""
        released = []
        while self.held and self.ahead_tokens < self.window_tokens:
            start, _, stamp, account = heappop(self._turns)
            if stamp != account.stamp or not account.held:
                continue
            _, request = account.held.popitem(last=False)
            account.held_tokens -= request.charge
            self.held -= 1
            self.ahead_tokens += request.charge
            request.released = True
            self._clock = max(self._clock, start)
            account.finish += request.charge / request.weight
            self._last = max(self._last, account.finish)
            account.released += 1
            account.tokens += request.charge
            account.waited_s += now - request.entered_at
            released.append(request.ticket)
            if account.held:
                self._take_turn(account)
        if not self.held and not self.ahead_tokens:
            # The engine is idle: who used it last owes nobody anything.
            self._clock = self._last
        return released

    def _check(self) -> None:
        """Assert that counts, turns and requests agree, and that nothing is held that could go. O(requests)."""
        held = [request for account in self._accounts.values() for request in account.held.values()]
        assert len(held) == self.held <= self.settings.max_held
        assert all(self._requests[request.ticket] is request and not request.released for request in held)
        ahead = [request.charge for request in self._requests.values() if request.released and request.waiting]
        assert sum(ahead) == self.ahead_tokens
        assert not self.held or self.ahead_tokens >= self.window_tokens
        turns = [turn[3].name for turn in self._turns if turn[2] == turn[3].stamp and turn[3].held]
        assert sorted(turns) == sorted(account.name for account in self._accounts.values() if account.held)
        opened = Counter(request.account.name for request in self._requests.values())
        for account in self._accounts.values():
            assert account.held_tokens == sum(request.charge for request in account.held.values())
            assert account.open == opened[account.name]
        assert len(self._accounts) <= MAX_TENANTS + 1
