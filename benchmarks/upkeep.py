#!/usr/bin/env python3
"""What it costs a node to keep up: a key taken in, replaced or forgotten, and the longest that any one call takes.

    python benchmarks/upkeep.py [--only peers,own,index] [--quick] [--json FILE]

*peers*: a real node receives a peer's set by gossip, as the peer's own `Gossip` sends it; its calls are timed from the
first datagram until nothing is left to do. A snapshot is sent when more has changed than the owner's log keeps. *own*:
a node publishes what its engine holds. *index*: sets of which any two have half of their keys in common.

Times are CPU time of the thread, since other work on the machine must not count as a long call. Microseconds a key are
all calls of a node together, over the keys that came, went, or were replaced. The longest call is the longest of any
into the node: a datagram, a timer, a batch. Best and median of the repetitions; bars are for the best.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
from digest import DOMAIN, random_keys
from workbench.bars import Row, chosen, json_option, publish

from prefixroute import BlocksStored, EngineBatch, Node, NodeSettings
from prefixroute.events import Journal
from prefixroute.keys.keyset import Delta, Keys
from prefixroute.node import SEND_BYTES
from prefixroute.replication.gossip import Gossip
from prefixroute.replication.outbox import Datagram
from prefixroute.replication.writer_set import OwnedSet
from prefixroute.routing.index import MergedIndex

KEY_US, CALL_MS = 1.0, 5.0
"""The bars: microseconds a key, and milliseconds of the longest call."""

FRAMES = {"streams": (65536, 1 << 20), "1,200 B": (1200, 65536)}
STEP_S = 0.05
EVERY_BLOCK = 1 << 40
"""A digest budget that any set fits."""

BLOCK = 16


class Timed:
    """Calls, timed: the sum and the longest, by the name they are counted under."""

    def __init__(self) -> None:
        self.total_ns: Counter[str] = Counter()
        self.longest_ns: Counter[str] = Counter()

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call, and count what it took."""
        start = time.thread_time_ns()
        result = call(*arguments)
        took = time.thread_time_ns() - start
        self.total_ns[name] += took
        self.longest_ns[name] = max(self.longest_ns[name], took)
        return result


Runs = dict[str, list[tuple[float, str, float | None]]]
"""Figures of all repetitions by what they are of: value, unit, bar."""


def rows_of(runs: Runs) -> Iterator[Row]:
    """Best and median of each figure."""
    for what, figures in runs.items():
        values = [value for value, _, _ in figures]
        _, unit, bar = figures[0]
        yield Row(f"{what}, best of {len(values)}", min(values), unit, bar)
        yield Row(f"{what}, median of {len(values)}", median(values), unit)


# --- a peer's set ------------------------------------------------------------------------------------------


class Pair:
    """The gossip of an owner, whose keys are what it is told, and a node that follows it."""

    def __init__(self, frame: str) -> None:
        datagram_bytes, burst_bytes = FRAMES[frame]
        settings = NodeSettings(datagram_bytes=datagram_bytes, burst_bytes=burst_bytes, digest_bytes=EVERY_BLOCK)
        self.now = 0.0
        self.timed = Timed()
        self._settings = settings
        self.node = Node("node", DOMAIN, rng=random.Random(1), now=0.0, settings=settings)
        self.node.add_endpoint(incarnation=1, now=0.0)
        self.node.add_peer("owner", "owner", 0.0)
        self.begin(1)

    def begin(self, incarnation: int) -> None:
        """Let the owner begin a life without keys."""
        self.owner = Gossip("owner", DOMAIN, self._settings, random.Random(2), self.now, Journal(), lambda *_: None)
        self.owner.peers.add("node", "node", self.now)
        self.owner.members.join("owner/0", incarnation, "", self.now)

    def publish(self, changes: Delta) -> None:
        """Let the owner hold other keys, and publish them."""
        keys = self.owner.members.copies["owner/0"].keys
        assert isinstance(keys, OwnedSet)
        keys.gather(changes)
        keys.publish(self.now)

    def settle(self, timed: Timed) -> None:
        """Exchange until the node has what the owner published, and nothing is left for it to do."""
        give_up = self.now + 60
        wanted = self.owner.members.copies["owner/0"]
        while True:
            digest = self.node.digests().get("owner/0")
            if digest is not None and digest[:2] == wanted.held and not self._due(timed):
                return
            assert self.now < give_up, "the owner's set does not arrive"
            self.now += STEP_S
            if self.owner.tempo.next_at <= self.now:
                timed("owner", self.owner.exchange, self.now)
            self._due(timed)
            self._carry(timed)

    def forget(self, timed: Timed) -> None:
        """Let the node forget the owner, whatever that takes."""
        timed("node", self.node.remove_peer, "owner", self.now)
        self._due(timed)

    def _due(self, timed: Timed) -> bool:
        """Handle the node's timer until it is not due; return whether it was due more than once."""
        handled = 0
        while self.node.next_timer() <= self.now:
            timed("node", self.node.handle_timer, self.now)
            handled += 1
        return handled > 1

    def _carry(self, timed: Timed) -> None:
        """Carry datagrams until there are none, each node's timer handled between them as a driver would."""
        while True:
            out: list[tuple[str, Datagram]] = [("owner", datagram) for datagram in self._owner_out(timed)]
            out += [("node", datagram) for datagram in self.node.datagrams_to_send(self.now)]
            if not out:
                return
            for source, (_, data) in out:
                if source == "owner":
                    timed("node", self.node.receive_datagram, data, "owner", self.now)
                    self._due(timed)
                else:
                    timed("owner", self.owner.receive, data, "node", self.now)

    def _owner_out(self, timed: Timed) -> list[Datagram]:
        """What the owner packs at once, as its node would."""
        if self.owner.outbox.packing:
            timed("owner", self.owner.outbox.pack, SEND_BYTES)
        return self.owner.outbox.take()


def peers(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of a peer's set that comes, is replaced, begins a new life, and goes."""
    n = options.keys
    runs: Runs = defaultdict(list)
    for repeat in range(options.repeat):
        rng = np.random.default_rng(repeat)
        keys = random_keys(rng, 3 * n)
        order = rng.permutation(3 * n)
        first, second, third = (set(keys[order[i * n : (i + 1) * n]].tolist()) for i in range(3))
        tenth = set(sorted(first)[::10])
        fresh = set(sorted(third)[::10])
        for frame in FRAMES:
            pair = Pair(frame)
            pair.settle(Timed())
            part = f"a peer of {n:,} keys, {frame}"

            def measure(what: str, n_keys: int, act: Callable[[Timed], None], part: str = part) -> None:
                gc.collect()
                timed = Timed()
                act(timed)
                runs[f"{part}: {what}"].append((timed.total_ns["node"] / 1e3 / n_keys, "us/key", KEY_US))
                runs[f"{part}: {what}, longest call"].append((timed.longest_ns["node"] / 1e6, "ms", CALL_MS))
                if timed.longest_ns["owner"]:
                    runs[f"{part}: {what}, sender's longest call"].append(
                        (timed.longest_ns["owner"] / 1e6, "ms", CALL_MS)
                    )

            pair.publish(Delta(set(first), set()))
            measure("added", n, pair.settle)
            pair.publish(Delta(set(fresh), set(tenth)))
            measure("snapshot, 10 % differ", n, pair.settle)
            held = (first - tenth) | fresh
            pair.publish(Delta(set(second), held))
            measure("snapshot, all differ", 2 * n, pair.settle)
            pair.begin(2)
            pair.publish(Delta(set(second), set()))
            measure("another life, the same keys", 2 * n, pair.settle)
            measure("forgotten", n, pair.forget)
    yield from rows_of(runs)


# --- own keys ----------------------------------------------------------------------------------------------


def own(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of what a node's own engine stores and removes, until it is published."""
    n = options.keys
    runs: Runs = defaultdict(list)
    for repeat in range(options.repeat):
        rng = random.Random(repeat)
        tokens = [rng.randrange(128_000) for _ in range(n * BLOCK)]
        for published, budget in (("every block", EVERY_BLOCK), ("default anchors", NodeSettings().digest_bytes)):
            for size in (n, options.batch):
                settings = NodeSettings(digest_bytes=budget)
                node = Node("node", DOMAIN, rng=random.Random(1), now=0.0, settings=settings)
                endpoint = node.add_endpoint(incarnation=1, now=0.0)
                batches = [
                    EngineBatch(
                        (
                            BlocksStored(
                                tuple(range(at, min(at + size, n))),
                                at - 1 if at % options.path else None,
                                tokens[at * BLOCK : min(at + size, n) * BLOCK],
                                BLOCK,
                            ),
                        )
                    )
                    for at in range(0, n, size)
                ]
                gc.collect()
                timed = Timed()
                now = 1.0
                for batch in batches:
                    timed("apply", node.apply, endpoint, batch, now)
                while node.next_timer() <= now:
                    timed("publish", node.handle_timer, now)
                now += 10.0
                while node.next_timer() <= now:
                    timed("publish", node.handle_timer, now)
                what = f"{n:,} own blocks in batches of {size:,}, {published}"
                for name in ("apply", "publish"):
                    runs[f"{what}: {name}"].append((timed.total_ns[name] / 1e3 / n, "us/key", None))
                    bar = CALL_MS if size != n or name == "publish" else None
                    runs[f"{what}: {name}, longest call"].append((timed.longest_ns[name] / 1e6, "ms", bar))
    yield from rows_of(runs)


# --- the index ---------------------------------------------------------------------------------------------


def index(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of the merged index alone."""
    n = options.keys
    runs: Runs = defaultdict(list)
    for repeat in range(max(1, options.repeat // 3)):
        rng = np.random.default_rng(repeat)
        keys = random_keys(rng, 2 * n)
        for endpoints in (4, 64):
            timed = Timed()
            merged = MergedIndex()
            held: list[list[int]] = []
            for i in range(endpoints):
                chosen: Keys = np.sort(rng.permutation(keys)[:n])
                held.append(chosen.tolist())
                merged.join(str(i))
                timed("add", merged.update, str(i), held[i], ())
            for i in range(0, endpoints, 2):
                timed("remove", merged.update, str(i), (), held[i])
            what = f"index, {endpoints} endpoints of {n:,} keys, half in common"
            runs[f"{what}: add"].append((timed.total_ns["add"] / 1e3 / n / endpoints, "us/key", KEY_US))
            removed = n * (endpoints + 1) // 2
            runs[f"{what}: remove"].append((timed.total_ns["remove"] / 1e3 / removed, "us/key", KEY_US))
    yield from rows_of(runs)


# --- the program -------------------------------------------------------------------------------------------

PARTS = {"peers": peers, "own": own, "index": index}


def main() -> int:
    """Print the table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run ({','.join(PARTS)})")
    parser.add_argument("--quick", action="store_true", help="two repetitions")
    parser.add_argument("--keys", type=int, default=100_000, help="keys of a set (100,000)")
    parser.add_argument("--batch", type=int, default=64, help="blocks of an engine's batch (64)")
    parser.add_argument("--path", type=int, default=2048, help="blocks of a prompt (2,048)")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions (5)")
    json_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.repeat = min(options.repeat, 2)
    parts = chosen(parser, options.only, PARTS)
    publish([(part, PARTS[part](options)) for part in parts], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
