"""The fairness guard before the local engine: each attempt at it waits for its tenant's turn (`prefixroute.FairQueue`).

Rules:
1. Each rank has one queue, for local requests and peers' forwards alike. The node booked the requests that wait here
   when it decided on them, so peers see them as load.
2. The window follows the engine's speed as the node knows it.
3. The node's wait counts all booked work. A forward whose tenant would overtake some of that work gets as much more
   budget (`Turns.slack_s`), so that it is not declined for work that it need not wait for.
4. A prompt's place in the window becomes free with its first token. An answer that is not streamed shows no first
   token, so the queue assumes it at the time when the work ahead and the prompt's own work should be done.
5. The tenant that filled the queue gets a 429. A 429 says nothing of the engine, so no peer avoids the engine for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from prefixroute import Decision, Entry, FairQueue, FairSettings, Outcome, OutcomeKind

from .sidecar_config import TenantsConfig

_BYTES_A_TOKEN = 4
"""Assumed bytes of a token, for prompts whose tokens are not known."""

_NOTHING_COMPUTED = (OutcomeKind.FAILED, OutcomeKind.REFUSED)


class Turn:
    """One attempt's place. Wait for it with `come`; end it with `over`, however the attempt ends."""

    __slots__ = ("_began", "_entry", "_go", "_overhead", "_prompt_tokens", "_queue", "_streamed", "_token_s", "_turns")

    def __init__(self, turns: Turns, queue: FairQueue, streamed: bool) -> None:
        self._turns = turns
        self._queue = queue
        self._streamed = streamed
        self._go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = False
        self._prompt_tokens = 0
        self._overhead = 0
        self._token_s = 0.0
        self._entry = Entry.FULL

    def enter(self, tenant: str, decision: Decision, endpoint: str, body_bytes: int) -> None:
        """Ask for a place; the amount of work is taken from the decision."""
        self._prompt_tokens = decision.prompt_tokens or body_bytes // _BYTES_A_TOKEN
        matched = 0
        # A request that a peer handed back may come to an endpoint that was no candidate.
        weighed = decision.candidate(endpoint)
        if weighed is not None:
            matched, self._token_s = weighed.matched_tokens, weighed.s_per_token
            self._overhead = round(weighed.overhead_s / weighed.s_per_token)
            self._turns.resize(endpoint, weighed.s_per_token)
        work = self._prompt_tokens - matched + self._overhead
        self._entry = self._queue.enter(self, tenant, work, self._turns.now())
        if self._entry is Entry.GO:
            self.go()

    @property
    def full(self) -> bool:
        """Whether the queue had no place for this attempt."""
        return self._entry is Entry.FULL

    async def come(self) -> None:
        """Wait until the queue releases this attempt to the engine."""
        await self._go

    def go(self) -> None:
        """Release this attempt to the engine: its turn has come."""
        if not self._go.done():
            self._go.set_result(None)
        if not self._streamed:
            through_s = self._queue.ahead_tokens * self._token_s
            asyncio.get_running_loop().call_later(through_s, self.first_token)

    def first_token(self) -> None:
        """Note that the engine has finished this attempt's prefill."""
        self._began = True
        self._turns.release(self._queue.first_token(self, self._turns.now()))

    def over(self, outcome: Outcome) -> None:
        """Note that the attempt has ended; the computed tokens are charged, as far as they are known.

        A client that leaves while the engine computes is charged too; otherwise a tenant could cancel to pay nothing.
        """
        computed = 0 if outcome.kind in _NOTHING_COMPUTED and not self._began else None
        if outcome.cached_tokens is not None:
            computed = max(1, self._prompt_tokens - outcome.cached_tokens) + self._overhead
        self._turns.release(self._queue.leave(self, self._turns.now(), computed))


class Turns:
    """The queues of a sidecar, by endpoint; each is made when it is first needed."""

    def __init__(self, config: TenantsConfig, now: Callable[[], float]) -> None:
        self._config = config
        self.now = now
        self.queues: dict[str, FairQueue] = {}
        self._token_s: dict[str, float] = {}

    def turn(self, endpoint: str, streamed: bool) -> Turn:
        """Return a new turn, not yet entered, in the queue of a local endpoint."""
        queue = self.queues.get(endpoint)
        if queue is None:
            settings = FairSettings(self._config.window_tokens, 1, self._config.weights, self._config.max_held)
            queue = self.queues[endpoint] = FairQueue(settings)
            self._token_s[endpoint] = 0.0
        return Turn(self, queue, streamed)

    def slack_s(self, tenant: str) -> float:
        """Seconds of booked work, at every local endpoint, that a request of this tenant would overtake."""
        return min((queue.overtaken(tenant) * self._token_s[name] for name, queue in self.queues.items()), default=0.0)

    def resize(self, endpoint: str, s_per_token: float) -> None:
        """Make the window fit the engine's speed."""
        queue = self.queues[endpoint]
        self._token_s[endpoint] = s_per_token
        wanted = max(self._config.window_tokens, round(self._config.window_s / s_per_token))
        if wanted != queue.window_tokens:
            self.release(queue.resize(wanted, self.now()))

    def release(self, turns: Sequence[Hashable]) -> None:
        """Release these turns to the engine."""
        for turn in turns:
            assert isinstance(turn, Turn)
            turn.go()

    def stats(self) -> dict[str, Any]:
        """Return the waiting requests by endpoint, as JSON values."""
        return {
            endpoint: {
                "held": queue.held,
                "ahead_tokens": queue.ahead_tokens,
                "window_tokens": queue.window_tokens,
                "tenants": [row._asdict() for row in queue.stats()],
            }
            for endpoint, queue in self.queues.items()
        }
