"""What must hold of replication, whatever happens: the oracle that looks at every node after everything it does.

| rule        | what holds                                                                                        |
|-------------|---------------------------------------------------------------------------------------------------|
| replica     | a replica at (incarnation, version) is what its owner published at that pair, keys and stride     |
| monotonic   | a replica's pair never falls, but for a loss of the replica that an event tells                   |
| budget      | a datagram fits `datagram_bytes`; what one event causes towards one address fits `burst_bytes`    |
| memory      | only endpoints that exist are known; the arrays that a node keeps are bounded by what was published |
| quiet       | some rounds after all faults end, replicas are their owners' sets, the dead are forgotten,        |
|             | and nobody alive is unheard                                                                       |
| checksum    | no checksum differs, unless two lives of an endpoint shared an incarnation                        |
| exception   | no exception comes out of a node                                                                  |
| timer       | a timer that was handled is not due again at the same moment for ever                             |

Rules of the oracle:
1. It knows what owners published from their own `Node.digests()`, never from an engine: what is published may be less.
2. A life's set travels with its owner to the incarnations that it moves to. A life that reuses an incarnation shares
   its pairs with another life: either's set is right then, until quiet.
3. It costs O(endpoints) an event, and O(keys) only for what changed.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixroute import Datagram, Digest, Node, NodeEvent, PrefixRouteError, ReplicaChanged

LOG_BYTES = 256 * 1024
"""The most that a node remembers of one endpoint's changes."""

SPARE_BYTES = 64 * 1024
"""Arrays of a node that do not belong to one endpoint."""


class Violation(NamedTuple):
    """A rule that did not hold: at which node, of which endpoint, at which virtual second."""

    rule: str
    node: str
    endpoint: str
    at: float
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: at {self.node}, of {self.endpoint or 'no endpoint'}, {self.at:.3f} s: {self.message}"


class InvariantError(PrefixRouteError):
    """A rule of replication did not hold; `violation` says which."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


class _Life:
    """What an owner published at each version of one life, under the incarnations that it went through."""

    __slots__ = ("incarnations", "sets")

    def __init__(self) -> None:
        self.incarnations: set[int] = set()
        self.sets: dict[int, tuple[int, NDArray[np.uint64]]] = {}
        """By version: the anchor stride, and the keys."""


class _Published:
    """All lives of one endpoint."""

    __slots__ = ("changed", "largest", "lives", "shared")

    def __init__(self) -> None:
        self.lives: list[_Life] = []
        self.shared = False
        """Whether two lives went through the same incarnation."""
        self.largest = 0
        self.changed = 0

    def note(self, digest: Digest) -> None:
        life = self.lives[-1]
        if digest.incarnation not in life.incarnations:
            life.incarnations.add(digest.incarnation)
            self.shared |= any(digest.incarnation in other.incarnations for other in self.lives[:-1])
        last = life.sets.get(digest.version - 1)
        self.changed += len(digest.keys) + (len(last[1]) if last is not None else 0)
        life.sets[digest.version] = digest.every, digest.keys
        self.largest = max(self.largest, len(digest.keys))

    def held(self, digest: Digest) -> bool:
        for life in self.lives:
            if digest.version not in life.sets or digest.incarnation not in life.incarnations:
                continue
            every, keys = life.sets[digest.version]
            if every == digest.every and (keys is digest.keys or np.array_equal(keys, digest.keys)):
                return True
        return False


class Oracle:
    """Watches nodes: the simulator calls `acted` after each event. Raises `InvariantError`."""

    def __init__(self) -> None:
        self.published: dict[str, _Published] = {}
        self.corrupted: set[str] = set()
        """Endpoints of which a copy was corrupted on purpose: their checksums may differ."""
        self._seen: dict[str, dict[str, Digest]] = {}
        self._mismatches: Counter[str] = Counter()

    def started(self, name: str, endpoints: Iterable[str]) -> None:
        """A node began a life, with these endpoints."""
        for endpoint in endpoints:
            self.added(endpoint)
        self._seen[name] = {}
        self._mismatches[name] = 0

    def added(self, endpoint: str) -> None:
        """An endpoint began a life at its owner."""
        self.published.setdefault(endpoint, _Published()).lives.append(_Life())

    def removed(self, name: str, endpoint: str) -> None:
        """An owner gives up an endpoint."""
        self._seen[name].pop(endpoint, None)

    def stopped(self, name: str) -> None:
        """A node's life ended."""
        self._seen.pop(name, None)

    def overlook(self, name: str, endpoint: str, node: Node) -> None:
        """Take what a node holds of an endpoint as seen, right or wrong: it was corrupted on purpose."""
        self.corrupted.add(endpoint)
        self._seen[name][endpoint] = node.digests()[endpoint]

    def acted(
        self, name: str, node: Node, own: set[str], out: list[Datagram], told: list[NodeEvent], at: float
    ) -> None:
        """Check what a node did: the datagrams that it sent, the events that it told, and what it holds now."""
        if out:
            self._budget(name, node, out, at)
        seen = self._seen[name]
        lost: tuple[str, ...] = ()
        if told:
            lost = tuple(
                event.endpoint
                for event in told
                if isinstance(event, ReplicaChanged) and event.state in ("discarded", "forgotten")
            )
            for endpoint in lost:
                seen.pop(endpoint, None)
        if node.counters["checksum_mismatches"] != self._mismatches[name]:
            self._checksum(name, node, lost, at)
        digests = node.digests()
        if len(seen) != len(digests) or seen.keys() != digests.keys():
            for endpoint in seen.keys() - digests.keys():
                if endpoint not in own:
                    raise _broken("monotonic", name, endpoint, at, "is not known any more, and no event told it")
            for endpoint in [endpoint for endpoint in seen if endpoint not in digests]:
                del seen[endpoint]
        for endpoint, digest in digests.items():
            last = seen.get(endpoint)
            if last is not None:
                if (
                    last.keys is digest.keys
                    and last.version == digest.version
                    and last.incarnation == digest.incarnation
                ):
                    continue
                if digest[:2] <= last[:2] and not (digest[:2] == last[:2] and np.array_equal(digest.keys, last.keys)):
                    raise _broken("monotonic", name, endpoint, at, f"went from {last[:2]} to {digest[:2]}")
            seen[endpoint] = digest
            published = self.published.get(endpoint)
            if published is None:
                raise _broken("memory", name, endpoint, at, "no node ever had this endpoint")
            if endpoint in own:
                published.note(digest)
            elif digest.version and not published.held(digest):
                raise _broken(
                    "replica",
                    name,
                    endpoint,
                    at,
                    f"its {len(digest.keys)} keys at {digest[:2]} are not what the owner published then",
                )

    def memory(self, name: str, node: Node, at: float) -> None:
        """Check the bytes of all arrays that a node keeps. Walks all its objects: for the end of a schedule.

        Of one endpoint there are at most its set twice over (the present one and a frozen one, or one on its way),
        changes on their way, the log, and working copies of these.
        """
        bound = SPARE_BYTES
        for endpoint in node.digests():
            published = self.published[endpoint]
            bound += 8 * 6 * published.largest + min(8 * 2 * published.changed, 2 * LOG_BYTES)
        held = held_bytes(node)
        if held > bound:
            raise _broken("memory", name, "", at, f"keeps {held} bytes of keys, more than {bound}")

    def _budget(self, name: str, node: Node, out: list[Datagram], at: float) -> None:
        settings = node.settings
        total: dict[object, int] = {}
        for address, data in out:
            if len(data) > settings.datagram_bytes:
                message = f"a datagram of {len(data)} bytes, {settings.datagram_bytes} allowed"
                raise _broken("budget", name, "", at, message)
            total[address] = total.get(address, 0) + len(data)
        if max(total.values()) > settings.burst_bytes:
            message = f"{max(total.values())} bytes to one peer at once, {settings.burst_bytes} allowed"
            raise _broken("budget", name, "", at, message)

    def _checksum(self, name: str, node: Node, lost: tuple[str, ...], at: float) -> None:
        count = node.counters["checksum_mismatches"]
        excused = [
            endpoint
            for endpoint in lost
            if endpoint in self.corrupted or (endpoint in self.published and self.published[endpoint].shared)
        ]
        if count - self._mismatches[name] > len(excused):
            endpoint = next((endpoint for endpoint in lost if endpoint not in excused), "")
            raise _broken("checksum", name, endpoint, at, "a checksum differed, and no two lives shared an incarnation")
        self._mismatches[name] = count


def held_bytes(node: Node) -> int:
    """Return the bytes of all distinct arrays of keys that can be reached from a node. O(objects)."""
    stop = (type, ModuleType, BuiltinFunctionType)
    seen: set[int] = set()
    total = 0
    queue: list[object] = [node]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, stop):
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            if thing.base is None:
                total += thing.nbytes if thing.dtype == np.uint64 else 0
            else:
                queue.append(thing.base)
            continue
        # A function's globals are no part of the node; what it closes over is.
        queue.extend((thing.__closure__ or ()) if isinstance(thing, FunctionType) else gc.get_referents(thing))
    return total


def _broken(rule: str, node: str, endpoint: str, at: float, message: str) -> InvariantError:
    return InvariantError(Violation(rule, node, endpoint, at, message))
