"""One queue in front of an engine, in which tenants take turns: no tenant's cached prefixes starve another tenant.

A request whose prefix is cached costs its engine little, so a router sends it to that engine. With first come, first
served, the tenant of a hot prefix therefore fills the engine's queue, and all other tenants wait behind it.

    enter(ticket, tenant, uncached)   -> GO: hand the request to the engine; HELD: a later call returns its ticket;
                                         FULL: refuse the request
    first_token(ticket), leave(ticket) -> the tickets to hand to the engine now

Rules:
1. Local and forwarded requests enter alike. Each is charged the tokens that the engine has to compute; cached tokens
   are free, so a tenant gains by its own cached prefixes and does not pay for those of others.
2. The queue releases requests while the engine has less than a window of charged tokens without a first token. So the
   engine never idles while a request is held, and a released request waits a window at most inside the engine.
3. The next request is of the tenant that has had the fewest tokens, divided by its weight; within a tenant, first come
   first served. A tenant that returns after a pause starts level with the others: its past use is forgotten.
4. No tenant fills the queue: it may hold as many requests as there are places left (dynamic threshold).
5. The caller calls `leave` for every ticket that entered: served, failed, cancelled, held or not.

Rule 3 is deficit round robin with turns as short as one request (start-time fair queueing). The shares of two waiting
tenants never differ by more than one request of each; a call is O(log tenants); the first request of a new tenant is
next, where in round robin it would wait for a quantum of every other tenant.
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
"""The most tenants with an account of their own; while all of these are in use, further tenants share one account."""

OTHER = "other"
"""Name of the account that further tenants share."""


class Entry(Enum):
    """What becomes of a request that enters."""

    GO = "go"
    HELD = "held"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class FairSettings:
    """Settings of a queue.

    `window_tokens` is the work that the engine has ahead, in charged tokens: the token budget of one engine step keeps
    it busy. `overhead_tokens` stands for a request's fixed time, and is charged beside its uncached tokens. `weights`
    are shares by tenant, 1 by default. `max_held` bounds the requests that wait here. Raises `UsageError` for a value
    out of range.
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

    Counts of requests: `held` wait here, `released` went to the engine, `refused` found the queue full. `tokens` are
    charged for the released ones, and `waited_s` is the sum of their waits here, in seconds. `deficit_tokens` is 0 for
    a tenant that is next, and below 0 by the tokens that a tenant had more than its fair share.
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
    """Requests that have entered and not left yet."""
    finish: float = 0.0
    """Tokens that this account has had, divided by its weight, on the virtual clock that all accounts share."""
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
    """True while the request is held, or is in the engine without a first token."""
    released: bool = False


class FairQueue:
    """The queue of one engine. All calls are O(log tenants) amortised; `stats` and `_check` look at everything.

    Callers only read its attributes.
    """

    def __init__(self, settings: FairSettings | None = None) -> None:
        self.settings = settings or FairSettings()
        self.window_tokens = self.settings.window_tokens
        """The present window, in charged tokens."""
        self.held = 0
        """Requests that wait here."""
        self.ahead_tokens = 0
        """Charged tokens of the requests that are in the engine without a first token."""
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._requests: dict[Hashable, _Request] = {}
        self._turns: list[tuple[float, int, int, _Account]] = []
        """(start, order, stamp, account) of each account that holds requests; an entry with an older stamp is void."""
        self._order = 0
        self._clock = 0.0
        """The virtual clock: the start of the latest turn, in tokens divided by weight."""
        self._last = 0.0
        """The largest `finish` of any account."""

    def resize(self, window_tokens: int, now: float) -> list[Hashable]:
        """Set the window, for instance when the engine's speed becomes known; return the tickets to release."""
        if window_tokens < 1:
            raise UsageError("a window has at least one token")
        self.window_tokens = window_tokens
        return self._release(now)

    def enter(self, ticket: Hashable, tenant: str, uncached_tokens: int, now: float) -> Entry:
        """Take a request with so many tokens to compute. Raises `UsageError` for a ticket that has entered already."""
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
            # The account starts level with the others, unless it has had more than they have.
            account.finish = max(account.finish, self._clock)
            self._take_turn(account)
        self._release(now)
        return Entry.GO if request.released else Entry.HELD

    def first_token(self, ticket: Hashable, now: float) -> list[Hashable]:
        """Note that a request's prefill is done; return the tickets to release. An unknown ticket is harmless."""
        request = self._requests.get(ticket)
        if request is None or not request.released or not request.waiting:
            return []
        request.waiting = False
        self.ahead_tokens -= request.charge
        return self._release(now)

    def leave(self, ticket: Hashable, now: float, uncached_tokens: int | None = None) -> list[Hashable]:
        """Note that a request is over, however it ended; return the tickets to release. An unknown ticket is harmless.

        `uncached_tokens` is what the engine really computed, by its report of cached tokens; the tenant is charged the
        difference. Pass 0 for a request that failed without an answer. A request that was still held is not charged.
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
            # A request that failed without an answer took no fixed time either.
            charge = uncached_tokens and uncached_tokens + self.settings.overhead_tokens
            more = charge - request.charge
            account.tokens += more
            account.finish += more / request.weight
            self._last = max(self._last, account.finish)
            if more and account.held:
                self._take_turn(account)
        return self._release(now)

    def overtaken(self, tenant: str) -> int:
        """Return the tokens held here that a new request of this tenant would overtake. O(tenants that wait).

        A node's estimate of the wait counts all booked requests; this tenant does not wait for these tokens.
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
                # The account that was used longest ago makes room, if it has no open request and is not ahead.
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
        """Release requests until the engine has a full window of work; return their tickets."""
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
            # The engine is idle, so no tenant waits: all accounts start level again.
            self._clock = self._last
        return released

    def _check(self) -> None:
        """Assert that counts, turns and requests agree, and that no held request could be released. O(requests)."""
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
