"""What a routing policy is: what it sees of a prompt and of each weighed candidate, and what it returns.

Rules:
1. A policy sees a handful of candidates, costs included, and returns them in order of preference with a reason. It
   has no clock and no randomness but what it is given.
2. Vetoes are not its business: who is suspended, refusing or unheard is no candidate. Of overloaded endpoints it sees
   one only if there is nobody else, local included: an absolute veto makes a busy fleet recompute everything. A policy
   with an attribute `keeps_local = True` sees the local endpoints whatever they say.
3. A forwarded request is never forwarded again; the node asks no policy then. It may be handed back once: see `Choice`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from ..keys.chain import TokenChain
from ..load import DEFAULT_PREFILL_TOKENS_PER_S, PushBackState


class Request(NamedTuple):
    """What a policy may know of a prompt beside its candidates: its chain of keys, and the time in seconds."""

    chain: TokenChain
    now: float


class Choice(NamedTuple):
    """Candidates in order of preference, the first one chosen, and why.

    `budget_s` goes with a forward: a target that finds, with its own queue and cache before it, that the first token
    would take longer hands the prompt back, and the policy is asked again without it. Infinite: it keeps it.
    """

    order: tuple[Candidate, ...]
    reason: str
    budget_s: float = inf


class Policy(Protocol):
    """What a routing policy is: one method, called for each prompt, with at least one candidate."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Return the candidates in order of preference. A policy may keep state: it is asked once a prompt."""
        ...  # pragma: no cover


class Candidate(NamedTuple):
    """One endpoint weighed for one prompt; times in seconds, `cost_s` is the expected time to first token.

    cost = rtt + wait + overhead + uncached tokens x seconds per token, where uncached counts only the trusted share
    (`confidence`) of the match, rounded down to what the engine can reuse. `s_per_token` are seconds of prefill a
    token, `queued` requests there that have no first token yet. `room_tokens` fit its cache without an eviction, and
    what is evicted there was idle for `eviction_age_s`; both are infinite while nothing tells that the cache is full.
    `predicted` says that part of the match is no more than expected: the endpoint was sent that prompt a moment ago.
    `arrivals_per_s` are requests that come to it. `zone` is its owner's label, "" while it is not known, and `withheld`
    why a rule for zones passed it over.
    """

    endpoint: str
    local: bool
    prompt_tokens: int
    depth: int
    matched_tokens: int
    confidence: float
    rtt_s: float
    wait_s: float
    overhead_s: float
    prefill_s: float
    cost_s: float
    state: PushBackState
    age_s: float
    s_per_token: float = 1 / DEFAULT_PREFILL_TOKENS_PER_S
    queued: int = 0
    room_tokens: float = inf
    eviction_age_s: float = inf
    predicted: bool = False
    arrivals_per_s: float = 0.0
    zone: str = ""
    withheld: Withheld | None = None

    @property
    def evicted_tokens(self) -> float:
        """Tokens that go from the endpoint's cache if it serves the prompt."""
        return max(0.0, self.prompt_tokens - self.matched_tokens - self.room_tokens)

    @property
    def delays_s(self) -> float:
        """Seconds, added up, by which the prompt's prefill delays requests that come to the endpoint meanwhile.

        Arrivals at rate r during a prefill of p seconds are r p, and wait for half of it: r p^2 / 2.
        """
        return self.arrivals_per_s * self.prefill_s * self.prefill_s / 2


class Withheld(NamedTuple):
    """Why an endpoint was passed over: the saving that its zone's rule asks for (infinite: never), and its own.

    Both in seconds; `saves_s` is the expected saving against the best endpoint that was let in, below 0 when it costs.
    """

    needs_s: float
    saves_s: float

    def text(self, source: str, to: str) -> str:
        """Return it in words, for a forward from `source` to `to`."""
        pair = f"zone {source}-{to or '(unknown)'}"
        if self.needs_s == inf:
            return f"{pair}: never"
        return f"{pair}: saves {1000 * self.saves_s:.0f} ms, needs {1000 * self.needs_s:.0f} ms"
