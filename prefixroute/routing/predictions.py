"""What endpoints will hold: prompts that were routed, until gossip or the engine says so itself.

A digest lags its owner by a prefill and a round. Until then a prompt counts as held by where it was sent, so a burst of
prompts with one cold prefix goes to one place, not to as many as there are nodes.

Rules:
1. A prediction begins with the decision and ends with a failure, a refusal, `LIFETIME_S`, or when the target's digest
   has moved on twice since the reply: what it was told then has been published by then.
2. A prompt is compared with the newest few that begin alike, so the cost does not grow with the traffic; by their keys,
   so namespaces, images and secrets count.
3. An endpoint of which `REFUTED` predictions in a row came to nothing is expected to hold nothing, until an answer
   shows that what was sent there is reused. Until then predictions go on, uncounted.
4. Of what a prompt leaves at a sparse endpoint (`index`, rule 6) only the whole can be reused, up to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..keys.chain import TokenChain, reusable_depth
from .standing import Standing

LIFETIME_S = 60.0
COMPARED = 4
"""Prompts that a prompt is compared with: about 1 us each that shares no more than its digest tells, else 4."""

KEPT_TOKENS = 1 << 22
"""Tokens of all prompts that are kept: 16 MB of them."""

REFUTED = 2
"""Predictions in a row that came to nothing, after which none counts."""

AGAIN = 2
"""Versions of a digest after which it tells what a prediction said."""


@dataclass(slots=True)
class _Prediction:
    chain: TokenChain
    standing: Standing
    expires_at: float
    held: tuple[int, int] | None = None
    """(incarnation, version) of the target's digest that tells it all by itself; None before the reply."""

    def stands(self, now: float) -> bool:
        """Whether it still counts: it is not too old, and the digest has not moved on past it."""
        return now < self.expires_at and (self.held is None or self.standing.copy.held < self.held)


class Predictions:
    """The predictions of one router, by first block."""

    __slots__ = ("_by_first", "_by_ticket", "_tokens")

    def __init__(self) -> None:
        self._by_ticket: dict[int, _Prediction] = {}
        self._by_first: dict[int, list[int]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._by_ticket)

    def sent(self, ticket: int, chain: TokenChain, standing: Standing, now: float) -> None:
        """Note that a prompt was sent to an endpoint under its decision's id. O(1) amortised."""
        if ticket in self._by_ticket:
            self.drop(ticket)
        if not chain.depth:
            return
        self._by_ticket[ticket] = _Prediction(chain, standing, now + LIFETIME_S)
        self._by_first.setdefault(chain.key(1), []).append(ticket)
        self._tokens += chain.n_tokens
        while self._tokens > KEPT_TOKENS:
            self.drop(next(iter(self._by_ticket)))

    def served(self, ticket: int) -> None:
        """Note the reply: a local engine has told of the prompt by now, and of a peer's gossip will."""
        prediction = self._by_ticket.get(ticket)
        if prediction is not None and prediction.standing.local:
            self.drop(ticket)
        elif prediction is not None:
            incarnation, version = prediction.standing.copy.held
            prediction.held = (incarnation, version + AGAIN)

    def drop(self, ticket: int) -> None:
        """Forget a prediction; an unknown one is harmless."""
        prediction = self._by_ticket.pop(ticket, None)
        if prediction is None:
            return
        self._tokens -= prediction.chain.n_tokens
        first = prediction.chain.key(1)
        tickets = self._by_first[first]
        tickets.remove(ticket)
        if not tickets:
            del self._by_first[first]

    def refute(self, chain: TokenChain, standing: Standing) -> None:
        """Forget what an endpoint is expected to hold of prompts that begin like this one. O(such prompts)."""
        for ticket in self._by_first.get(chain.key(1), ())[:] if chain.depth else ():
            if self._by_ticket[ticket].standing is standing:
                self.drop(ticket)

    def match(
        self, chain: TokenChain, now: float, known: Mapping[Standing, int], sparse: int = 0
    ) -> list[tuple[Standing, int]]:
        """Return who is expected to hold more blocks of a prompt than `known`, the newest first; `sparse` is a mask.

        O(1) a prompt compared that shares no more than that, as most do; else O(log depth).
        """
        depth = chain.depth
        tickets = self._by_first.get(chain.key(1)) if depth else None
        if not tickets:
            return []
        found: list[tuple[Standing, int]] = []
        over: list[int] = []
        keys: dict[int, int] = {}
        compared = 0
        for ticket in reversed(tickets):
            prediction = self._by_ticket[ticket]
            if not prediction.stands(now):
                over.append(ticket)
                continue
            other, standing = prediction.chain, prediction.standing
            if standing.refuted >= REFUTED:
                continue
            more = known.get(standing, 0) + 1
            if sparse and standing.bit & sparse:
                block = chain.spec.block_tokens
                end = reusable_depth(other.n_tokens, standing.hit_unit, block)
                if more <= end <= (chain.n_tokens - 1) // block and chain.key(end) == other.key(end):
                    found.append((standing, end))
            elif more <= depth and more <= other.depth:
                # Most targets are known to hold the same, so this prompt's key is asked for once.
                key = keys.get(more) or keys.setdefault(more, chain.key(more))
                if key == other.key(more):
                    found.append((standing, chain.shared(other)))
            compared += 1
            if compared == COMPARED:
                break
        for ticket in over:
            self.drop(ticket)
        return found

    def _check(self) -> None:
        """Assert that both maps and the sum of tokens agree."""
        assert sorted(ticket for tickets in self._by_first.values() for ticket in tickets) == sorted(self._by_ticket)
        assert self._tokens == sum(p.chain.n_tokens for p in self._by_ticket.values())
