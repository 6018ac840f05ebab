"""The index in slices: old or new for each key at any moment, right in the end, whatever comes in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from network import DOMAIN, gossip
from test_index import prompt

from prefixroute import BlocksRemoved, BlocksStored, EngineBatch, Node, NodeSettings, node
from prefixroute.endpoint import local
from prefixroute.events import EngineEvent
from prefixroute.keys.chain import ANCHOR_STRIDES, TokenChain, wire_key
from prefixroute.keys.keyset import Keys
from prefixroute.replication import writer_set
from prefixroute.routing import index_feed
from prefixroute.routing.index import MergedIndex
from prefixroute.routing.index_feed import IndexFeed
from prefixroute.sim.replication.schedule import generate, play
from prefixroute.testing import stored

SLICE = 7


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that is done in slices is done in very small ones."""
    monkeypatch.setattr(index_feed, "SLICE_KEYS", SLICE)
    monkeypatch.setattr(local.portions, "__defaults__", (3,))
    monkeypatch.setattr(local.is_small, "__defaults__", (3,))
    monkeypatch.setattr(node, "SEND_BYTES", 1)
    monkeypatch.setattr(writer_set, "FOLD_KEYS", 5)
    yield


def array(keys: set[int]) -> Keys:
    return np.array(sorted(keys), np.uint64)


def finish(feed: IndexFeed) -> int:
    """Do what is left; return how many calls that took."""
    n = 0
    while feed.waiting:
        feed.begin()
        feed.go_on()
        n += 1
    return n


def kept(index: MergedIndex, name: str) -> set[int]:
    return index.keys_of(index.bit(name))


# --- keys --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("seed", range(12))
def test_each_key_is_old_or_new_and_a_bit_is_clean_when_it_is_given(seed: int) -> None:
    rng = random.Random(seed)
    index = MergedIndex()
    feed = IndexFeed(index)
    # By endpoint: the versions that its keys in the index may be of, newest last.
    versions: dict[str, list[set[int]]] = {}
    for _ in range(400):
        feed.begin()
        name = f"e{rng.randrange(5)}"
        chance = rng.random()
        if name not in versions:
            index.join(name)
            assert kept(index, name) == set()
            versions[name] = [set()]
        elif chance < 0.1:
            feed.retire(name, versions.pop(name)[-1])
            assert not index.bit(name)
        elif chance < 0.5:
            old = versions[name][-1]
            new = set() if chance < 0.15 else {rng.randrange(60) for _ in range(rng.randrange(40))}
            feed.take(name, array(new - old), array(old - new), 1)
            versions[name].append(new)
        if rng.random() < 0.7:
            feed.go_on()
        if not feed.waiting:
            versions = {name: states[-1:] for name, states in versions.items()}
            index._check({name: states[0] for name, states in versions.items()})
        for name, states in versions.items():
            has = kept(index, name)
            assert set.intersection(*states) <= has <= set.union(*states)
        feed._check({name: states[-1] for name, states in versions.items()})
    assert 0 < finish(feed) < 1000
    index._check({name: states[-1] for name, states in versions.items()})


@pytest.mark.usefixtures("small_slices")
def test_a_call_does_one_slice_and_small_changes_at_once() -> None:
    index = MergedIndex()
    feed = IndexFeed(index)
    for name in ("a", "b"):
        index.join(name)
    none = array(set())
    feed.begin()
    feed.take("a", array({1, 2, 3}), none, 1)
    assert kept(index, "a") == {1, 2, 3} and not feed.waiting
    feed.take("b", array(set(range(3 * SLICE))), none, 1)
    assert kept(index, "b") == set()
    feed.go_on()
    assert len(kept(index, "b")) == SLICE - 3
    feed.begin()
    # It waits for what came before it, of the same endpoint only.
    feed.take("b", none, array({0}), 1)
    feed.take("a", none, array({1}), 1)
    assert kept(index, "a") == {2, 3} and 0 in kept(index, "b")
    assert finish(feed) == 3
    assert kept(index, "b") == set(range(1, 3 * SLICE))


@pytest.mark.usefixtures("small_slices")
def test_who_leaves_does_not_get_what_waited_and_its_name_is_free() -> None:
    index = MergedIndex()
    feed = IndexFeed(index)
    index.join("a")
    bit = index.bit("a")
    feed.begin()
    feed.take("a", array(set(range(100))), array(set()), 16)
    feed.go_on()
    feed.take("a", array(set()), array(set(range(100))), 1)
    feed.retire("a")
    index.join("a")
    assert index.bit("a") != bit
    feed.begin()
    feed.take("a", array({5}), array(set()), 1)
    finish(feed)
    index._check({"a": {5}})
    index.join("b")
    assert index.bit("b") == bit


# --- matches -----------------------------------------------------------------------------------------------


def anchors(chain: TokenChain, depth: int, anchor_stride: int) -> set[int]:
    """What an endpoint publishes that holds the first `depth` blocks."""
    return {wire_key(chain.key(d)) for d in range(1, depth + 1) if d in (1, depth) or d % anchor_stride == 0}


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("seed", range(8))
def test_a_match_is_no_deeper_and_no_shallower_than_the_versions_between(seed: int) -> None:
    rng = random.Random(seed)
    chain = prompt(150)
    index = MergedIndex()
    feed = IndexFeed(index)
    held: dict[str, list[tuple[int, int]]] = {}
    for i in range(4):
        index.join(f"e{i}")
        held[f"e{i}"] = [(0, 1)]
    for _ in range(300):
        feed.begin()
        if rng.random() < 0.3:
            name = rng.choice(sorted(held))
            old = anchors(chain, *held[name][-1])
            held[name].append((rng.choice([0, 1, 2, 31, 32, 33, rng.randrange(150)]), rng.choice(ANCHOR_STRIDES)))
            new = anchors(chain, *held[name][-1])
            feed.take(name, array(new - old), array(old - new), held[name][-1][1])
        feed.go_on()
        if not feed.waiting:
            held = {name: states[-1:] for name, states in held.items()}
        strata = index.search(prompt(150), 1000)
        found = {name: stratum.depth for stratum in strata for name in index.names(stratum.mask)}
        for name, states in held.items():
            depths, widest = [depth for depth, _ in states], max(anchor_stride for _, anchor_stride in states)
            assert min(depths) - (widest - 1) * (len(states) > 1) <= found.get(name, 0) <= max(depths)
            if len(states) == 1:
                assert found.get(name, 0) == depths[0]


# --- nodes -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("seed", range(25))
def test_replication_breaks_no_rule_in_small_slices(seed: int) -> None:
    violation = play(generate(seed, 50)).violation
    assert violation is None, str(violation)


BLOCKS = 600
PROMPT = [random.Random(5).randrange(32000) + i for i in range(BLOCKS * 16)]


class Two:
    """An owner "a" and a node "b" that does only the slices that datagrams bring along, until it is told to finish."""

    def __init__(self, replay_window: int = 4096) -> None:
        self.now = 0.0
        settings = NodeSettings(digest_bytes=1 << 30, replay_window=replay_window)
        self.a, self.b = (Node(name, DOMAIN, rng=random.Random(1), now=0.0, settings=settings) for name in "ab")
        self.a.add_endpoint(incarnation=1, now=0.0)
        self.b.add_endpoint(incarnation=1, now=0.0)
        self.a.add_peer("b", "b", 0.0)
        self.b.add_peer("a", "a", 0.0)

    def apply(self, *events: EngineEvent) -> None:
        """Let a's engine do something, all of which a applies before it publishes any."""
        self._due()
        self.a.apply("a/0", EngineBatch(events), self.now)
        self._due()

    def until(self, condition: Callable[[], bool]) -> None:
        """Let the two talk."""
        for _ in range(200):
            if condition():
                return
            self.now += 0.1
            self._talk()
            self.b._check()
        raise AssertionError("it never came true")

    def _due(self) -> None:
        while self.a.next_timer() <= self.now:
            self.a.handle_timer(self.now)

    def _talk(self) -> None:
        while True:
            self._due()
            if gossip(self.b).tempo.next_at <= self.now:
                self.b.handle_timer(self.now)
            out = [(self.b, "a", data) for _, data in self.a.datagrams_to_send(self.now)]
            out += [(self.a, "b", data) for _, data in self.b.datagrams_to_send(self.now)]
            if not out:
                return
            for to, source, data in out:
                to.receive_datagram(data, source, self.now)

    def version(self) -> int:
        digest = self.b.digests().get("a/0")
        return digest.version if digest is not None else 0

    def whole(self) -> bool:
        """Whether b has what a published."""
        return self.version() == self.a.digests()["a/0"].version > 1

    def finish(self) -> int:
        """Let b do what is left; return how many calls that took."""
        n = 0
        while self.b.next_timer() <= self.now:
            self.b.handle_timer(self.now)
            n += 1
        return n

    def kept(self) -> set[int]:
        return kept(self.b._table.index, "a/0")


@pytest.fixture
def half_way(small_slices: None) -> Two:
    """Two nodes; b has got a's snapshot, and its index some of it."""
    two = Two()
    two.apply(*stored(PROMPT).events)
    two.until(two.whole)
    assert 0 < len(two.kept()) < BLOCKS and two.b.next_timer() <= two.now
    return two


def test_the_timer_is_due_until_the_last_slice(half_way: Two) -> None:
    left = BLOCKS - len(half_way.kept())
    assert left // SLICE <= half_way.finish() <= left // SLICE + 3
    assert len(half_way.kept()) == BLOCKS and half_way.b.next_timer() > half_way.now
    assert half_way.b.route(PROMPT, half_way.now).target == "a/0"
    half_way.b._table.index._check({"a/0": set(half_way.b.digests()["a/0"].keys.tolist()), "b/0": set()})


def test_a_newer_version_comes_before_the_last_slice(half_way: Two) -> None:
    before = half_way.version()
    (event,) = stored(PROMPT).events
    assert isinstance(event, BlocksStored)
    half_way.apply(BlocksRemoved(event.handles[BLOCKS // 2 :]))
    half_way.until(lambda: half_way.version() > before and half_way.whole())
    assert half_way.b._table.feed.waiting
    half_way.finish()
    assert len(half_way.kept()) == BLOCKS // 2
    half_way.b._check()


def test_a_new_life_comes_before_the_last_slice(half_way: Two) -> None:
    half_way.a = Node("a", DOMAIN, rng=random.Random(2), now=half_way.now, settings=half_way.a.settings)
    half_way.a.add_endpoint(incarnation=2, now=half_way.now)
    half_way.a.add_peer("b", "b", half_way.now)
    half_way.apply(*stored(PROMPT[: 40 * 16]).events)
    half_way.until(lambda: half_way.b.digests()["a/0"].incarnation == 2 and half_way.whole())
    assert half_way.b._table.feed.waiting
    half_way.finish()
    assert len(half_way.kept()) == 40
    half_way.b._check()


def test_the_owner_is_forgotten_before_the_last_slice(half_way: Two) -> None:
    half_way.b.remove_peer("a", half_way.now)
    assert half_way.b.route(PROMPT, half_way.now).target == "b/0"
    # It comes back before the last of it has gone, and nobody takes the one for the other.
    half_way.b.add_peer("a", "a", half_way.now)
    half_way.b._check()
    half_way.until(lambda: "a/0" in half_way.b.digests() and half_way.whole())
    half_way.finish()
    assert len(half_way.kept()) == BLOCKS
    half_way.b._check()


def test_the_owner_leaves_before_the_last_slice(half_way: Two) -> None:
    half_way.a.leave(half_way.now)
    half_way.until(lambda: "a/0" not in half_way.b.digests())
    assert half_way.b._table.feed.waiting
    half_way.finish()
    assert len(half_way.b._table.index) == 0
    half_way.b._check()


def test_who_asks_again_is_sent_what_is_still_lacking(small_slices: None) -> None:
    two = Two(replay_window=0)  # the same datagram is taken three times
    two.apply(*stored(PROMPT).events)
    two.a.datagrams_to_send(two.now)
    two.now = 1.0
    two.a.handle_timer(two.now)
    (syn,) = two.a.datagrams_to_send(two.now)
    two.b.receive_datagram(syn.data, "a", two.now)
    asked = two.b.datagrams_to_send(two.now)
    for _ in range(3):
        two.a.receive_datagram(asked[0].data, "b", two.now)
    # Three times the same question, of which the last one counts.
    n = len(two.a.datagrams_to_send(two.now))
    assert n <= 3 and gossip(two.a).outbox.packing
    while gossip(two.a).outbox.packing:
        two.a.handle_timer(two.now)
        n += len(two.a.datagrams_to_send(two.now))
    assert BLOCKS * 5 / 1200 < n < 2 * BLOCKS * 5 / 1200 + 4
