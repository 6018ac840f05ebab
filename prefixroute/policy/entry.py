"""What enters at this node: how far its prompts come back to it, and how busy they would keep it by themselves.

Not to route is the one policy whose outcome a node can compute alone: by its own arrivals. That is what keeps the
default policy from doing worse (`RentOrBuy`).

| | is |
|---|---|
| `home` | the share of own prompts whose beginning is asked for at this node only, 0 to 1; 1 at first |
| `demand` | the work of own prompts, as a share of the time: of all of them, as if each was served here |
| `alone_s` | when the prompt that came last would be prefilled if so, in seconds from then on |

Rules:
1. A prompt is known by its first block. It is asked for elsewhere if a peer holds that block to whom this node did not
   send a prompt that nobody held (a stray), or if a peer forwards such a prompt. It is asked for at home if it was
   before, and no peer is known to hold it.
2. What was asked for at home counts when half of the peers have told what they hold: before, nobody could be known to.
3. The work of an own prompt is what it would take here now, by what this node holds. Where nothing strays that is what
   no routing would have; where much does, the demand is told too high.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import exp

from ..keys.chain import TokenChain

STICKY = 0.5
"""A node whose `home` is above that is sticky. In the rule's model 0.3 to 0.8 do alike, and 0.95 does not."""

NEWEST = 0.02
"""Weight of the newest prompt in `home`: with 0.05 a fleet whose sessions all move suffers twice as long."""

DEMAND_S = 10.0
"""Time in which work is worth a third: with 5 s single busy moments count, with 20 s an overload is noticed late."""

COMES_BACK = 0.1
"""Share of own prompts that were asked for before, here or elsewhere. Where less come back a stray does no harm."""

KEPT = 65536
"""First blocks, and strays, that are remembered."""

FORGOTTEN_S = 10.0
"""After so long a stray is known to its target's peers, or gone."""

LEAST_S = 1.0
"""What came in a shorter time is taken for what came in so long."""

LEAST_PROMPTS = 32
"""Of fewer own prompts a demand is a matter of chance: cold fleets of slow engines lost up to 39 % by exits."""

OVERLOADED_AT = 1.0
"""With 0.5 four of the rule's model's cells were 13 % worse than no routing."""

ONLY_AT, ONLY_RATIO = 0.7, 1 / 8
"""Demand from which a node is busy (clients that wait for their answers never ask for more than 1), and the share of
its own that is next to nothing."""

_STEP_S = 0.25
"""Between two notes of the demand there is so much time at least."""

_NOTES = 256


class Entry:
    """What enters at one node. Calls are O(1), but for `demand_at`."""

    __slots__ = (
        "_asked",
        "_asked_tokens",
        "_back",
        "_began",
        "_came",
        "_demand",
        "_demand_at",
        "_home",
        "_notes",
        "_seen",
        "_strays",
        "alone_s",
        "capacity_tokens",
        "only",
        "overloaded",
    )

    def __init__(self) -> None:
        self.alone_s = 0.0
        self.overloaded = False
        """Whether own prompts alone are more than this node can do."""
        self.only = False
        """Whether this node is busy, and next to nothing enters at all others together."""
        self._home = self._back = 1.0
        self._came = self._seen = 0
        """Own prompts; and prompts that told something."""
        self.capacity_tokens = 0
        """Tokens that this node's engines hold; 0 while that is not known."""
        self._asked: OrderedDict[int, int] = OrderedDict()
        """Tokens of own prompts by first block, the latest last: what they would hold if nothing was routed."""
        self._asked_tokens = 0
        self._strays: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """By first block, a mask of the endpoints to which it strayed, and when it did so last."""
        self._demand = self._demand_at = self._began = 0.0
        self._notes: deque[tuple[float, float]] = deque(maxlen=_NOTES)

    @property
    def home(self) -> float:
        """Share of own prompts that are asked for here only; 0 where hardly any prompt comes back anywhere."""
        return self._home if self._back >= COMES_BACK else 0.0

    @property
    def told_home(self) -> float:
        """What peers are told of `home`: 0 before any prompt told something, since there is nothing to protect."""
        return self.home if self._seen else 0.0

    @property
    def sticky(self) -> bool:
        """Whether what enters here comes back here."""
        return self.home > STICKY

    def arrived(self, chain: TokenChain, holders: int, heard: bool, work_s: float, now: float) -> None:
        """Take an own prompt: which peers hold its first block, whether half of them were `heard`, its work here."""
        if not self._demand:
            self._began = now
        self._came += 1
        waited = now - self._demand_at
        self.alone_s = (self.alone_s - waited if self.alone_s > waited else 0.0) + work_s
        self._demand = self._demand * exp(-waited / DEMAND_S) + work_s / DEMAND_S
        self._demand_at = now
        notes = self._notes
        if not notes or now - notes[-1][0] >= _STEP_S:
            demand = self.demand(now)
            notes.append((now, demand))
            self.overloaded = demand >= OVERLOADED_AT and self._came >= LEAST_PROMPTS
        if not chain.depth:
            return
        first, asked = chain.key(1), self._asked
        again, elsewhere = first in asked, bool(holders)
        if self._strays and first in self._strays:
            strayed, at = self._strays[first]
            elsewhere = bool(holders & ~strayed)
            if now - at > FORGOTTEN_S:
                # What they do not hold any more was evicted: from now on it is theirs if they hold it.
                self._strays[first] = (strayed & holders, at)
        if elsewhere:
            self._tell(0.0)
        elif again and heard:
            self._tell(1.0)
        self._back += NEWEST * ((elsewhere or again) - self._back)
        self._asked_tokens += chain.n_tokens - asked.pop(first, 0)
        asked[first] = chain.n_tokens
        while len(asked) > KEPT or 0 < self.capacity_tokens < self._asked_tokens:
            _, tokens = asked.popitem(last=False)
            self._asked_tokens -= tokens

    def forwarded(self, chain: TokenChain) -> None:
        """Take a prompt that a peer forwarded here: what is asked for at both is asked for elsewhere too."""
        if chain.depth and chain.key(1) in self._asked:
            self._tell(0.0)

    def demand(self, now: float) -> float:
        """Return the share of the time that own prompts alone would keep this node busy, lately."""
        if not self._demand:
            return 0.0
        # Of a node that began a moment ago there is less to look back on.
        seen = 1.0 - exp(-max(now - self._began, LEAST_S) / DEMAND_S)
        return self._demand * exp((self._demand_at - now) / DEMAND_S) / seen

    def demand_at(self, at: float) -> float:
        """Return what `demand` was at an earlier moment. O(notes) at most, and O(1) for a moment ago."""
        for noted_at, demand in reversed(self._notes):
            if noted_at <= at:
                return demand * exp((noted_at - at) / DEMAND_S)
        return 0.0

    def compare(self, elsewhere: float, told_at: float) -> None:
        """Take the mean demand of all peers, by words of which the oldest is of `told_at`. O(notes)."""
        demand = self.demand_at(told_at)
        self.only = self._came >= LEAST_PROMPTS and demand >= ONLY_AT and elsewhere <= ONLY_RATIO * demand

    def strayed(self, chain: TokenChain, bit: int, now: float) -> None:
        """Note that a prompt goes to a peer's endpoint which holds nothing of it."""
        if chain.depth:
            first, strays = chain.key(1), self._strays
            strays[first] = (bit | strays.pop(first, (0, now))[0], now)
            if len(strays) > KEPT:
                strays.popitem(last=False)

    def _tell(self, evidence: float) -> None:
        self._seen += 1
        weight = 1.0 / (self._seen + 1)
        self._home += (weight if weight > NEWEST else NEWEST) * (evidence - self._home)
