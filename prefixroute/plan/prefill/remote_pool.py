"""A prefill pool behind a node: for each prompt one more candidate, with a transfer term.

    policy = PrefillOffload(RentOrBuy(), PrefillPool(...))
    node = Node(..., policy=policy)
    decision = node.route(prompt, now)
    if policy.last is not None:  ...  the target has the pool prefill the prompt, and waits for its KV

The pool is no endpoint: it answers no request. It is another way for an endpoint of this node to get the KV of a
prompt, so a prompt has the candidate (endpoint, through the pool) beside (endpoint, by itself). The wrapped policy
weighs the cheaper of the two against the peers.

Rules:
1. A prompt goes to the pool if it has more uncached tokens than the threshold, and if the pool is also the faster way
   for this prompt by itself, waits included (`offload_gain`). The first condition keeps the roles in balance; with the
   second no single prompt is made slower.
2. Only endpoints of this node use its pool; a gateway, which has no endpoints, uses it for the endpoint it chooses.
3. A prompt that was sent counts until the pool and the link can have done its work, so no caller has to release it; a
   report of the pool's real queue and of the link's real load replaces the count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from prefixroute import Candidate, Choice, Policy, Request, TokenChain, UsageError

from .costs import Curve
from .division import place
from .offload import KvLink, OffloadGain, Side, offload_gain


class Offload(NamedTuple):
    """The pool's work for one prompt: the number of tokens that it computes, and of tokens whose KV it sends.

    `gain` has the expected seconds of either way; the KV goes to `endpoint`.
    """

    pool: str
    endpoint: str
    computed_tokens: int
    sent_tokens: int
    gain: OffloadGain


class PrefillPool:
    """A pool as its users see it: costs, link, threshold, and the estimated work that waits there.

    `cached_tokens` returns how many tokens of a prompt the pool holds; without it, the pool counts as empty. Raises
    `UsageError`.
    """

    def __init__(
        self,
        name: str,
        nodes: int,
        prefill_s: Curve,
        kv_bytes: Curve,
        link: KvLink,
        threshold_tokens: float = 0.0,
        cached_tokens: Callable[[TokenChain], int] | None = None,
        ample: bool = False,
        hysteresis: float = 0.05,
    ) -> None:
        if nodes < 1 or threshold_tokens < 0 or hysteresis < 0:
            raise UsageError("a pool needs nodes >= 1, threshold_tokens >= 0 and hysteresis >= 0")
        self.name = name
        self.threshold_tokens = threshold_tokens
        """Uncached tokens above which prompts go to the pool; a plan or a `ThresholdController` gives the value."""
        self.prefill_s, self.kv_bytes, self.link = prefill_s, kv_bytes, link
        self.ample, self.hysteresis = ample, hysteresis
        self._nodes = nodes
        self._cached_tokens = cached_tokens
        self._busy_s = 0.0
        self._queued_bytes = 0.0
        self._at = -inf

    def holds(self, chain: TokenChain) -> int:
        """Return the tokens of a prompt that the pool has cached, all but the last at most."""
        return min(self._cached_tokens(chain), chain.n_tokens - 1) if self._cached_tokens else 0

    def report(self, now: float, wait_s: float = 0.0, queued_bytes: float = 0.0, utilisation: float = 0.0) -> None:
        """Take the pool's real state: seconds until a node is free, bytes queued for the link, others' share of it."""
        if not (wait_s >= 0 and queued_bytes >= 0 and 0 <= utilisation <= 1):
            raise UsageError("a pool reports wait_s >= 0, queued_bytes >= 0 and a utilisation of 0 to 1")
        self._at = now
        # The wait counts for each node: together the nodes do so many seconds of work in that time.
        self._busy_s, self._queued_bytes = wait_s * self._nodes, queued_bytes
        self.link = self.link.used(utilisation)

    def waits_s(self, now: float) -> float:
        """Return the seconds until a prompt's KV begins to come: the longer of the nodes' and the link's waits."""
        passed = max(0.0, now - self._at)
        busy_s = max(0.0, self._busy_s - passed * self._nodes)
        rate = self.link.effective_bytes_per_s
        queued = max(0.0, self._queued_bytes - passed * rate)
        return max(busy_s / self._nodes, queued / rate if rate > 0 else inf)

    def sent(self, offload: Offload, now: float) -> None:
        """Count a prompt that goes to the pool."""
        passed = max(0.0, now - self._at)
        self._at = max(now, self._at)
        self._busy_s = max(0.0, self._busy_s - passed * self._nodes) + self.prefill_s(offload.computed_tokens)
        drained = passed * self.link.effective_bytes_per_s
        self._queued_bytes = max(0.0, self._queued_bytes - drained) + self.kv_bytes(offload.sent_tokens)

    def offers(self, candidate: Candidate, chain: TokenChain, now: float) -> Offload | None:
        """Return what the pool would do for an endpoint's prompt, or None when the prompt is not for the pool. O(1)."""
        prompt, local = candidate.prompt_tokens, candidate.matched_tokens
        found = place(prompt, local, self.holds(chain), self.threshold_tokens, self.ample)
        if not found.remote:
            return None
        own = candidate.overhead_s + candidate.prefill_s

        def own_s(tokens: float) -> float:
            return own

        gain = offload_gain(
            Side(prompt - local, own_s, candidate.wait_s),
            Side(found.computed_tokens, self.prefill_s, self.waits_s(now)),
            prompt - local,
            self.kv_bytes,
            self.link,
            self.hysteresis,
        )
        if not gain.offload:
            return None
        return Offload(self.name, candidate.endpoint, found.computed_tokens, prompt - local, gain)


class PrefillOffload:
    """A policy with a pool behind it: the wrapped policy weighs each endpoint with the cheaper of its two ways.

    `last` is the pool's work for the prompt decided last, or None; read it right after `Node.route`. The reason of a
    decision for the pool begins with the pool's name.
    """

    def __init__(self, policy: Policy, pool: PrefillPool) -> None:
        self._policy = policy
        self.pool = pool
        self.last: Offload | None = None
        self.keeps_local = bool(getattr(policy, "keeps_local", False))

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Replace each candidate that gains by the pool, and let the wrapped policy decide. O(candidates)."""
        self.last = None
        own = any(c.local for c in candidates)
        offers: dict[str, Offload] = {}
        weighed: list[Candidate] = []
        for candidate in candidates:
            offer = self.pool.offers(candidate, request.chain, request.now) if candidate.local or not own else None
            if offer is not None:
                offers[candidate.endpoint] = offer
                candidate = _through(candidate, offer)
            weighed.append(candidate)
        choice = self._policy.choose(request, weighed, rng)
        offer = offers.get(choice.order[0].endpoint)
        if offer is None:
            return choice
        self.last = offer
        self.pool.sent(offer, request.now)
        saved = offer.gain.local_s - offer.gain.remote_s
        return choice._replace(reason=f"{self.pool.name[:24]} prefills, {saved:.2f} s sooner; {choice.reason}"[:80])


def _through(candidate: Candidate, offer: Offload) -> Candidate:
    """Return the candidate as it is through the pool: all of the prompt is held by then, and there is no queue."""
    way_s = candidate.rtt_s + offer.gain.remote_s
    return candidate._replace(
        matched_tokens=candidate.prompt_tokens,
        rtt_s=way_s,
        wait_s=0.0,
        prefill_s=0.0,
        overhead_s=0.0,
        cost_s=way_s,
    )
