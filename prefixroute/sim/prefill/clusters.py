"""Two clusters in virtual time: arrivals, local or pool prefill, KV over a shared link, decode slots.

    arrival -> prefill queue of its role -> [KV over the link, from the pool] -> decode slot -> first token

Rules:
1. Each role has one queue, first come first served; a prefill node serves one prompt at a time.
2. The first token is counted when a decode slot takes the prompt, whose KV has then arrived.
3. A fixed threshold is one number; an adaptive one is set once a second by a `ThresholdController` that watches the
   link.
4. At one moment KV that crossed the link comes first, then events by their kind, in the order `_ARRIVE` to
   `_CONVERTED`.
5. Only the arrivals are random: the same arrivals give the same run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from prefixroute import UsageError
from prefixroute.plan import Backlog, ControllerSettings, Decode, Lengths, PrefillClusters, Rebalancer

from ..clock import Agenda
from .kv_link import SharedLink
from .loops import TICK_S, FastLoop


class PromptArrival(NamedTuple):
    """A prompt: when it comes, in seconds, and its uncached tokens."""

    at: float
    tokens: int


def poisson(lengths: Lengths, rate: float, requests: int, rng: random.Random) -> list[PromptArrival]:
    """Return Poisson arrivals, `rate` a second. Raises `UsageError` for a rate or a number that is not positive."""
    return bursty(lengths, rate, requests, rng, 1.0, 1.0)


def bursty(
    lengths: Lengths, rate: float, requests: int, rng: random.Random, times: float = 2.0, burst_s: float = 10.0
) -> list[PromptArrival]:
    """Return arrivals with a mean rate, a second, that alternate at random between bursts of `times` the rate and calm.

    A burst lasts `burst_s` on average. The calm after it lasts `times` as long, at a rate `times` less, which keeps the
    mean.
    """
    if not rate > 0 or requests < 1 or not times >= 1 or not burst_s > 0:
        raise UsageError("arrivals need rate > 0, requests >= 1, times >= 1 and burst_s > 0")
    fast, calm, calm_s = rate * times, rate / times, burst_s * times
    arrivals: list[PromptArrival] = []
    now, burst, until = 0.0, False, rng.expovariate(1 / calm_s) if times > 1 else inf
    while len(arrivals) < requests:
        at = now + rng.expovariate(fast if burst else calm)
        if at > until:
            now, burst = until, not burst
            until = now + rng.expovariate(1 / (burst_s if burst else calm_s))
            continue
        now = at
        arrivals.append(PromptArrival(now, lengths.draw(rng)))
    return arrivals


class LinkChange(NamedTuple):
    """A change of the link: it carries `bytes_per_s` from second `at` on."""

    at: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PrefillSetup:
    """The nodes of each role, and the threshold; with `adaptive` a controller moves the threshold from that start.

    `clusters` gives the curves and the link's nominal bandwidth; numbers of nodes are those of the set-up. With
    `rebalance_s` the slow loop plans anew every so many seconds. A node that it converts finishes its work, and then
    does no work for `convert_s`. `transfer_bytes_per_s` bounds one transfer. Raises `UsageError`.
    """

    clusters: PrefillClusters
    decode: Decode
    threshold_tokens: float
    pool_nodes: int
    prefill_nodes: int
    decode_nodes: int
    layers: int = 61
    rtt_s: float = 0.02
    transfer_bytes_per_s: float = inf
    changes: tuple[LinkChange, ...] = ()
    adaptive: ControllerSettings | None = None
    rebalance_s: float = 0.0
    convert_s: float = 20.0

    def __post_init__(self) -> None:
        if self.decode_nodes < 1 or min(self.pool_nodes, self.prefill_nodes) < 0:
            raise UsageError("a run needs decode_nodes >= 1, pool_nodes >= 0 and prefill_nodes >= 0")
        if not self.pool_nodes and not self.prefill_nodes:
            raise UsageError("a run needs a node that prefills")
        if self.rebalance_s < 0 or self.convert_s < 0:
            raise UsageError("a run needs rebalance_s >= 0 and convert_s >= 0")


class PrefillServed(NamedTuple):
    """A run, request by request in the order of arrival: seconds to first token, and whether the pool prefilled it.

    `thresholds` has (second, tokens) of every change; `sent_bytes` crossed the link until `ended_at`, in seconds.
    """

    ttft_s: list[float]
    remote: list[bool]
    thresholds: list[tuple[float, float]]
    sent_bytes: float
    ended_at: float
    in_time: int
    """Requests with a first token when the last one arrived."""


def clusters_of(setup: PrefillSetup) -> PrefillClusters:
    """Return the clusters as the set-up divides them."""
    local = setup.prefill_nodes + setup.decode_nodes
    return replace(setup.clusters, pool_nodes=setup.pool_nodes, local_nodes=local)


class _Role:
    """Nodes that prefill, the queue before them, and the number of nodes that leave the role when they are free."""

    __slots__ = ("free", "leaving", "waiting")

    def __init__(self, nodes: int) -> None:
        self.free = nodes
        self.leaving = 0
        self.waiting: deque[int] = deque()


class PrefillRun:
    """One run of a set-up over arrivals."""

    def __init__(self, setup: PrefillSetup, arrivals: Sequence[PromptArrival]) -> None:
        self._setup, self._arrivals = setup, arrivals
        clusters = setup.clusters
        self._link = SharedLink(clusters.egress_bytes_per_s, setup.layers, setup.transfer_bytes_per_s)
        self._pool, self._local = _Role(setup.pool_nodes), _Role(setup.prefill_nodes)
        self._slots = setup.decode_nodes * setup.decode.slots
        self._for_slot: deque[int] = deque()
        self._agenda = Agenda(0.0)
        self._handlers = (
            self._arrive,
            self._local_done,
            self._pool_done,
            self._arrived,
            self._decoded,
            self._change,
            self._tick,
            self._replan,
            self._converted,
        )
        self._first: list[float] = [-1.0] * len(arrivals)
        self._remote = [False] * len(arrivals)
        self._served = 0
        self._arrived_since = 0
        self._threshold = setup.threshold_tokens
        if not setup.prefill_nodes:
            self._threshold = -1.0
        elif not setup.pool_nodes:
            self._threshold = inf
        # When one role has no nodes, there are no prompts to divide.
        both = setup.pool_nodes and setup.prefill_nodes
        self._fast = (
            FastLoop(clusters_of(setup), setup.prefill_nodes, setup.threshold_tokens, setup.adaptive, self._link)
            if setup.adaptive is not None and both
            else None
        )
        self._slow = (
            Rebalancer(clusters_of(setup), setup.prefill_nodes, 0.0, setup.rebalance_s) if setup.rebalance_s else None
        )
        self.thresholds = [(0.0, self._threshold)]
        self.conversions: list[tuple[float, str]] = []

    def run(self) -> PrefillServed:
        """Run until all prompts have a first token."""
        setup, arrivals, agenda = self._setup, self._arrivals, self._agenda
        for i, change in enumerate(setup.changes):
            self._plan(change.at, _CHANGE, i)
        if self._fast is not None:
            self._plan(TICK_S, _TICK, 0)
        if self._slow is not None:
            self._plan(setup.rebalance_s, _REPLAN, 0)
        self._plan(arrivals[0].at, _ARRIVE, 0)
        in_time, last = 0, arrivals[-1].at
        while self._served < len(arrivals):
            end = self._link.next_end()
            if end <= agenda.next_at():
                agenda.skip_to(end)
                for request in self._link.ended(agenda.now):
                    self._plan(agenda.now + setup.rtt_s, _ARRIVED, request)
                continue
            agenda.step()
            if agenda.now <= last:
                in_time = self._served
        ttft = [first - arrival.at for first, arrival in zip(self._first, arrivals, strict=True)]
        return PrefillServed(ttft, self._remote, self.thresholds, self._link.sent_bytes, agenda.now, in_time)

    def _plan(self, at: float, kind: int, what: int) -> None:
        self._agenda.plan(at, self._handlers[kind], what, (kind, what))

    def _arrive(self, request: int, now: float) -> None:
        if request + 1 < len(self._arrivals):
            self._plan(self._arrivals[request + 1].at, _ARRIVE, request + 1)
        self._arrived_since += 1
        if self._slow is not None:
            self._slow.saw(self._arrivals[request].tokens)
        remote = self._arrivals[request].tokens > self._threshold
        self._remote[request] = remote
        (self._pool if remote else self._local).waiting.append(request)
        self._start(remote, now)

    def _start(self, remote: bool, now: float) -> None:
        """Give the waiting prompts of a role to its free nodes."""
        role, clusters = (self._pool if remote else self._local), self._setup.clusters
        while role.free and role.waiting:
            role.free -= 1
            request = role.waiting.popleft()
            tokens = self._arrivals[request].tokens
            seconds = (clusters.pool_prefill_s if remote else clusters.local_prefill_s)(tokens)
            if remote:
                self._link.begin(request, clusters.kv_bytes(tokens), seconds, now)
            self._plan(now + seconds, _POOL_DONE if remote else _LOCAL_DONE, request)

    def _local_done(self, request: int, now: float) -> None:
        if self._local.leaving:
            self._local.leaving -= 1
            self._become(_DECODES, now)
        else:
            self._local.free += 1
        self._start(False, now)
        self._arrived(request, now)

    def _pool_done(self, request: int, now: float) -> None:
        self._link.computed(request, now)
        self._pool.free += 1
        self._start(True, now)

    def _arrived(self, request: int, now: float) -> None:
        """Note that a prompt's KV has arrived; it is decoded as soon as there is a slot."""
        self._for_slot.append(request)
        self._decode(now)

    def _decode(self, now: float) -> None:
        while self._slots > 0 and self._for_slot:
            self._slots -= 1
            request = self._for_slot.popleft()
            self._first[request] = now
            self._served += 1
            self._plan(now + self._setup.decode.request_s, _DECODED, request)

    def _decoded(self, request: int, now: float) -> None:
        self._slots += 1
        self._decode(now)

    def _change(self, i: int, now: float) -> None:
        self._link.resize(self._setup.changes[i].bytes_per_s, now)

    def _tick(self, _: int, now: float) -> None:
        assert self._fast is not None
        clusters, arrivals = self._setup.clusters, self._arrivals
        pool, local = self._pool.waiting, self._local.waiting
        self._link.advance(now)
        backlog = Backlog(
            self._link.left_bytes + sum(clusters.kv_bytes(arrivals[i].tokens) for i in pool),
            sum(clusters.pool_prefill_s(arrivals[i].tokens) for i in pool),
            sum(clusters.local_prefill_s(arrivals[i].tokens) for i in local),
        )
        self._use(self._fast.step(now, backlog, self._arrived_since), now)
        self._arrived_since = 0
        self._plan(now + TICK_S, _TICK, 0)

    def _replan(self, _: int, now: float) -> None:
        assert self._slow is not None
        found = self._slow.step(now)
        if found is not None:
            t = found.plan.threshold_tokens
            self._use(self._fast.replan(t, found.plan.prefill_nodes) if self._fast is not None else t, now)
            if found.converted_to:
                self.conversions.append((now, found.converted_to))
                self._convert(found.converted_to, now)
        self._plan(now + self._setup.rebalance_s, _REPLAN, 0)

    def _convert(self, role: str, now: float) -> None:
        """Make a node change its role: it takes no new work, and changes when it has finished its present work."""
        if role == "prefill":
            # Decode slots are not told apart: the slots that become free next leave with the node.
            self._slots -= self._setup.decode.slots
            self._become(_PREFILLS, now + self._setup.decode.request_s)
        elif self._local.free:
            self._local.free -= 1
            self._become(_DECODES, now)
        else:
            self._local.leaving += 1

    def _become(self, role: int, now: float) -> None:
        self._plan(now + self._setup.convert_s, _CONVERTED, role)

    def _converted(self, role: int, now: float) -> None:
        if role == _PREFILLS:
            self._local.free += 1
            self._start(False, now)
        else:
            self._slots += self._setup.decode.slots
            self._decode(now)

    def _use(self, threshold: float, now: float) -> None:
        if threshold != self._threshold:
            self._threshold = threshold
            self.thresholds.append((now, threshold))


_ARRIVE, _LOCAL_DONE, _POOL_DONE, _ARRIVED, _DECODED, _CHANGE, _TICK, _REPLAN, _CONVERTED = range(9)
_PREFILLS, _DECODES = range(2)
