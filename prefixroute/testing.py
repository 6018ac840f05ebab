"""Test kits for those who build on this library: a contract for policies, and nodes joined in memory on virtual time.

Rules:
1. Plain asserts, no test framework: subclass a contract in a module of your own tests, and pytest or unittest runs it.
2. Nothing sleeps and nothing is random but what is seeded: the same calls give the same run.
3. Contracts hold for every implementation, ours included; what makes one policy differ from another is not here.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from .chain import pack_tokens
from .domain import Domain
from .errors import UsageError
from .events import DEFAULT_NAMESPACE, GPU, BlocksStored, ContentSpan, EngineBatch, Namespace
from .fleet import Candidate
from .load import PushBackState
from .node import Node
from .policy import Policy, Request


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
    """Make a candidate whose terms add up, as a router would weigh it."""
    matched = depth * block_size
    prefill_s = (prompt_tokens - confidence * matched) / tokens_per_s
    cost_s = rtt_s + wait_s + overhead_s + prefill_s
    times = (rtt_s, wait_s, overhead_s, prefill_s, cost_s)
    return Candidate(endpoint, local, prompt_tokens, depth, matched, confidence, *times, state, 0.0)


def request(prompt_tokens: int = 1024, block_size: int = 16, now: float = 0.0, seed: int = 1) -> Request:
    """Make a request with a prompt of random tokens."""
    rng = random.Random(seed)
    domain = Domain("model", "tokenizer", block_size=block_size)
    node = Node("origin", domain, rng=rng, now=now)
    return Request(node.chain([rng.randrange(32000) for _ in range(prompt_tokens)]), now)


class PolicyContract:
    """What every `Policy` must keep. Subclass it, and return your policy from `make_policy`."""

    def make_policy(self) -> Policy:
        """Return the policy under test, new."""
        raise UsageError("a contract needs a policy: return yours from make_policy")

    def field(self, rng: random.Random) -> list[Candidate]:
        """Return one to eight candidates at random, with many ties; override it for a policy that needs others."""
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
        """Nobody is invented, lost or named twice."""
        rng = random.Random(1)
        for _ in range(200):
            given = self.field(rng)
            order = self.make_policy().choose(request(), tuple(given), rng).order
            assert len(order) == len(given)
            assert set(order) == set(given)

    def test_takes_the_only_candidate(self) -> None:
        """One candidate is chosen, whatever it is like."""
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
        """A smaller budget would have the target hand back what is as it should be."""
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
        """A node's decisions can be repeated only if nothing else is drawn from."""
        before = random.getstate()
        for seed in range(20):
            self.make_policy().choose(request(), self.field(random.Random(seed)), random.Random(seed))
        assert random.getstate() == before


def stored(
    tokens: Sequence[int],
    block_size: int = 16,
    *,
    namespace: Namespace = DEFAULT_NAMESPACE,
    contents: tuple[ContentSpan, ...] = (),
    tier: str = GPU,
) -> EngineBatch:
    """Return what an engine would tell after it cached a prompt: its whole blocks, with handles by content."""
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

    Addresses are node names. `delays` holds one-way seconds by (from, to), 0 where there is no entry; what goes from
    or to a node in `down` is dropped, and its timers stand still.
    """

    def __init__(self, *nodes: Node, now: float = 0.0) -> None:
        self.now = now
        self.nodes: dict[str, Node] = {}
        self.delays: dict[tuple[str, str], float] = {}
        self.down: set[str] = set()
        self._sent = 0
        self._under_way: list[tuple[float, int, str, str, bytes]] = []
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> Node:
        """Take a node in, and make it and all others peers."""
        for other in self.nodes.values():
            other.add_peer(node.node, node.node, self.now)
            node.add_peer(other.node, other.node, self.now)
        self.nodes[node.node] = node
        return node

    def run(self, seconds: float) -> None:
        """Let time pass: timers fire and datagrams arrive, each at its moment."""
        end = self.now + seconds
        while True:
            self._collect()
            up = [node for node in self.nodes.values() if node.node not in self.down]
            due = [node.next_timer() for node in up] + [at for at, *_ in self._under_way[:1]]
            if not due or min(due) > end:
                break
            self.now = max(self.now, min(due))
            while self._under_way and self._under_way[0][0] <= self.now:
                _, _, source, target, data = heappop(self._under_way)
                if target in self.nodes and not {source, target} & self.down:
                    self.nodes[target].receive_datagram(data, source, self.now)
            for node in up:
                node.handle_timer(self.now)
        self.now = end

    def _collect(self) -> None:
        for node in self.nodes.values():
            for address, data in node.datagrams_to_send(self.now):
                self._send(node.node, address, data)

    def _send(self, source: str, address: Hashable, data: bytes) -> None:
        target = str(address)
        self._sent += 1
        at = self.now + self.delays.get((source, target), 0.0)
        heappush(self._under_way, (at, self._sent, source, target, data))
