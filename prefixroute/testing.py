"""Test kits for those who build on this library: contracts for policies and adapters, and nodes joined in memory.

| kit | for |
|---|---|
| `PolicyContract`, `candidate`, `request` | tests of a policy of your own |
| `AdapterContract` | tests of an engine adapter of your own |
| `stored`, `Mesh` | tests of whatever you build around nodes |

Rules:
1. Plain asserts, no test framework: subclass a contract in a module of your own tests, and pytest or unittest runs it.
2. Nothing sleeps, and all randomness is seeded: the same calls give the same run.
3. A contract holds for every implementation, ours included. What one policy does otherwise than another is not in it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from .errors import DecodeError, UsageError
from .events import (
    DEFAULT_NAMESPACE,
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    EngineBatch,
    EngineEvent,
    Handle,
    Namespace,
    StreamGap,
    StreamRestarted,
)
from .keys.chain import pack_tokens
from .keys.domain import Domain
from .load import PushBackState
from .node import Node
from .policy.interface import Candidate, Policy, Request
from .residency.mirror import Residency


def candidate(
    endpoint: str = "peer/0",
    *,
    local: bool = False,
    depth: int = 0,
    prompt_tokens: int = 1024,
    block_size: int = 16,
    rtt_s: float = 0.0,
    wait_s: float = 0.0,
    overhead_s: float = 0.01,
    tokens_per_s: float = 8000.0,
    confidence: float = 1.0,
    state: PushBackState = PushBackState.OPEN,
) -> Candidate:
    """Make a candidate whose terms add up, as a router would weigh it. Times are in seconds, `depth` in blocks."""
    matched = depth * block_size
    prefill_s = (prompt_tokens - confidence * matched) / tokens_per_s
    cost_s = rtt_s + wait_s + overhead_s + prefill_s
    times = (rtt_s, wait_s, overhead_s, prefill_s, cost_s)
    return Candidate(endpoint, local, prompt_tokens, depth, matched, confidence, *times, state, 0.0)


def request(prompt_tokens: int = 1024, block_size: int = 16, now: float = 0.0, seed: int = 1) -> Request:
    """Make a request at `now` whose prompt has random tokens, drawn from `seed`."""
    rng = random.Random(seed)
    domain = Domain("model", "tokenizer", block_size=block_size)
    node = Node("origin", domain, rng=rng, now=now)
    return Request(node.chain([rng.randrange(32000) for _ in range(prompt_tokens)]), now)


class PolicyContract:
    """What holds for every `Policy`. Subclass it, and return your policy from `make_policy`."""

    def make_policy(self) -> Policy:
        """Return a new instance of the policy under test."""
        raise UsageError("a contract needs a policy: return yours from make_policy")

    def field(self, rng: random.Random) -> list[Candidate]:
        """Return one to eight random candidates, with many ties. Override it for a policy that needs others."""
        return [
            candidate(
                f"n{i}/0",
                local=i == 0 and rng.random() < 0.7,
                depth=rng.choice((0, 0, 8, 32, 64)),
                rtt_s=rng.choice((0.0, 0.001, 0.05)),
                wait_s=rng.choice((0.0, 0.0, 0.1, 3.0)),
                tokens_per_s=rng.choice((500.0, 8000.0)),
                state=rng.choice((PushBackState.OPEN, PushBackState.OVERLOADED)),
            )
            for i in range(rng.randint(1, 8))
        ]

    def test_orders_exactly_the_candidates_it_was_given(self) -> None:
        """No candidate is invented, lost or named twice."""
        rng = random.Random(1)
        for _ in range(200):
            given = self.field(rng)
            order = self.make_policy().choose(request(), tuple(given), rng).order
            assert len(order) == len(given)
            assert set(order) == set(given)

    def test_takes_the_only_candidate(self) -> None:
        """An only candidate is chosen, whatever it is like."""
        for only in (candidate(local=True), candidate(), candidate(depth=64, wait_s=100.0)):
            assert self.make_policy().choose(request(), [only], random.Random(1)).order == (only,)

    def test_says_why(self) -> None:
        """A reason is a short line of text."""
        rng = random.Random(2)
        for _ in range(50):
            reason = self.make_policy().choose(request(), self.field(rng), rng).reason
            assert isinstance(reason, str)
            assert 0 < len(reason) <= 80
            assert "\n" not in reason

    def test_gives_a_forward_at_least_the_time_it_expects(self) -> None:
        """With a smaller budget the target would hand back a request that takes as long as expected."""
        rng = random.Random(4)
        for _ in range(200):
            choice = self.make_policy().choose(request(), self.field(rng), rng)
            assert choice.budget_s >= choice.order[0].cost_s

    def test_repeats_itself_with_the_same_seed(self) -> None:
        """All randomness comes from the generator that it is given."""
        for seed in range(50):
            given = self.field(random.Random(seed))
            first, second = (self.make_policy().choose(request(), given, random.Random(seed)) for _ in range(2))
            assert first == second

    def test_leaves_its_argument_alone(self) -> None:
        """The caller's list is not sorted in place."""
        rng = random.Random(3)
        for _ in range(50):
            given = self.field(rng)
            before = list(given)
            self.make_policy().choose(request(), given, rng)
            assert given == before

    def test_leaves_the_global_generator_alone(self) -> None:
        """Decisions can be repeated only if they draw from no other generator."""
        before = random.getstate()
        for seed in range(20):
            self.make_policy().choose(request(), self.field(random.Random(seed)), random.Random(seed))
        assert random.getstate() == before


class AdapterContract:
    """What holds for every engine adapter. Subclass it, and return your decoder and recordings of your engine.

    A recording is the payloads that one rank sent, in order, from the start of its engine on. Record a few with a small
    cache, so that blocks are evicted, and come back; with a conversation of two turns at least; with a flush; and
    without prompts that no adapter can map (`BlocksStored.mappable`).
    """

    domain = Domain("model", "tokenizer", block_size=16)
    flushes = True
    """Whether the engine can drop its whole cache at once, and tells it."""
    handles_name_content = True
    """Whether a handle means the same tokens below the same block each time, as hashes do and numbers of slots do not.
    """

    def decode(self, payload: bytes) -> EngineBatch:
        """Return the batch in a payload; raise `DecodeError` if it cannot be read."""
        raise UsageError("a contract needs a decoder: return what your adapter makes of a payload from decode")

    def recordings(self) -> Sequence[Sequence[bytes]]:
        """Return at least one recording, in which blocks are stored and removed."""
        raise UsageError("a contract needs recordings: return payloads of your engine from recordings")

    def prompts(self) -> Sequence[Sequence[Sequence[int]]]:
        """Return, for each recording, token ids of prompts that its engine has cached at some time; or nothing.

        Nothing else can tell of an adapter that is wrong in the same way each time, as with tokens reversed by block.
        """
        return ()

    def test_reads_its_recordings_whole(self) -> None:
        """Nothing in a recording is unknown, and all stored blocks can be matched."""
        gone = 0
        for recording in self.recordings():
            residency = Residency(self.domain)
            for payload in recording:
                residency.apply(self.decode(payload))
                # Lost keys are counted net: an engine that tells whole states removes no block by name.
                gone += len(residency.take_changes().removed)
            counts = residency.counts
            assert counts.unknown_events == counts.unknown_removals == counts.orphans == counts.hash_only == 0, counts
            assert counts.stored > 0
            assert not residency.partial
        assert gone > 0, "no recording evicts anything: record one with a small cache"

    def test_stores_come_with_the_tokens_of_their_blocks(self) -> None:
        """A store has as many tokens as its blocks hold, or none at all."""
        payloads = [payload for recording in self.recordings() for payload in recording]
        events = [event for payload in payloads for event in self.decode(payload).events]
        for event in (event for event in events if isinstance(event, BlocksStored)):
            assert event.block_size > 0
            assert len(event.tokens) in (0, len(event.handles) * event.block_size)
            assert all(0 <= token < 1 << 32 for token in event.tokens)
            assert all(0 <= item.start < len(event.tokens) for item in event.contents)

    def test_a_block_is_told_alike_each_time(self) -> None:
        """A handle has the same tokens below the same block however its blocks are cut into stores."""
        for recording in self.recordings() if self.handles_name_content else ():
            known: dict[tuple[int, Handle], tuple[Handle | None, list[int]]] = {}
            for event in self._stores(recording):
                size = event.block_size
                for i, handle in enumerate(event.handles if event.tokens else ()):
                    parent = event.handles[i - 1] if i else event.parent
                    tokens = list(event.tokens[i * size : (i + 1) * size])
                    before = known.setdefault((event.group, handle), (parent, tokens))
                    assert before[0] == parent, f"block {handle!r} is below {before[0]!r}, and then below {parent!r}"
                    assert before[1] == tokens, f"block {handle!r} has other tokens the next time: in another order?"

    def test_stores_name_the_block_that_they_continue(self) -> None:
        """Blocks below others have a parent; none is needed where each payload tells the whole state anew."""
        batches = [self.decode(payload).events for recording in self.recordings() for payload in recording]
        afresh = [any(isinstance(event, BlocksCleared) for event in batch) for batch in batches if _stores_in(batch)]
        continues = any(event.parent is not None for batch in batches for event in _stores_in(batch))
        assert continues or all(afresh), "no store continues another: is the parent lost? Record two turns of a chat"

    def test_a_flush_is_told(self) -> None:
        """An engine that dropped its cache holds nothing."""
        payloads = [payload for recording in self.recordings() for payload in recording]
        told = [event for payload in payloads for event in self.decode(payload).events]
        if self.flushes:
            cleared = any(isinstance(event, BlocksCleared) for event in told)
            assert cleared, "no recording has a flush, or it is ignored: record one, or set `flushes` to False"

    def test_prompts_that_were_cached_are_held(self) -> None:
        """The mirror has held each prompt that is known to have been cached, all of its whole blocks."""
        for recording, prompts in zip(self.recordings(), self.prompts(), strict=False):
            residency, node = Residency(self.domain), Node("n", self.domain, rng=random.Random(0), now=0.0)
            chains = [node.chain(list(prompt)) for prompt in prompts]
            most = [0] * len(chains)
            for payload in recording:
                residency.apply(self.decode(payload))
                keys = set(residency.keys())
                for i, chain in enumerate(chains):
                    held = (depth for depth in range(chain.depth, 0, -1) if chain.key(depth) in keys)
                    most[i] = max(most[i], next(held, 0))
            assert most == [chain.depth for chain in chains], "blocks of the prompts that were held, of those they have"

    def test_copies_are_counted(self) -> None:
        """The mirror counts each block as often as it was stored, less its removals."""
        for recording in self.recordings():
            copies: Counter[tuple[str, int, Handle]] = Counter()
            for event in (event for payload in recording for event in self.decode(payload).events):
                if isinstance(event, BlocksStored):
                    copies.update((event.tier, event.group, handle) for handle in event.handles)
                elif isinstance(event, BlocksRemoved):
                    for row in [(event.tier, event.group, handle) for handle in event.handles]:
                        assert copies[row] > 0, "removed more often than stored"
                        copies[row] = 0 if event.last_copy else copies[row] - 1
                elif isinstance(event, BlocksCleared):
                    for row in [row for row in copies if event.tier in (None, row[0])]:
                        del copies[row]
                elif isinstance(event, StreamRestarted):
                    copies.clear()
            rows: dict[tuple[str, int], list[int]] = {}
            for (tier, group, _), n in copies.items():
                if n:
                    rows.setdefault((tier, group), []).append(n)
            told = [(tier, group, len(ns), sum(ns)) for (tier, group), ns in sorted(rows.items())]
            assert [tuple(row) for row in self._applied(recording).live()] == told

    def test_a_life_that_is_told_again_is_held_once(self) -> None:
        """A replay from the beginning, after a restart, leads to the same residency as the first time."""
        for recording in self.recordings():
            once, twice = self._applied(recording), self._applied(recording)
            twice.apply(EngineBatch((StreamRestarted(),)))
            for payload in recording:
                twice.apply(self.decode(payload))
            twice._check()
            assert sorted(once.keys()) == sorted(twice.keys())
            assert once.live() == twice.live()

    def test_a_lost_message_is_doubted_and_never_raises(self) -> None:
        """Whichever message is lost, the mirror keeps its invariants and notes the gap."""
        rng = random.Random(1)
        for recording in self.recordings():
            for lost in rng.sample(range(len(recording)), min(8, len(recording))):
                residency = Residency(self.domain)
                for i, payload in enumerate(recording):
                    residency.apply(EngineBatch((StreamGap(1),)) if i == lost else self.decode(payload))
                    residency._check()
                assert residency.counts.gaps == 1

    def test_bad_bytes_are_a_decode_error_or_a_batch(self) -> None:
        """An adapter meets truncated, flipped and made-up payloads."""
        rng = random.Random(2)
        payloads = [b"", b"\x00", b"\xc1", b"null", rng.randbytes(100)]
        for recording in self.recordings():
            for payload in rng.sample(list(recording), min(20, len(recording))):
                payloads.append(payload[: rng.randrange(len(payload) + 1)])
                for _ in range(10):
                    flipped = bytearray(payload)
                    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                    payloads.append(bytes(flipped))
        read = 0
        for payload in payloads:
            try:
                batch = self.decode(payload)
            except DecodeError:
                continue
            read += 1
            residency = Residency(self.domain)
            residency.apply(batch)
            residency._check()
        assert read < len(payloads), "nothing is refused"

    def _stores(self, recording: Sequence[bytes]) -> list[BlocksStored]:
        return [event for payload in recording for event in _stores_in(self.decode(payload).events)]

    def _applied(self, recording: Sequence[bytes]) -> Residency:
        residency = Residency(self.domain)
        for payload in recording:
            residency.apply(self.decode(payload))
        residency._check()
        return residency


def _stores_in(events: Sequence[EngineEvent]) -> list[BlocksStored]:
    return [event for event in events if isinstance(event, BlocksStored)]


def stored(
    tokens: Sequence[int],
    block_size: int = 16,
    *,
    namespace: Namespace = DEFAULT_NAMESPACE,
    contents: tuple[ContentSpan, ...] = (),
    tier: str = GPU,
) -> EngineBatch:
    """Return the batch of an engine that has cached a prompt: its whole blocks, with handles by content."""
    n = len(tokens) // block_size
    packed = pack_tokens(list(tokens[: n * block_size]))
    state = blake2b(repr((namespace, contents)).encode(), digest_size=16)
    handles: list[bytes] = []
    for i in range(n):
        state.update(packed[4 * i * block_size : 4 * (i + 1) * block_size])
        handles.append(state.digest())
    whole = tuple(tokens[: n * block_size])
    event = BlocksStored(tuple(handles), None, whole, block_size, tier, namespace=namespace, contents=contents)
    return EngineBatch((event,) if handles else ())


class Mesh:
    """Nodes of one process joined by a network that loses nothing, on virtual time.

    Addresses are node names, unless a node is added at another. `delays` holds one-way seconds by (from, to) of names,
    0 where there is no entry. Datagrams from or to a node in `down` are dropped, and its timers do not fire.
    """

    def __init__(self, *nodes: Node, now: float = 0.0) -> None:
        self.now = now
        self.nodes: dict[str, Node] = {}
        self.addresses: dict[str, str] = {}
        """Where nodes are, by name; those that are not in it are at their names."""
        self.delays: dict[tuple[str, str], float] = {}
        self.down: set[str] = set()
        self._sent = 0
        self._under_way: list[tuple[float, int, str, str, bytes]] = []
        for node in nodes:
            self.add(node)

    def add(self, node: Node, address: str = "") -> Node:
        """Add a node, and make it and each of the others peers.

        Of one that comes back under its name, perhaps at another address, the others are not told.
        """
        again = node.node in self.nodes
        address = self.addresses[node.node] = address or node.node
        self.nodes[node.node] = node
        for other in self.nodes.values():
            if other is not node:
                node.add_peer(other.node, self._place(other.node), self.now)
                if not again:
                    other.add_peer(node.node, address, self.now)
        return node

    def run(self, seconds: float) -> None:
        """Let `seconds` pass: timers fire and datagrams arrive, each at its moment."""
        end = self.now + seconds
        while True:
            for node in self.nodes.values():
                for address, data in node.datagrams_to_send(self.now):
                    self._sent += 1
                    at = self.now + self.delays.get((node.node, self._at(address)), 0.0)
                    heappush(self._under_way, (at, self._sent, self._place(node.node), str(address), data))
            up = [node for node in self.nodes.values() if node.node not in self.down]
            due = [node.next_timer() for node in up] + [at for at, *_ in self._under_way[:1]]
            if not due or min(due) > end:
                break
            self.now = max(self.now, min(due))
            while self._under_way and self._under_way[0][0] <= self.now:
                _, _, source, target, data = heappop(self._under_way)
                name = self._at(target)
                if name and not {self._at(source), name} & self.down:
                    self.nodes[name].receive_datagram(data, source, self.now)
            for node in up:
                node.handle_timer(self.now)
        self.now = end

    def _at(self, address: object) -> str:
        """The node that has an address, "" if none has."""
        return next((name for name in self.nodes if self._place(name) == address), "")

    def _place(self, name: str) -> str:
        return self.addresses.get(name, name)
