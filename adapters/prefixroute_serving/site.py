"""What the parts of one running sidecar share: the node, the engine, the connections, and what has been counted.

Rules:
1. `Sidecar` makes the site when it starts; exchanges and pages get it, and know nothing of the sidecar.
2. All of it lives in one event loop, and nothing of it is shared between threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import httpx

from prefixroute import Decision, FairQueue, Node

from .attach import Attachment
from .callers import Callers
from .carried_tokens import TokenCarrier
from .http_client import HttpClient
from .introspection import Echo, WallClock
from .sidecar_config import SidecarConfig
from .sockets import CountingTransport
from .turns import Turns

_KEPT_DECISIONS: Final = 256
_KEPT_TIMES: Final = 100_000


@dataclass(slots=True)
class DecisionLog:
    """The last decisions for requests of clients, oldest first, and their durations in microseconds."""

    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=_KEPT_DECISIONS))
    took_us: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))

    def add(self, decision: Decision, took_us: float) -> None:
        """Keep a decision, and drop the oldest beyond the bound."""
        self.decisions.append(decision)
        self.took_us.append(took_us)

    def last(self, count: int) -> list[Decision]:
        """The last `count` decisions, oldest first."""
        return list(self.decisions)[-count:] if count > 0 else []


@dataclass(slots=True)
class Site:
    """One running sidecar, as its exchanges and pages see it.

    `now` returns the node's time, in seconds; `began` is the time at which the sidecar started. `client` carries
    prompts, `http` all other calls to the engine. `turns` is None where tenants take no turns. Prompts may be sent to
    `hosts` only, or anywhere if it is empty. `readers` are the peers that read the tokens carried by a forward.
    """

    config: SidecarConfig
    node: Node
    now: Callable[[], float]
    engine: Attachment
    client: HttpClient
    http: httpx.AsyncClient
    transport: CountingTransport
    echo: Echo
    wall_clock: WallClock
    carrier: TokenCarrier
    callers: Callers
    turns: Turns | None
    began: float
    hosts: frozenset[str] = frozenset()
    log: DecisionLog = field(default_factory=DecisionLog)
    readers: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def endpoints(self) -> Mapping[str, int]:
        """The local endpoints, and the rank of each."""
        return self.engine.endpoints

    @property
    def queues(self) -> Mapping[str, FairQueue]:
        """The fair queues before the local engine, by endpoint; none where tenants take no turns."""
        return self.turns.queues if self.turns is not None else {}

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The secrets that authenticate: the first one signs, a signature under any of them is accepted."""
        return self.echo.secrets

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Use these secrets from now on, everywhere. Raises UsageError as `Node.set_secrets`; then nothing changes."""
        self.node.set_secrets(secrets)
        self.echo.secrets = tuple(secrets)
        for seals in (self.carrier.seals, self.callers.seals):
            seals.set_secrets(secrets)

    def count(self, what: str) -> None:
        """Add one to the counter `what` of the statistics."""
        self.counts[what] = self.counts.get(what, 0) + 1
