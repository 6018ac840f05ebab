"""A fleet that serves requests in virtual time, and somebody in its network who does not mean well.

The fleet is the simulator's: real nodes, engines with caches and queues. The hostile member knows the secret, proves
its own life as nodes do, and says what an attack makes it say. The outsider has no secret, and hears every datagram.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from prefixroute import POLICIES, Datagram, Node, Outcome
from prefixroute.keys.chain import wire_key
from prefixroute.replication.wire import Kind, Message, Stamp, Update, VectorEntry, decode, encode, encode_part
from prefixroute.sim.serving.cells import CellSettings, trace_of
from prefixroute.sim.serving.loop import Attempt, Gossiping, Job, ServingSettings
from prefixroute.sim.serving.workloads import ArrivalTrace

EVIL = "evil"
CELL = CellSettings(4, "zipf1.5", 0.5, 0.2, 0.9, 0.002, 90)
"""A fleet at nine tenths of its load without routing: one that loses a tenth of its throughput falls behind."""


class Attacker:
    """Says things to the nodes of a fleet. `rng` is its only chance."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.rng = random.Random(7)
        self.tape: list[tuple[str, str, bytes]] = []
        """Every datagram so far: (from, to, bytes)."""
        self.heard: list[bytes] = []
        """What nodes sent to it."""
        self.lives: dict[str, int] = {}
        self.proved: set[str] = set()
        self._domain = fleet.trace.domain
        self._sent = 0

    def say(
        self,
        to: str,
        kind: Kind,
        vector: Iterable[VectorEntry] = (),
        updates: Iterable[Update] = (),
        *,
        sender: str = EVIL,
        source: object = EVIL,
        life: int = 666,
        **head: Any,
    ) -> None:
        """Send one datagram under a right tag."""
        self._sent += 1
        stamp = Stamp(life, self._sent, self.lives.get(to, 0))
        parts = [encode_part(entry) for entry in vector], [encode_part(update) for update in updates]
        domain = self._domain
        data = encode(kind, domain.fingerprint, domain.secret, Message(sender, **head), *parts, stamp)
        self.fleet.inject(to, data, source)

    def greet(self) -> None:
        """Prove this member's life to every node."""
        for name in self.fleet.names:
            if name not in self.proved:
                self.say(name, Kind.SYN, nonce=1)

    def take(self, source: str, data: bytes) -> None:
        """Hear a node: answer its challenge, as a node would."""
        self.heard.append(data)
        message = decode(data, self._domain.secret).message
        self.lives[source] = message.life
        if message.nonce and data[4] == Kind.SYN_ACK:
            self.proved.add(source)
            self.say(source, Kind.ACK, echo=message.nonce)


Attack = Callable[[Attacker, float], None]


class Fleet(Gossiping):
    """A run under attack: `attack(attacker, now)` is called every `every_s` seconds while requests are served."""

    def __init__(
        self, trace: ArrivalTrace, settings: ServingSettings, attack: Attack | None, every_s: float = 1.0
    ) -> None:
        super().__init__(trace, settings, 1, POLICIES["rent"])
        self._attack = attack
        self._every_s = every_s
        self.attacker = Attacker(self)
        self.tried_at: list[float] = []
        """When requests were sent to the hostile one."""

    def start(self, i: int, incarnation: int, now: float) -> Node:
        node = super().start(i, incarnation, now)
        if self._attack is not None:
            node.add_peer(EVIL, EVIL, now)
        return node

    def begin(self) -> None:
        super().begin()
        if self._attack is not None:
            self.plan(0.0, self._strike, None)

    def settle(self, seconds: float) -> None:
        """Let the fleet alone for a while: nobody attacks, and nobody asks for anything."""
        self._attack, until = None, self.now + seconds
        while self._agenda.next_at() <= until:
            self._agenda.step()

    def all_keys(self) -> set[int]:
        """The wire keys of all prompts."""
        chains = {id(arrival.prompt): arrival.prompt.chain for arrival in self.trace.arrivals}.values()
        return {wire_key(chain.key(depth)) for chain in chains for depth in range(1, chain.depth + 1)}

    def _strike(self, _: None, now: float) -> None:
        if self._attack is None:
            return
        self.attacker.greet()
        self._attack(self.attacker, now)
        self.plan(now + self._every_s, self._strike, None)

    def carry(self, i: int, now: float) -> None:
        kept: list[Datagram] = []
        for datagram in self.nodes[i].datagrams_to_send(now):
            address = str(datagram.address)
            self.attacker.tape.append((self.names[i], address, datagram.data))
            if address in self._index:
                kept.append(datagram)
            elif address == EVIL:
                self.attacker.take(self.names[i], datagram.data)
        for address, data in kept:
            j = self._index[str(address)]
            self.plan(now + self.settings.delay(i, j), self._deliver, (j, i, data))

    def inject(self, to: str, data: bytes, source: object) -> None:
        """Let a node hear bytes now."""
        i = self._index[to]
        self.nodes[i].receive_datagram(data, source, self.now)  # type: ignore[arg-type]
        self.carry(i, self.now)
        if self.nodes[i].next_timer() < self._due[i]:
            self._wind(i, self.now)

    def route(self, job: Job, now: float) -> int:
        job.decision = self.nodes[job.origin].route(job.arrival.prompt.chain, now)
        return self._going(job, job.decision.target, now)

    def _going(self, job: Job, target: str | None, now: float) -> int:
        """What goes to the hostile one is refused, or goes nowhere, and goes to the next fallback."""
        while target is not None and target not in self._target:
            self.tried_at.append(now)
            assert job.decision is not None
            target = self.nodes[job.origin].report(job.decision, Outcome.failed("refused"), now, endpoint=target)
        return job.origin if target is None else self._target[target]

    def elsewhere(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        job = attempt.job
        if job.answered or job.origin != attempt.origin or job.tries != attempt.number:
            return
        assert job.decision is not None
        node = self.nodes[job.origin]
        following = node.report(job.decision, outcome, now, endpoint=self.endpoints[attempt.target])
        self.send(job, self._going(job, following, now), now)


def fleet(attack: Attack | None, cell: CellSettings = CELL, every_s: float = 1.0) -> Fleet:
    """Make a fleet of a cell under an attack, not run yet."""
    trace = trace_of(cell, 1)
    return Fleet(trace, cell.serving(trace), attack, every_s)
