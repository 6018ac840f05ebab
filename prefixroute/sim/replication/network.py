"""Real nodes over a network in virtual time: links, partitions, pauses, restarts, clocks; and an oracle that looks on.

Rules:
1. Everything random comes from one seed, and time is the agenda's: the same calls give the same bytes.
2. After everything that a node does, `Oracle.acted` checks it, and nobody else: work follows what happens, not the
   number of nodes.
3. A node reads its own clock: virtual time plus an offset that jumps forward only. A wall clock that goes back shows as
   an incarnation that goes back when the node starts anew.
4. A datagram still arrives when its sender has stopped; it goes to the node that has the address at that moment. Links
   and partitions are between nodes, wherever they are. A node's address is its name, unless it is told another.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import combinations
from typing import NamedTuple

import numpy as np

from prefixroute import Domain, Node, NodeEvent, NodeSettings

from ..clock import Agenda
from .chain_engine import Engine
from .links import CALM, Link
from .oracle import InvariantError, Oracle, Violation

DOMAIN = Domain("model", "tokenizer", secret=b"secret")

STORY_EVENTS = 20
"""How many of the last deliveries, and of the last events that nodes told, are kept for a story."""

STUCK_TIMER = 1000
"""Timers handled at one node at one moment: more is a node that waits for itself."""


class Happening(NamedTuple):
    """One thing that happened, for stories: `what` to node `node`, with `other` (a node, an event) and bytes."""

    at: float
    what: str
    node: str
    other: object
    size: int

    def __str__(self) -> str:
        size = f" {self.size} B" if self.size else ""
        return f"{self.at:9.3f}  {self.node:<4} {self.what} {self.other}{size}"


class Host:
    """A running node and what surrounds it: its clock, its timer, what waits in its socket while it is paused."""

    __slots__ = ("address", "buffer", "buffers", "clock", "due", "node", "offset", "own", "stall", "timers")

    def __init__(self, node: Node, address: str, own: set[str], offset: float, clock: float) -> None:
        self.node = node
        self.address = address
        self.stall: tuple[float, float] | None = None
        """Seconds that it runs and stands still in turn, None while it does not stall."""
        self.own = own
        self.offset = offset
        self.clock = clock
        self.due: float | None = None
        self.buffers = True
        self.buffer: list[tuple[bytes, str, str]] = []
        self.timers = (0.0, 0)


class Network:
    """Nodes, their engines, and the datagrams under way."""

    def __init__(
        self, seed: int, link: Link = CALM, settings: NodeSettings | None = None, *, trace: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self._seed = seed
        self._births: Counter[str] = Counter()
        self.link = link
        self.links: dict[tuple[str, str], Link] = {}
        self.settings = settings or NodeSettings()
        self.hosts: dict[str, Host] = {}
        self.addresses: dict[str, str] = {}
        """Address -> name of the running node that has it."""
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, Engine] = {}
        self.oracle = Oracle()
        self.told: dict[str, list[NodeEvent]] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.sent_datagrams: Counter[str] = Counter()
        self.bytes_of_kind: Counter[tuple[str, int]] = Counter()
        self.datagrams_of_kind: Counter[tuple[str, int]] = Counter()
        self.blocked: set[tuple[str, str]] = set()
        self.paused: set[str] = set()
        self.deliveries = 0
        self.last_arrival = 0.0
        self._heard: deque[Happening] = deque(maxlen=STORY_EVENTS)
        self._tales: deque[Happening] = deque(maxlen=STORY_EVENTS)
        self._trace = blake2b() if trace else None
        self._agenda = Agenda(0.0)

    @property
    def now(self) -> float:
        """Virtual time, in seconds from the beginning of the run."""
        return self._agenda.now

    # --- nodes ---------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        incarnation: int = 1,
        endpoints: int = 1,
        domain: Domain = DOMAIN,
        settings: NodeSettings | None = None,
        peers: Iterable[str] | None = None,
        offset: float = 0.0,
        mutual: bool = True,
        address: str = "",
    ) -> Node:
        """Start a node, or start it anew; it and all others (or `peers`) become peers of each other.

        Without `mutual` the others are not told: they learn of it, if their settings let them.
        """
        address = address or name
        self.addresses[address] = name
        rng = self._generator(name)
        clock = self.now + offset
        node = Node(name, domain, rng=rng, now=clock, settings=settings or self.settings)
        own = set()
        for i in range(endpoints):
            endpoint = node.add_endpoint(str(i), url=f"http://{name}:{i}", incarnation=incarnation, now=clock)
            self.engines[endpoint] = Engine(node, endpoint, self._generator(endpoint))
            own.add(endpoint)
        for other in list(self.nodes) if peers is None else peers:
            if other != name:
                node.add_peer(other, self.address(other), clock)
                if mutual and other in self.nodes:
                    self.nodes[other].add_peer(name, address, self.read(other))
        self.oracle.started(name, own)
        host = self.hosts[name] = Host(node, address, own, offset, clock)
        self.nodes[name] = node
        self.told.setdefault(name, [])
        self._acted(name, host)
        return node

    def add_endpoint(self, name: str, endpoint: str, incarnation: int) -> str:
        """Let a running node own one more endpoint; return its id."""
        host = self.hosts[name]
        made = host.node.add_endpoint(
            endpoint, url=f"http://{name}:{endpoint}", incarnation=incarnation, now=self.read(name)
        )
        self.engines[made] = Engine(host.node, made, self._generator(made))
        host.own.add(made)
        self.oracle.added(made)
        self._acted(name, host)
        return made

    def remove_endpoint(self, name: str, endpoint: str) -> None:
        """Let a running node own an endpoint no longer."""
        host = self.hosts[name]
        host.own.discard(endpoint)
        del self.engines[endpoint]
        self.oracle.removed(name, endpoint)
        self.act(name, lambda node, now: node.remove_endpoint(endpoint, now))

    def leave(self, name: str) -> None:
        """Let a node take its leave of all others, then end it."""
        host = self.hosts[name]
        for endpoint in host.own:
            self.oracle.removed(name, endpoint)
        host.own = set()
        self.act(name, lambda node, now: node.leave(now))
        self.stop(name)

    def stop(self, name: str) -> None:
        """End a node without a word."""
        host = self.hosts.pop(name)
        del self.addresses[host.address], self.nodes[name]
        for endpoint in [endpoint for endpoint, engine in self.engines.items() if engine.node is host.node]:
            del self.engines[endpoint]
        self.paused.discard(name)
        self.oracle.stopped(name)

    def address(self, name: str) -> str:
        """Return where a node is; a name that does not run is its own address."""
        host = self.hosts.get(name)
        return host.address if host is not None else name

    def _generator(self, name: str) -> random.Random:
        """One of its own for each life of a node or an engine: what others draw does not change what it draws."""
        self._births[name] += 1
        return random.Random(f"{self._seed} {name} {self._births[name]}")

    def act(self, name: str, action: Callable[[Node, float], object]) -> None:
        """Let the caller do something to a node: `action(node, its clock)`, watched like everything else."""
        host = self.hosts[name]
        self._guarded(name, action, host.node, self.read(name))
        self._acted(name, host)

    def read(self, name: str) -> float:
        """Read a node's own clock."""
        host = self.hosts[name]
        host.clock = max(host.clock, self.now + host.offset)
        return host.clock

    def jump(self, name: str, seconds: float) -> None:
        """Let a node's clock jump forward."""
        self.hosts[name].offset += seconds
        self._plan(name, self.hosts[name])

    def pause(self, name: str, *, buffers: bool = True) -> None:
        """Let a node stand still; what comes for it meanwhile waits, or is lost without `buffers`."""
        self.paused.add(name)
        self.hosts[name].buffers = buffers

    def resume(self, name: str) -> None:
        """Let a node go on."""
        self.paused.discard(name)
        if name in self.hosts:
            self.hosts[name].stall = None

    def stall(self, name: str, run_s: float, stand_s: float) -> None:
        """Let a node run for `run_s` and stand still for `stand_s`, in turn, until it is told to go on."""
        host = self.hosts[name]
        if host.stall is None:
            self._agenda.plan(self.now + run_s, self._stall, host)
        host.stall = run_s, stand_s

    def _stall(self, host: Host, now: float) -> None:
        name = host.node.node
        if host.stall is None or self.hosts.get(name) is not host:
            return
        stands, (run_s, stand_s) = name not in self.paused, host.stall
        if stands:
            self.pause(name)
        else:
            self.paused.discard(name)
            self._wake()
        self._agenda.plan(now + (stand_s if stands else run_s), self._stall, host)

    # --- paths ---------------------------------------------------------------------------------------------

    def block(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Let nothing through between these pairs, neither new datagrams nor those under way."""
        for one, other in pairs:
            self.blocked |= {(one, other), (other, one)}

    def block_one_way(self, source: str, to: str) -> None:
        """Let nothing through from one node to another; the way back stays open."""
        self.blocked.add((source, to))

    def split(self, *groups: Iterable[str]) -> None:
        """Let nothing through between the groups."""
        for one, other in combinations([list(group) for group in groups], 2):
            self.block((a, b) for a in one for b in other)

    def heal(self) -> None:
        """Let everything through again."""
        self.blocked.clear()

    def calm(self) -> None:
        """End every fault: links, partitions, pauses."""
        self.link = CALM
        self.links.clear()
        self.blocked.clear()
        self.paused.clear()
        for host in self.hosts.values():
            host.stall = None

    # --- time ----------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let virtual time pass: timers fire and datagrams arrive, each at its moment. Raises `InvariantError`."""
        until = self.now + seconds
        self._wake()
        while self._agenda.next_at() <= until:
            self._agenda.step()
        self._agenda.skip_to(until)

    def inject(self, to: str, data: bytes, source: str) -> None:
        """Deliver bytes at once to the node `to`, from the address `source`."""
        self._deliver((self.address(to), data, source, self.addresses.get(source, source)), self.now)

    def recent(self) -> list[Happening]:
        """Return the last deliveries, and the last events that nodes told, in order of time."""
        return sorted([*self._heard, *self._tales], key=lambda happening: happening.at)

    def trace(self) -> str:
        """Return a hash of all datagrams sent so far, with their times and addresses; "" unless asked for."""
        return self._trace.hexdigest() if self._trace is not None else ""

    def _wake(self) -> None:
        """Plan the timers of nodes that run; one that was paused also finds the datagrams in its socket's buffer.

        A resumed process may see its timer or its socket first: a draw decides.
        """
        for name, host in self.hosts.items():
            if name in self.paused:
                continue
            if not host.buffer:
                self._plan(name, host)
                continue
            timer_first = self.rng.random() < 0.5
            if timer_first:
                self._plan(name, host)
            for data, source, sender in host.buffer:
                self._send(self.now, host.address, data, source, sender)
            host.buffer = []
            if not timer_first:
                host.due = None
                self._plan(name, host)

    def _plan(self, name: str, host: Host) -> None:
        due = max(host.node.next_timer() - host.offset, self.now)
        if due != host.due:
            host.due = due
            self._agenda.plan(due, self._timer, name)

    def _timer(self, name: str, now: float) -> None:
        host = self.hosts.get(name)
        if host is None or host.due != now:
            return
        host.due = None
        if name in self.paused:
            return
        if host.node.next_timer() - host.offset > self.now + 1e-6:
            # Somebody else handled it.
            self._plan(name, host)
            return
        # Rounding must not make a timer due just after the reading that it was planned for.
        clock = host.clock = max(self.read(name), host.node.next_timer())
        moment, count = host.timers
        host.timers = (self.now, count + 1) if moment == self.now else (self.now, 1)
        if host.timers[1] > STUCK_TIMER:
            raise InvariantError(Violation("timer", name, "", self.now, "its timer is due again and again"))
        self._guarded(name, Node.handle_timer, host.node, clock)
        self._acted(name, host)

    def _deliver(self, datagram: tuple[str, bytes, str, str], now: float) -> None:
        address, data, source, sender = datagram
        to = self.addresses.get(address, "")
        host = self.hosts.get(to)
        if host is None or (sender, to) in self.blocked:
            return
        if to in self.paused:
            if host.buffers:
                host.buffer.append((data, source, sender))
            return
        self.deliveries += 1
        self._heard.append(Happening(self.now, "hears from", to, source, len(data)))
        self._guarded(to, Node.receive_datagram, host.node, data, source, self.read(to))
        self._acted(to, host)

    def _guarded(self, name: str, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except InvariantError:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            raise InvariantError(Violation("exception", name, "", self.now, message)) from error

    def _acted(self, name: str, host: Host) -> None:
        """Carry what the node has to send, and check what it did."""
        node = host.node
        out = node.datagrams_to_send(host.clock)
        told = node.events()
        if told:
            self.told[name] += told
            self._tales.extend(Happening(self.now, "tells", name, event, 0) for event in told)
        self.oracle.acted(name, node, host.own, out, told, self.now)
        for address, data in out:
            self._carry(name, self.addresses.get(str(address), ""), data)
        if name not in self.paused:
            self._plan(name, host)

    def _carry(self, source: str, to: str, data: bytes) -> None:
        # The fifth byte of a datagram is its kind (docs/wire.md).
        kind, size = data[4], len(data)
        self.sent_bytes[source] += size
        self.sent_datagrams[source] += 1
        self.bytes_of_kind[source, kind] += size
        self.datagrams_of_kind[source, kind] += 1
        if self._trace is not None:
            self._trace.update(f"{self.now!r} {source} {to} {size} ".encode())
            self._trace.update(data)
        if (source, to) in self.blocked or to not in self.hosts:
            return
        link = self.links.get((source, to), self.link) if self.links else self.link
        for delay in link.delays(self.rng):
            self._send(self.now + delay, self.hosts[to].address, data, self.hosts[source].address, source)

    def _send(self, at: float, to: str, data: bytes, source: str, sender: str) -> None:
        self._agenda.plan(at, self._deliver, (to, data, source, sender))
        if at > self.last_arrival:
            self.last_arrival = at

    # --- quiet ---------------------------------------------------------------------------------------------

    def lagging(self) -> list[tuple[str, str]]:
        """Return (node, endpoint) whose replica is not the live owner's present published set."""
        digests = {name: node.digests() for name, node in self.nodes.items()}
        found = []
        for owner, host in self.hosts.items():
            for endpoint in sorted(host.own):
                own = digests[owner][endpoint]
                for name, theirs in digests.items():
                    held = theirs.get(endpoint)
                    if held is None or held[:2] != own[:2] or not np.array_equal(held.keys, own.keys):
                        found.append((name, endpoint))
        return found

    def ghosts(self) -> list[tuple[str, str]]:
        """Return (node, endpoint) where a node knows an endpoint that nobody alive owns."""
        alive = {endpoint for host in self.hosts.values() for endpoint in host.own}
        return [
            (name, endpoint)
            for name, node in self.nodes.items()
            for endpoint in node.digests()
            if endpoint not in alive
        ]

    def unheard(self) -> list[tuple[str, str]]:
        """Return (node, endpoint) where a live endpoint of another node is no candidate."""
        alive = {endpoint for host in self.hosts.values() for endpoint in host.own}
        return [
            (name, row.endpoint)
            for name, host in self.hosts.items()
            for row in host.node.stats(self.read(name)).endpoints
            if row.endpoint in alive and not row.local and not row.usable
        ]

    def check_all(self) -> None:
        """Run every node's own O(n) check."""
        for node in self.nodes.values():
            node._check()
