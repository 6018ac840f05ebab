#!/usr/bin/env python3
"""What a digest takes: bytes of snapshots, anchors and deltas, the error that anchors cost, and the time of coding.

    python benchmarks/digest.py [--only snapshot,delta,times,chat,trace] [--trace FILE] [--quick] [--json FILE]

*snapshot*: random keys, and the bytes of all encoded updates that a snapshot is cut to: in messages of 64 KiB, as over
streams, and in datagrams of 1,200 bytes. *chat* and *trace*: an engine's events and served requests go through a node
with default settings, so anchors are chosen by the byte budget; a second node gets the digest by gossip, and searches
of it are held against the exact match. Of prompts that continue a request, and of prompts that leave one at a uniform
block, the under-estimate is told in blocks of 16 tokens.

chat: 3,000 requests; 50 system prompts of 20 to 119 blocks, chosen by Zipf's law; conversations of 1 to 7 turns of 10
to 59 blocks, a request a turn. trace: JSON lines with `hash_ids` of 512 tokens, each 32 blocks here (Mooncake's form).
Nothing is evicted. Times are the best and the median of the repetitions; bars are for the best.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from workbench.bars import Row, chosen, json_option, publish

from prefixroute import BlocksStored, Domain, EngineBatch, Node, NodeSettings, Outcome
from prefixroute.keys.keyset import KeyDelta, Keys
from prefixroute.keys.rice import decode_sorted, encode_sorted
from prefixroute.replication.transfer import Debt, cut
from prefixroute.replication.wire import KEY_LIMIT, Message, Update, overhead_bytes
from prefixroute.replication.writer_set import Change, WriterSet
from prefixroute.routing.index import MergedIndex

BLOCK = 16
TRACE_BLOCKS = 32
"""Blocks of one id of a trace."""

DOMAIN = Domain("bench", "bench", BLOCK, secret=b"bench")
STREAM_BYTES, DATAGRAM_BYTES = 65536, 1200
INCARNATION = 1_700_000_000_000_000_000
REQUEST_S = 0.1
"""Between two requests, in the node's time."""

Tokens = NDArray[np.uint32]


# --- sizes -------------------------------------------------------------------------------------------------


def travelling_bytes(change: Change, datagram_bytes: int) -> int:
    """What all encoded updates take that a change is cut to, when nothing else is in the datagrams."""
    room = datagram_bytes - overhead_bytes(Message("node-0"))
    debt = Debt("node-0/0", INCARNATION, change, url="http://127.0.0.1:8000")
    lower = total = 0
    while lower < KEY_LIMIT:
        part, lower = cut(debt, lower, KEY_LIMIT, room)
        assert part is not None, "a datagram is large enough for any part"
        total += len(part)
    return total


def random_keys(rng: np.random.Generator, n: int, limit: int = KEY_LIMIT) -> Keys:
    """`n` distinct keys below `limit`, ascending."""
    keys = np.unique(rng.integers(0, limit, n + n // 100 + 10, np.uint64))
    chosen: Keys = np.sort(rng.permutation(keys)[:n])
    return chosen


def holder(keys: Keys) -> WriterSet:
    """A set of these keys."""
    held = WriterSet()
    held.replace(1, keys)
    return held


def snapshot(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of a snapshot of every block."""
    rng, n = np.random.default_rng(1), options.keys
    change = holder(random_keys(rng, n)).snapshot()
    name = f"snapshot of {n:,} blocks, every block"
    yield Row(f"{name}, 48-bit keys, streams", travelling_bytes(change, STREAM_BYTES) / n, "B/block", 4.2)
    yield Row(f"{name}, 48-bit keys, 1,200 B", travelling_bytes(change, DATAGRAM_BYTES) / n, "B/block")
    narrow = encode_sorted(random_keys(rng, n, 1 << 40), 1 << 40)
    yield Row(f"{name}, 40-bit keys, codes alone", len(narrow) / n, "B/block", 3.2)


def delta(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of a delta."""
    n, m = options.keys, options.changed
    held, added, removed = changed_set(n, m)
    held.advance(2, KeyDelta(added, removed))
    change = held.change(1, 2)
    assert change is not None
    part, _ = cut(Debt("node-0/0", INCARNATION, change), 0, KEY_LIMIT, STREAM_BYTES)
    assert part is not None
    update = msgspec.msgpack.decode(part, type=Update)
    name = f"delta of {m} adds and {m} removals on {n:,}"
    yield Row(f"{name}: adds", len(update.added) / m, "B/add", 5.1)
    yield Row(f"{name}: removals", len(update.removed) / m, "B/removal", 1.2)
    yield Row(f"{name}: the whole update", len(part), "B")


def changed_set(n: int, m: int) -> tuple[WriterSet, Keys, Keys]:
    """A set of `n` keys, and `m` keys each to add and to remove."""
    rng = np.random.default_rng(2)
    keys = random_keys(rng, n + m)
    order = rng.permutation(n + m)
    added, held = np.sort(keys[order[:m]]), np.sort(keys[order[m:]])
    return holder(held), added, np.sort(rng.choice(held, m, replace=False))


# --- anchors -----------------------------------------------------------------------------------------------


class Workload(NamedTuple):
    """Requests, each a sequence of pieces; a piece has the same tokens and follows the same pieces wherever it is."""

    requests: list[list[int]]
    tokens: Callable[[int], Tokens]

    def prompt(self, request: list[int]) -> Tokens:
        """All tokens of a request."""
        return np.concatenate([self.tokens(piece) for piece in request])


def chat_workload(n: int) -> Workload:
    """Conversations that begin with one of 50 system prompts."""
    rng = np.random.default_rng(3)
    pieces = [fresh(rng, int(rng.integers(20, 120))) for _ in range(50)]
    popularity = 1 / np.arange(1, 51)
    requests: list[list[int]] = []
    while len(requests) < n:
        conversation = [int(rng.choice(50, p=popularity / popularity.sum()))]
        for _ in range(int(rng.integers(1, 8))):
            pieces.append(fresh(rng, int(rng.integers(10, 60))))
            conversation = [*conversation, len(pieces) - 1]
            requests.append(conversation)
    return Workload(requests[:n], pieces.__getitem__)


def trace_workload(file: str, n: int) -> Workload:
    """The first `n` requests of a trace."""
    with Path(file).open() as lines:
        requests = [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(n), strict=False)]
    return Workload(requests, lambda piece: fresh(np.random.default_rng(piece), TRACE_BLOCKS))


def fresh(rng: np.random.Generator, blocks: int) -> Tokens:
    """Random tokens."""
    return rng.integers(0, 128_000, blocks * BLOCK, np.uint32)


def serve(node: Node, endpoint: str, workload: Workload) -> float:
    """Let an endpoint's engine serve all requests, each new block stored; return the time when the digest is settled.

    The last few seconds bring no request: the anchor stride is fitted once more.
    """
    now, handles = 0.0, 0
    last: dict[int, int] = {}
    for request in workload.requests:
        events = []
        parent: int | None = None
        for piece in request:
            if piece not in last:
                tokens = workload.tokens(piece)
                n = len(tokens) // BLOCK
                stored = tuple(range(handles, handles + n))
                events.append(BlocksStored(stored, parent, tokens.tolist(), BLOCK))
                handles += n
                last[piece] = handles - 1
            parent = last[piece]
        now += REQUEST_S
        node.apply(endpoint, EngineBatch(tuple(events)), now)
        node.report(node.route(workload.prompt(request), now), Outcome.served(), now)
        node.handle_timer(now)
    for _ in range(100):
        now += REQUEST_S
        while node.next_timer() <= now:
            node.handle_timer(now)
    node.datagrams_to_send(now)
    return now


def received_index(owner: Node, endpoint: str, now: float) -> MergedIndex:
    """Let another node get the owner's digest by gossip; return an index of what it got."""
    settings = NodeSettings(datagram_bytes=STREAM_BYTES, burst_bytes=1 << 20)
    receiver = Node("receiver", DOMAIN, rng=random.Random(2), now=now, settings=settings)
    for one, other in ((owner, receiver), (receiver, owner)):
        one.add_peer(other.node, other.node, now)
    published = owner.digests()[endpoint]
    nodes = {node.node: node for node in (owner, receiver)}
    give_up = now + 60
    while (got := receiver.digests().get(endpoint)) is None or got.version < published.version:
        assert now < give_up, "the digest does not arrive"
        now += settings.interval_s
        for node in nodes.values():
            while node.next_timer() <= now:
                node.handle_timer(now)
        while sent := [(node, datagram) for node in nodes.values() for datagram in node.datagrams_to_send(now)]:
            for node, datagram in sent:
                nodes[str(datagram.address)].receive_datagram(datagram.data, node.node, now)
    index = MergedIndex()
    index.join(endpoint)
    index.set_stride(endpoint, got.every)
    index.update(endpoint, got.keys.tolist(), ())
    return index


def anchors(name: str, workload: Workload, queries: int) -> Iterator[Row]:
    """Rows of a workload with default settings."""
    owner = Node("owner", DOMAIN, rng=random.Random(1), now=0.0)
    endpoint = owner.add_endpoint("0", url="http://127.0.0.1:8000", incarnation=INCARNATION, now=0.0)
    now = serve(owner, endpoint, workload)
    residency, digest = owner.residency(endpoint), owner.digests()[endpoint]
    blocks = residency.canonical_blocks
    change = holder(digest.keys).snapshot()
    name = f"{name}, default anchors"
    yield Row(f"{name}: requests", len(workload.requests), "")
    yield Row(f"{name}: cached blocks", blocks, "")
    yield Row(f"{name}: anchor stride chosen", digest.every, "")
    yield Row(f"{name}: share of blocks published", 100 * len(digest.keys) / blocks, "%")
    yield Row(f"{name}: snapshot, streams", travelling_bytes(change, STREAM_BYTES) / blocks, "B/block", 0.5)
    yield Row(f"{name}: snapshot, 1,200 B", travelling_bytes(change, DATAGRAM_BYTES) / blocks, "B/block")
    index = received_index(owner, endpoint, now)
    held = set(residency.keys())
    rng = np.random.default_rng(4)
    for case in ("continued", "fork at a uniform block"):
        errors: list[int] = []
        for i in rng.integers(0, len(workload.requests), queries):
            prompt = workload.prompt(workload.requests[i])
            kept = len(prompt) // BLOCK if case == "continued" else int(rng.integers(1, len(prompt) // BLOCK))
            chain = owner.chain(np.concatenate([prompt[: kept * BLOCK], fresh(rng, 8)]))
            strata = index.search(chain)
            exact = next((d - 1 for d in range(1, chain.depth + 1) if chain.key(d) not in held), chain.depth)
            errors.append(exact - (strata[0].depth if strata else 0))
        errors.sort()
        yield Row(f"{name}: under-estimate, {case}, mean", mean(errors), "blocks")
        yield Row(f"{name}: under-estimate, {case}, p99", errors[len(errors) * 99 // 100], "blocks")
        yield Row(f"{name}: over-estimate, {case}, most", max(0, -errors[0]), "blocks", 0)


def chat(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of the chat workload."""
    yield from anchors("chat", chat_workload(options.requests), options.queries)


def trace(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of a trace, if one was given."""
    if options.trace:
        yield from anchors("trace", trace_workload(options.trace, options.trace_requests), options.queries)


# --- times -------------------------------------------------------------------------------------------------


def timed(
    name: str, make: Callable[[], Callable[[], object]], repeat: int, bar: float | None = None, per: int = 0
) -> Iterator[Row]:
    """Time what `make` prepares, in milliseconds, or in microseconds for each of `per` keys."""
    runs: list[int] = []
    for _ in range(repeat):
        call = make()
        start = time.perf_counter_ns()
        call()
        runs.append(time.perf_counter_ns() - start)
    unit, scale = ("us/key", 1e3 * per) if per else ("ms", 1e6)
    yield Row(f"{name}, best of {repeat}", min(runs) / scale, unit, bar)
    yield Row(f"{name}, median of {repeat}", median(runs) / scale, unit)


def times(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of the time of coding, applying and indexing."""
    n, m, repeat = options.keys, options.changed, options.repeat
    for size, bars in ((n, (30.0, 6.0)), (m, (None, None))):
        keys = random_keys(np.random.default_rng(5), size)
        codes = encode_sorted(keys, KEY_LIMIT)
        # One partial makes, the other is made: coding needs no preparation.
        encode = partial(partial, encode_sorted, keys, KEY_LIMIT)
        decode = partial(partial, decode_sorted, codes, KEY_LIMIT)
        yield from timed(f"encode {size:,} keys", encode, repeat, bars[0])
        yield from timed(f"decode {size:,} keys", decode, repeat, bars[1])
    held, added, removed = changed_set(n, m)

    def apply() -> Callable[[], object]:
        return partial(holder(held.keys).advance, 2, KeyDelta(added, removed))

    yield from timed(f"apply {m} adds and {m} removals to {n:,} keys", apply, repeat, per=2 * m)

    def indexing(filled: Keys, gained: Keys, lost: Keys) -> Callable[[], object]:
        index = MergedIndex()
        index.join("node-0/0")
        index.update("node-0/0", filled.tolist(), ())
        return lambda: index.update("node-0/0", gained.tolist(), lost.tolist())

    none = held.keys[:0]
    name = f"index {n:,} keys of a snapshot"
    yield from timed(name, partial(indexing, none, held.keys, none), repeat, per=n)
    name = f"index {m} adds and {m} removals on {n:,} keys"
    yield from timed(name, partial(indexing, held.keys, added, removed), repeat, per=2 * m)


# --- the program -------------------------------------------------------------------------------------------

PARTS = {"snapshot": snapshot, "delta": delta, "times": times, "chat": chat, "trace": trace}
"""Times come before what fills the memory: coding is up to four times as fast where the allocator has kept pages."""


def main() -> int:
    """Print the table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run ({','.join(PARTS)})")
    parser.add_argument("--trace", metavar="FILE", help="a trace of requests, as JSON lines with hash_ids")
    parser.add_argument("--trace-requests", type=int, default=1000, help="requests of the trace, from its start (1000)")
    parser.add_argument("--quick", action="store_true", help="a fifth of the trace, queries and repetitions")
    parser.add_argument("--keys", type=int, default=100_000, help="keys of a set (100,000)")
    parser.add_argument("--changed", type=int, default=625, help="keys added, and removed, by a delta (625)")
    parser.add_argument("--requests", type=int, default=3000, help="requests of the chat workload (3,000)")
    parser.add_argument("--queries", type=int, default=2000, help="prompts of each kind that are looked up (2,000)")
    parser.add_argument("--repeat", type=int, default=21, help="repetitions of what is timed (21)")
    json_option(parser)
    options = parser.parse_args()
    if options.quick:
        for name in ("trace_requests", "queries", "repeat"):
            setattr(options, name, max(1, getattr(options, name) // 5))
    parts = chosen(parser, options.only, PARTS)
    publish([(part, PARTS[part](options)) for part in parts], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
