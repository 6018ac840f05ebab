"""What this node believes of every endpoint that it could use, ranked by what reaching it costs before any prefill.

Rules:
1. A decision looks at a handful of endpoints, never at all of them: the ranking is kept up to date as reports and
   bookings come, and a decision asks for the first few within a bitmask.
2. Masks say who is usable: suspended, refusing and unheard endpoints are out; overloaded ones are set apart.
3. Endpoints that have not served anything yet share one suspension with the others of their owner, and all whose owner
   is no peer share one: a node that makes endpoints up is found out once, not once for each.
4. Endpoints that a rule for zones lets in above a saving only are set apart too; those that it never lets in are out.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from math import inf
from operator import attrgetter
from typing import TypeAlias

from ..errors import UsageError
from ..keys.names import owner_of
from ..load import LoadReport, PushBackState
from ..policy.entry import Entry
from .decision import Veto
from .ledger import Send
from .standing import DEFAULT_REPORT, DEFAULT_RTT_S, LocalStanding, PeerStanding, Standing
from .trust import Promptness, Suspension
from .zones import Gate

LOOKED_DOWN = 64
"""Places of the ranking that a decision looks at for the first of many endpoints."""

SAMPLED = 32
"""Endpoints taken by chance where none is found up there: the best of so many is within 3 % of the best rank."""

Offer: TypeAlias = frozenset[str]
"""Endpoints that a caller offers, by name."""

AWAY_S = 600.0
"""Seconds after its last word for which it is known of a forgotten endpoint that forwards there failed."""

_RANK = attrgetter("rank")
_OPEN, _OVERLOADED, _REFUSING = PushBackState


class Fleet:
    """All standings, ranked, with masks of who is usable."""

    def __init__(self, rng: random.Random, gate: Gate | None = None) -> None:
        self._rng = rng
        self.gate = gate
        self._ranking: list[tuple[float, float, int]] = []
        self.standings: dict[str, Standing] = {}
        self.by_bit: dict[int, Standing] = {}
        self.usable = self.overloaded = self.local = 0
        self.guarded = self.barred = 0
        """Candidates above a saving only; those out by a rule for zones, and by nothing else."""
        self.passing = 0
        """Those of which time alone changes what is believed: they push back or are suspended, for a while."""
        self._owners: Counter[str] = Counter()
        """Endpoints by owner: of this node's, and of its peers' own word or of others' about them."""
        self._untried: dict[str, Suspension] = {}
        self.entry = Entry()
        self.heard = False
        """Whether half of the peers' endpoints have told what they hold."""
        self.promptness = Promptness()
        """Of all endpoints, this node's own too: what callers do shows there."""
        self._away: dict[str, PeerStanding] = {}
        """Endpoints that were forgotten while something was booked there, or forwards there failed."""
        self._typical_s = self._cold_s = 0.0
        """Work of a typical forward to a peer that holds a prefix of it, and of a prompt of which nothing is held."""

    def book(self, standing: Standing, ticket: int, work_s: float, hit: bool, now: float, until: float) -> None:
        """Book a request at an endpoint; `hit` says whether it holds some of the prompt. O(log n) and a memmove."""
        standing.ledger.book(ticket, work_s, now, until)
        if not hit:
            self._cold_s = self._cold_s + 0.1 * (work_s - self._cold_s) if self._cold_s else work_s
        if not standing.local and isinstance(standing, PeerStanding):
            if hit:
                self._typical_s = self._typical_s + 0.1 * (work_s - self._typical_s) if self._typical_s else work_s
            # Every other origin is taken to forward as often as this one, and as much as a hit takes.
            others, typical_s = len(self._owners) - 2, self._typical_s
            mirrored = others * (work_s if work_s < typical_s else typical_s) if others > 0 else 0.0
            standing.queue.sent(ticket, tuple.__new__(Send, (now + standing.rtt_s / 2, work_s + mirrored)))
        elif isinstance(standing, LocalStanding):
            standing.arrivals.arrived(now)
        self.rank(standing, now)

    def release(self, standing: Standing, ticket: int, now: float) -> bool:
        """Take a booking back; return whether there was one."""
        if not standing.local and isinstance(standing, PeerStanding):
            standing.queue.unsent(ticket)
        return standing.ledger.release(ticket, now)

    def add(self, standing: Standing, now: float) -> None:
        """Take an endpoint in. O(log n) and a memmove."""
        owner = owner_of(standing.name)
        if isinstance(standing, PeerStanding):
            standing.default_rtt_s = self._typical_rtt_s()
            standing.slack_s = self.promptness.patience_s
            gone = self._away.pop(standing.name, None)
            if gone is not None:
                standing.take_up(gone)
            if not standing.promptness.known:
                group = owner if standing.peer is not None else ""
                standing.suspension = self._untried.setdefault(group, standing.suspension)
        elif isinstance(standing, LocalStanding):
            self.local |= standing.bit
            standing.entry = self.entry
        if _is_known(standing):
            self._owners[owner] += 1
        self.standings[standing.name] = standing
        self.by_bit[standing.bit] = standing
        self.refresh(standing, now)

    def drop(self, endpoint: str) -> None:
        """Take an endpoint out. One that others forgot may come back: what is under way there, or failed, is kept."""
        standing = self.standings.pop(endpoint)
        if isinstance(standing, PeerStanding) and (standing.ledger.open or standing.suspension.failures):
            self._away[endpoint] = standing
        standing.away = True
        del self.by_bit[standing.bit]
        owner = owner_of(endpoint)
        if owner in self._owners:
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
                self._untried.pop(owner, None)
        if standing.rank is not None:
            del self._ranking[bisect_left(self._ranking, standing.rank)]
            standing.rank = None
        clear = ~standing.bit
        self.usable &= clear
        self.overloaded &= clear
        self.local &= clear
        self.guarded &= clear
        self.barred &= clear
        self.passing &= clear

    def known(self, endpoint: str) -> Standing | None:
        """Return an endpoint's standing, also of one that was forgotten while it had something to do."""
        standing = self.standings.get(endpoint)
        return standing if standing is not None else self._away.get(endpoint)

    def refresh(self, standing: Standing, now: float) -> None:
        """Bring an endpoint's standing, masks and rank up to date. O(log n) and a memmove."""
        standing.refresh(now)
        bit, state = standing.bit, standing.state
        if standing.away:
            return
        held = now >= standing.silence.late_at and isinstance(standing, PeerStanding) and standing.holds(now)
        failing = standing.suspension.failures > 0
        out = held or state is _REFUSING or standing.copy.suspected or (failing and standing.suspension.blocks(now))
        if self.gate is not None and not standing.local:
            needs = standing.needs_s = self.gate.needs_s(standing.zone)
            self.guarded = self.guarded | bit if 0 < needs < inf else self.guarded & ~bit
            self.barred = self.barred | bit if needs == inf and not out else self.barred & ~bit
            out = out or needs == inf
        self.usable = self.usable & ~bit if out else self.usable | bit
        passes = held or state is not _OPEN or failing
        self.passing = self.passing | bit if passes else self.passing & ~bit
        overloaded = state is _OVERLOADED
        self.overloaded = self.overloaded | bit if overloaded else self.overloaded & ~bit
        self.rank(standing, now)

    def served(self, standing: Standing, tokens: int = 0, forgiven: int = 0) -> bool:
        """Note that an endpoint answered; return whether that ended a suspension. From now on it has one of its own."""
        ended = standing.suspension.served(tokens, forgiven)
        if standing.suspension in self._untried.values():
            standing.suspension = standing.suspension.parted()
        return ended

    def mask(self, offer: Offer) -> int:
        """Return the mask of the endpoints of these names; those that are not known are passed over. O(names)."""
        mask, standings = 0, self.standings
        for name in offer:
            if name in standings:
                mask |= standings[name].bit
        return mask

    def doubts(self, standing: Standing) -> tuple[bool, int, bool, PushBackState]:
        """Return what speaks against an endpoint where nobody usable is left, the worst first: the least is tried."""
        failures = standing.suspension.failures
        return standing.copy.suspected, failures, not standing.bit & self.usable, standing.state

    def vetoes(self, eligible: int, offered: int, hop: bool) -> tuple[Veto, ...]:
        """Return who was not `eligible` for a decision, and why; `hop`: it was forwarded here. O(endpoints)."""
        found: list[Veto] = []
        for standing in self.standings.values():
            bit = standing.bit
            if not bit & offered:
                found.append(Veto(standing.name, "not offered"))
            elif not bit & eligible:
                why = "the request was forwarded here: one hop" if hop else self._doubt(standing)
                found.append(Veto(standing.name, why))
        return tuple(sorted(found))

    def _doubt(self, standing: Standing) -> str:
        """Why an endpoint is not chosen, in words."""
        suspension, state = standing.suspension, standing.state
        if standing.needs_s == inf:
            return "a rule for zones: never"
        if standing.copy.suspected:
            return "unheard: no word of its owner lately"
        if suspension.on_trial:
            return f"suspended: {suspension.reason}"
        if state is _OPEN:
            return "could be chosen again" if standing.bit & self.usable else "late: forwards wait for a first token"
        reason = standing.refusal if state is _REFUSING else ""
        reason = reason or standing.copy.advert.report.reason
        return f"{state.name.lower()}: {reason}" if reason else state.name.lower()

    def refresh_sharing(self, standing: Standing, now: float) -> None:
        """Bring up to date all endpoints that share a suspension. O(endpoints): after a failure, or for a trial."""
        for other in list(self.standings.values()):
            if other.suspension is standing.suspension:
                self.refresh(other, now)

    def rank(self, standing: Standing, now: float) -> None:
        """Rank an endpoint anew after a booking; ties fall at random. O(log n) and a memmove."""
        # It matters most for a prompt that nobody holds: what such a prompt delays counts (`Candidate.delays_s`).
        ranking = self._ranking
        if standing.rank is not None:
            del ranking[bisect_left(ranking, standing.rank)]
        delays = standing.arrivals_per_s(now) * self._cold_s * self._cold_s / 2
        base = standing.rtt_s + standing.wait_s(now) + standing.overhead_s + delays
        standing.rank = (base, self._rng.random(), standing.bit)
        insort(ranking, standing.rank)

    def refresh_all(self, now: float) -> None:
        """Bring all endpoints up to date and rank them anew. O(n log n), 4.5 ms at 1,024 endpoints: once a round."""
        default, rtt_s = self._typical_pace(), self._typical_rtt_s()
        self._owners = Counter(owner_of(s.name) for s in self.standings.values() if _is_known(s))
        peers = [s.copy for s in self.standings.values() if not s.local]
        if peers:
            self.heard = 2 * sum(copy.keys.version > 0 for copy in peers) >= len(peers)
            mean = sum(copy.advert.demand for copy in peers) / len(peers)
            self.entry.compare(mean, min(copy.heard_at for copy in peers))
        for standing in self.standings.values():
            standing.default = default
            if isinstance(standing, PeerStanding):
                standing.default_rtt_s = rtt_s
                if not standing.promptness.known:
                    standing.slack_s = self.promptness.patience_s
            self.refresh(standing, now)
        for name, gone in list(self._away.items()):
            gone.ledger.wait_s(now)  # drops what has expired
            gone.overdue = min(gone.overdue, len(gone.ledger))
            if not gone.ledger.open and (not gone.suspension.failures or now - gone.copy.heard_at > AWAY_S):
                del self._away[name]

    def refresh_passing(self, now: float) -> None:
        """Bring this node's own endpoints up to date, and those that push back or are suspended: with each exchange.

        So a flag that runs out and a pause that is over are noticed; all else changes with a word or an outcome, which
        refresh it, or can wait for the round. O(such endpoints), few as a rule.
        """
        mask = self.local | self.passing
        while mask:
            low = mask & -mask
            self.refresh(self.by_bit[low], now)
            mask ^= low

    def _typical_rtt_s(self) -> float:
        """The round trip to a peer that was not measured yet: the upper quartile of those that were.

        With 1 ms for a stranger, 64 nodes a second apart forwarded to all and lost half of their mean to not routing.
        """
        peers = [s.peer for s in self.standings.values() if isinstance(s, PeerStanding) and s.peer is not None]
        measured = sorted(peer.rtt_s for peer in peers if peer.rtt_s is not None)
        return measured[3 * (len(measured) - 1) // 4] if measured else DEFAULT_RTT_S

    def _typical_pace(self) -> LoadReport:
        """The pace of an endpoint that does not tell its own: this node's, else the slowest known, else the default.

        A stranger that looks fast would draw the work that was meant for those who are known to be slower.
        """
        told = [s for s in self.standings.values() if s.copy.advert.report.prefill_tokens_per_s]
        if not told:
            return DEFAULT_REPORT
        typical = min(told, key=lambda standing: (not standing.local, standing.rate))
        return LoadReport(prefill_tokens_per_s=typical.rate, overhead_s=typical.overhead_s)

    def cheapest(self, mask: int, n: int) -> list[Standing]:
        """Return the `n` endpoints of `mask` that are cheapest to reach, in order.

        O(n) as a rule: the first are found soon down the ranking. But the holders of a hot prefix may all be at its
        end, since they are the busiest: after `LOOKED_DOWN` places the cheapest of `SAMPLED` endpoints taken by chance
        will do. To look at all of 1,024 took 0.3 ms.
        """
        if not mask & (mask - 1):
            return [self.by_bit[mask]] if mask else []
        bits = mask.bit_count()
        found: list[Standing] = []
        if bits > n:
            for _, _, bit in islice(self._ranking, min(bits, LOOKED_DOWN)):
                if bit & mask:
                    found.append(self.by_bit[bit])
                    if len(found) == n:
                        return found
            if bits > SAMPLED + len(found):
                # Those that were found are the cheapest of all.
                for standing in found:
                    mask ^= standing.bit
                rest = sorted(self._sample(mask), key=_RANK)
                return found + rest[: n - len(found)]
            found.clear()
        while mask:
            low = mask & -mask
            found.append(self.by_bit[low])
            mask ^= low
        found.sort(key=_RANK)
        return found[:n]

    def _sample(self, mask: int) -> list[Standing]:
        """Return `SAMPLED` endpoints of a mask that has more: those that follow a bit drawn by chance. O(1)."""
        start = self._rng.randrange(mask.bit_length())
        some: list[Standing] = []
        for part in (mask >> start << start, mask & (1 << start) - 1):
            while part and len(some) < SAMPLED:
                low = part & -part
                some.append(self.by_bit[low])
                part ^= low
        return some

    def _check(self) -> None:
        """Assert that ranking, masks and standings agree."""
        assert self._ranking == sorted(self._ranking)
        assert sorted(bit for *_, bit in self._ranking) == sorted(self.by_bit)
        assert {standing.bit: standing for standing in self.standings.values()} == self.by_bit
        nobody = ~sum(self.by_bit)
        assert self.usable & nobody == self.overloaded & nobody == self.local & nobody == 0
        assert self.passing & nobody == 0
        assert self.guarded & nobody == self.barred & (nobody | self.usable) == 0
        for bit, standing in self.by_bit.items():
            assert standing.local is bool(self.local & bit)
            assert bool(self.guarded & bit) is (0 < standing.needs_s < inf)
            assert bool(self.passing & bit) or standing.state is _OPEN
            assert standing.needs_s < inf or not (self.usable & bit or standing.local)


def _is_known(standing: Standing) -> bool:
    """Whether its owner is this node or a peer: not one that others merely tell of."""
    return not isinstance(standing, PeerStanding) or standing.peer is not None


def offered(among: Iterable[str]) -> Offer:
    """Return what a caller offers as a set. Raises `UsageError` for what is no list of ids."""
    if not isinstance(among, (str, bytes)):
        with suppress(TypeError):
            return frozenset(among)
    raise UsageError(f"among is a list of endpoints by id, such as ['n1/0'], not {among!r}")
