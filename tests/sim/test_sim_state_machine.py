"""Replication as a state machine: every datagram is held in hand, and delivered, dropped, repeated or kept back.

The model is exact: what an owner published at each pair, and what its engine holds. Hypothesis finds the order of
events that breaks a rule, and makes it short.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixroute import Node, NodeSettings
from prefixroute.replication.receiving import TABLE, Order, Reach, Verdict
from prefixroute.sim import DOMAIN, Engine, InvariantError, Oracle

NAMES = ("n0", "n1", "n2", "n3")
UNDER_WAY = 80
"""Datagrams held in hand; the oldest are lost."""

nodes = st.sampled_from(NAMES)
picks = st.integers(0, UNDER_WAY - 1)


class Replication(RuleBasedStateMachine):
    """Four nodes, their engines, and the datagrams between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, Engine] = {}
        self.lives = dict.fromkeys(NAMES, 100)
        self.under_way: list[tuple[str, bytes, str]] = []
        self.oracle = Oracle()
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        rng = random.Random(f"{name} {self.lives[name]} {self.now}")
        small = NodeSettings(datagram_bytes=1000, burst_bytes=2000, publish_within_s=0.0)
        node = Node(name, DOMAIN, rng=rng, now=self.now, settings=small)
        endpoint = node.add_endpoint("0", url=f"http://{name}", incarnation=self.lives[name], now=self.now)
        for other in NAMES:
            if other != name:
                node.add_peer(other, other, self.now)
        self.nodes[name], self.engines[name] = node, Engine(node, endpoint, rng)
        self.oracle.started(name, [endpoint])
        self.acted(name)

    def acted(self, name: str) -> None:
        node = self.nodes[name]
        out = node.datagrams_to_send(self.now)
        self.oracle.acted(name, node, {f"{name}/0"}, out, node.events(), self.now)
        self.under_way += [(str(address), data, name) for address, data in out]
        del self.under_way[:-UNDER_WAY]

    def hand_over(self, letter: tuple[str, bytes, str]) -> None:
        to, data, source = letter
        self.nodes[to].receive_datagram(data, source, self.now)
        self.acted(to)

    # --- engines -------------------------------------------------------------------------------------------

    @rule(name=nodes, blocks=st.sampled_from([1, 3, 20, 400]))
    def store(self, name: str, blocks: int) -> None:
        self.engines[name].store(blocks, self.now)
        self.acted(name)

    @rule(name=nodes, share=st.sampled_from([0.3, 1.0]))
    def evict(self, name: str, share: float) -> None:
        self.engines[name].evict(self.now, share)
        self.acted(name)

    @rule(name=nodes)
    def clear(self, name: str) -> None:
        self.engines[name].clear(self.now)
        self.acted(name)

    # --- time, lives ---------------------------------------------------------------------------------------

    @rule(name=nodes)
    def speak(self, name: str) -> None:
        """A node's timer is due, and time goes on until then."""
        self.now = max(self.now, self.nodes[name].next_timer())
        self.nodes[name].handle_timer(self.now)
        self.acted(name)

    @rule(name=nodes, blocks=st.sampled_from([1, 5]))
    def publish(self, name: str, blocks: int) -> None:
        """A new version, told to somebody."""
        self.store(name, blocks)
        self.speak(name)

    @rule(name=nodes, step=st.sampled_from([1, 0, -1]))
    def restart(self, name: str, step: int) -> None:
        self.lives[name] += step
        self.oracle.stopped(name)
        self.start(name)

    # --- datagrams -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.under_way)
    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        self.hand_over(self.under_way.pop(pick % len(self.under_way)))

    @precondition(lambda self: self.under_way)
    @rule(pick=picks)
    def deliver_and_keep(self, pick: int) -> None:
        self.hand_over(self.under_way[pick % len(self.under_way)])

    @precondition(lambda self: self.under_way)
    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        del self.under_way[pick % len(self.under_way)]

    @precondition(lambda self: self.under_way)
    @rule()
    def deliver_those_in_hand(self) -> None:
        """All but their answers; the last one first."""
        in_hand, self.under_way = self.under_way, []
        for letter in reversed(in_hand):
            self.hand_over(letter)

    @rule()
    def talk(self) -> None:
        """Every node speaks once, and what is said is heard and answered."""
        for name in NAMES:
            self.speak(name)
        for _ in range(3):
            in_hand, self.under_way = self.under_way, []
            for letter in in_hand:
                self.hand_over(letter)

    # --- what holds ----------------------------------------------------------------------------------------

    @invariant()
    def nobody_is_lost(self) -> None:
        for name, node in self.nodes.items():
            assert f"{name}/0" in node.digests()

    def teardown(self) -> None:
        """Quiet: all is delivered in order, and every replica comes to be its owner's set."""
        for _ in range(60):
            self.talk()
            if self.agreed():
                break
        assert self.agreed()
        for name, node in self.nodes.items():
            node._check()
            held = {handle for _, handles in self.engines[name].chains for handle in handles}
            assert len(node.digests()[f"{name}/0"].keys) == len(held)
            self.oracle.memory(name, node, self.now)

    def agreed(self) -> bool:
        digests = [node.digests() for node in self.nodes.values()]
        own = {name: self.nodes[name].digests()[f"{name}/0"] for name in NAMES}
        return all(
            f"{name}/0" in held
            and held[f"{name}/0"][:2] == digest[:2]
            and held[f"{name}/0"].keys.tolist() == digest.keys.tolist()
            for held in digests
            for name, digest in own.items()
        )


SETTINGS = settings(derandomize=True, deadline=None, database=None, max_examples=100, stateful_step_count=40)

TestReplication = Replication.TestCase
TestReplication.settings = SETTINGS


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        ((Order.SAME, Reach.PAST, True), Verdict.REPLACE),
        ((Order.SAME, Reach.PAST, False), Verdict.APPLY),
        ((Order.SAME, Reach.NEXT, False), Verdict.DROP),
        ((Order.OLDER, None, True), Verdict.REPLACE),
    ],
)
def test_the_machine_finds_a_wrong_row_of_the_table(
    row: tuple[Order, Reach | None, bool], verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, row, verdict)
    with pytest.raises((InvariantError, AssertionError)):
        run_state_machine_as_test(Replication, settings=settings(SETTINGS, phases=[Phase.generate]))
