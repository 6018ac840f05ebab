"""The contract of a routing policy: what it sees of a prompt and of each weighed candidate, and what it returns.

A policy gets a `Request`, a handful of `Candidate`s and a generator of random numbers, and returns a `Choice`.

Rules:
1. A policy has no clock and no randomness but what it is given.
2. It has no vetoes to take: an endpoint that is suspended, refusing or unheard is no candidate. It sees overloaded
   endpoints only where there is nobody else, local ones included: an absolute veto makes a busy fleet recompute
   everything. A policy with an attribute `keeps_local = True` sees the local endpoints whatever they say.
3. A forwarded request is never forwarded again; the node asks no policy then. It may be handed back once: see `Choice`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from ..keys.chain import TokenChain
from ..load import DEFAULT_PREFILL_TOKENS_PER_S, PushBackState
from .entry import Entry


class Request(NamedTuple):
    """What a policy may know of a prompt beside its candidates: its chain of keys, and the time in seconds.

    `entry` is what enters at this node; None for a gateway, which keeps nothing.
    """

    chain: TokenChain
    now: float
    entry: Entry | None = None


class Candidate(NamedTuple):
    """One endpoint weighed for one prompt. Times are in seconds; `cost_s` is the expected time to first token.

    cost = rtt + wait + overhead + prefill, and prefill = (prompt tokens - confidence x matched tokens) x s_per_token

    | field | unit | meaning |
    |---|---|---|
    | `endpoint` | | its id, "node/name" |
    | `local` | | whether it is this node's own |
    | `prompt_tokens` | tokens | length of the prompt |
    | `depth` | blocks | leading blocks of the prompt that it holds, as far as this node knows |
    | `matched_tokens` | tokens | what its engine can reuse of them: whole hit units, and never the last token |
    | `confidence` | 0 to 1 | share of the match that is counted: its owner's word, and what came true lately |
    | `rtt_s` | s | network round trip; 0 for a local one |
    | `wait_s` | s | expected wait before the prefill begins |
    | `overhead_s` | s | fixed part of a time to first token |
    | `prefill_s` | s | prefill of what is not matched |
    | `cost_s` | s | sum of the four above |
    | `state` | | its push-back: open, overloaded or refusing |
    | `age_s` | s | since its owner's own last word; 0 for a local one |
    | `s_per_token` | s | prefill of one token |
    | `queued` | requests | those without a first token there, booked by this node or waiting by its report |
    | `room_tokens` | tokens | what fits its cache without an eviction; infinite while nothing tells that it is full |
    | `eviction_age_s` | s | how long what it evicts was idle; infinite before the first eviction |
    | `predicted` | | whether part of the match is only expected: it was sent such a prompt a moment ago |
    | `arrivals_per_s` | 1/s | requests that come to it, from anywhere |
    | `home` | 0 to 1 | share of what enters at its owner that is asked for there only |
    | `demand` | 0 to 1 and more | share of the time that this alone would keep its owner busy |
    | `zone` | | its owner's label, "" while it is not known |
    | `withheld` | | why a rule for zones passed it over; None where none did |
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
    home: float = 0.0
    demand: float = 0.0
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


class Choice(NamedTuple):
    """Candidates in order of preference, the first one chosen, and why.

    `budget_s` goes with a forward. A target that finds, with its own queue and cache before it, that the first token
    would take longer hands the prompt back, and the policy is asked again without that target. Infinite: it keeps it.
    """

    order: tuple[Candidate, ...]
    reason: str
    budget_s: float = inf


class Policy(Protocol):
    """What a routing policy is: one method, called for each prompt, with at least one candidate."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Return the candidates in order of preference. A policy may keep state: it is asked once a prompt."""
        ...  # pragma: no cover
