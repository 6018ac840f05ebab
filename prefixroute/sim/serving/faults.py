"""Serving under faults: crashes, lost and repeated forwards, nodes that are silent, refuse, or lie.

Rules:
1. When a node crashes, its clients send their open requests to another node after the time-out.
2. A message to a node that is down is lost. A node comes back with an empty cache, as a new incarnation.
3. A forward without an answer in `timeout_s` is reported as timed out; the request then goes where the node says.
4. An answer is the hash of a prompt: a request is well served when it gets one answer, the hash of its own prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from prefixroute import BlocksRemoved, BlocksStored, EngineBatch, LoadReport, Outcome, StreamRestarted, UsageError

from .loop import Attempt, Gossiping, Job, MakePolicy, ServedRequests, ServingSettings
from .workloads import ArrivalTrace

KINDS = ("crash", "silent", "refuse", "hide_load", "claim_all", "cold", "slow")

SLOWED = 6.0
"""Factor of the service time of a slow node's engine."""


class Fault(NamedTuple):
    """Something wrong with one node from `begin_s` until `end_s`.

    ``crash``: the node is down. ``silent``: it gossips, but answers no forward. ``refuse``: it refuses forwards.
    ``hide_load``: it advertises that it is idle, and as fast as before. ``claim_all``: it publishes every prompt of the
    trace as held, but caches nothing. ``cold``: it caches nothing, and publishes that. ``slow``: its engine takes
    `SLOWED` times as long, and its node learns that. Times are seconds.
    """

    kind: str
    node: int
    begin_s: float
    end_s: float = float("inf")


class Forward(NamedTuple):
    """A forward that was tried."""

    at: float
    origin: int
    target: int


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """Faults of nodes, and the shares of forwards, 0 to 1, that are lost and repeated."""

    faults: Sequence[Fault] = ()
    lost: float = 0.0
    repeated: float = 0.0

    def __post_init__(self) -> None:
        for fault in self.faults:
            if fault.kind not in KINDS or fault.begin_s >= fault.end_s:
                raise UsageError(f"a fault is one of {', '.join(KINDS)} and ends after it begins, not {fault}")


def answer(tokens: memoryview) -> str:
    """Return what an engine answers to a prompt."""
    return blake2b(tokens, digest_size=8).hexdigest()


class Faulty(Gossiping):
    """A run with faults; `answers[i]` lists the answers that the client of request i accepted: one, if all is well."""

    def __init__(
        self, trace: ArrivalTrace, settings: ServingSettings, seed: int, make_policy: MakePolicy, faults: FaultSettings
    ) -> None:
        super().__init__(trace, settings, seed, make_policy)
        self.faults = faults
        self.answers: list[list[str]] = [[] for _ in trace.arrivals]
        self.tried: list[Forward] = []
        self._wrong: dict[str, set[int]] = {kind: set() for kind in KINDS}
        self._open: set[Job] = set()
        self._capacity = 0
        self._lives = [1] * settings.nodes

    def begin(self) -> None:
        """Start the nodes, and plan the faults."""
        super().begin()
        for fault in self.faults.faults:
            self.plan(fault.begin_s, self._goes_wrong, fault)
            if fault.end_s < float("inf"):
                self.plan(fault.end_s, self._comes_right, fault)

    def _goes_wrong(self, fault: Fault, now: float) -> None:
        i = fault.node
        self._wrong[fault.kind].add(i)
        if fault.kind == "crash":
            self.engines[i].crash()
            self._due[i] = float("inf")
            for job in sorted((job for job in self._open if job.origin == i), key=lambda job: job.index):
                job.origin = -1
                self.plan(now + self.settings.timeout_s, self._arrive, job)
        elif fault.kind == "slow":
            server = self.engines[i].server
            server.speed = server.speed.slower(SLOWED)
        elif fault.kind in ("claim_all", "cold"):
            # The cache is emptied without an event to the node.
            cache = self.engines[i].cache
            cache.clear()
            self._capacity, cache.capacity = cache.capacity, 0
            if fault.kind == "claim_all":
                self._claim(i, now)
            else:
                self.nodes[i].apply(self.endpoints[i], EngineBatch((StreamRestarted(),)), now)

    def _comes_right(self, fault: Fault, now: float) -> None:
        i = fault.node
        self._wrong[fault.kind].discard(i)
        if fault.kind == "crash":
            self._lives[i] += 1
            self.nodes[i] = self.start(i, self._lives[i], now)
            for j, name in enumerate(self.names):
                if i != j:
                    self.nodes[i].add_peer(name, name, now)
            self._due[i] = now
            self.plan(now, self._timer, i)
        elif fault.kind == "slow":
            self.engines[i].server.speed = self.settings.speed_of(i)
        elif fault.kind in ("claim_all", "cold"):
            self.engines[i].cache.capacity = self._capacity
            self.nodes[i].apply(self.endpoints[i], EngineBatch((StreamRestarted(),)), now)

    def _claim(self, i: int, now: float) -> None:
        size, told = self.trace.domain.block_size, set()
        for arrival in self.trace.arrivals:
            blocks = arrival.prompt.blocks
            if blocks and blocks[-1] not in told:
                told.add(blocks[-1])
                stored = BlocksStored(blocks, None, arrival.prompt.tokens[: len(blocks) * size], size)
                self.nodes[i].apply(self.endpoints[i], EngineBatch((stored,)), now)

    # --- a request's way, with what can go wrong -----------------------------------------------------------

    def _arrive(self, job: Job, now: float) -> None:
        down, n = self._wrong["crash"], self.settings.nodes
        if job.answered:
            return
        first = job.arrival.origin % n
        alive = [(first + k) % n for k in range(n) if (first + k) % n not in down]
        if not alive:
            self.plan(now + self.settings.timeout_s, self._arrive, job)
            return
        job.origin = alive[0]
        self._open.add(job)
        super()._arrive(job, now)

    def send(self, job: Job, target: int, now: float) -> None:
        """Send a request to a node; a forward may be lost or repeated, and is given up after the time-out."""
        if target == job.origin:
            super().send(job, target, now)
            return
        self.tried.append(Forward(now, job.origin, target))
        job.tries += 1
        attempt = Attempt(job, target, now)
        self.served.counts["forwards"] += 1
        at = now + self.settings.delay(job.origin, target)
        if self.rng.random() >= self.faults.lost:
            self.plan(at, self._reach, attempt)
        if self.rng.random() < self.faults.repeated:
            self.plan(at, self._reach, attempt)
        self.plan(now + self.settings.timeout_s, self._give_up, attempt)

    def _reach(self, attempt: Attempt, now: float) -> None:
        i = attempt.target
        if i in self._wrong["crash"] or i in self._wrong["silent"]:
            return
        if i in self._wrong["refuse"]:
            self.plan(now + self.settings.delay(i, attempt.origin), self._refused, attempt)
            return
        # A repeated forward is served twice, so each copy is an attempt of its own.
        again = Attempt(attempt.job, i, attempt.sent_at)
        again.origin, again.number, again.budget_s = attempt.origin, attempt.number, attempt.budget_s
        super()._reach(again, now)

    def _refused(self, attempt: Attempt, now: float) -> None:
        self.elsewhere(attempt, Outcome.refused("draining"), now)

    def _give_up(self, attempt: Attempt, now: float) -> None:
        self.elsewhere(attempt, Outcome.timed_out(), now)

    def admitted(self, attempt: Attempt, batch: Any, now: float) -> None:
        """Give the node its engine's events; a node that claims every prompt is not told of removals."""
        if attempt.target in self._wrong["claim_all"]:
            batch = EngineBatch(tuple(event for event in batch.events if not isinstance(event, BlocksRemoved)))
        super().admitted(attempt, batch, now)

    def accept(self, attempt: Attempt, now: float) -> bool:
        """Ask the target's node; a node that hides its load removes the request from its ledger at once."""
        accepted = super().accept(attempt, now)
        if accepted and attempt.target in self._wrong["hide_load"] and attempt.decision is not None:
            self.nodes[attempt.target].report(attempt.decision, Outcome.cancelled(), now)
        return accepted

    def _first_token(self, attempt: Attempt, now: float) -> None:
        if attempt.target not in self._wrong["silent"] or attempt.target == attempt.origin:
            super()._first_token(attempt, now)

    def _reply(self, came: tuple[Attempt, LoadReport | None], now: float) -> None:
        attempt, _ = came
        job = attempt.job
        if attempt.origin != job.origin:
            self.served.counts["lost_replies"] += 1
            return
        if not job.answered:
            self.answers[job.index].append(answer(job.arrival.prompt.tokens))
            self._open.discard(job)
        super()._reply(came, now)


def served_once(run: Faulty, served: ServedRequests) -> bool:
    """Return whether every request has exactly one answer, and the right one."""
    expected = [[answer(arrival.prompt.tokens)] for arrival in run.trace.arrivals]
    return run.answers == expected and served.counts["answered"] == len(expected)
