"""The table of endpoints: index, fleet and owner's side agree, whoever joins, changes or leaves, in whatever order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from prefixroute import Domain, EngineBatch, LoadReport, PushBackSettings, ResidencyChanged, UsageError
from prefixroute.endpoint.local import OwnSettings
from prefixroute.endpoint.table import EndpointTable
from prefixroute.events import Journal
from prefixroute.keys.keyset import NO_KEYS, Keys
from prefixroute.replication.copies import Copy, Peer
from prefixroute.replication.gossip_settings import GossipSettings
from prefixroute.replication.limits import Limits
from prefixroute.routing import index_feed
from prefixroute.routing.fleet import Fleet
from prefixroute.routing.standing import LocalStanding, PeerStanding
from prefixroute.testing import stored


class World:
    """A table, and gossip's side of it."""

    def __init__(self) -> None:
        self.copies: dict[str, Copy] = {}
        self.peers: dict[str, Peer] = {}
        self.news: list[float] = []
        self.first_news: list[float] = []
        self.journal = Journal()
        own = OwnSettings(Domain("m", "t"), PushBackSettings(), 2.0, 49152)
        fleet = Fleet(random.Random(1))
        self.table = EndpointTable(fleet, own, self.copies, self.peers, self._hear, 0.0, self.journal)

    def _hear(self, now: float, first: bool) -> None:
        self.news.append(now)
        self.first_news += [now] if first else []

    def own(self, name: str, now: float = 0.0) -> None:
        self.copies[name] = Copy(name, True, 1, now)
        self.table.add(self.copies[name], ("gpu",), now)

    def drop_own(self, name: str, now: float) -> None:
        self.table.begin(now)
        del self.copies[name]
        self.table.remove(name)

    def meet(self, name: str, now: float) -> None:
        self.copies[name] = Copy(name, False, 1, now)
        self.follow({name}, False, now)

    def publish(self, name: str, keys: set[int], now: float) -> None:
        """A replica's set becomes this one."""
        self.table.begin(now)
        copy = self.copies[name]
        before = set(copy.keys.keys.tolist())
        copy.keys.replace(copy.keys.version + 1, array(keys))
        self.table.replica_changed(name, array(keys - before), array(before - keys))
        self.table.feed.go_on()

    def forget(self, name: str, now: float) -> None:
        self.table.begin(now)
        copy = self.copies.pop(name)
        if len(copy.keys):
            self.table.replica_changed(name, NO_KEYS, copy.keys.keys)
        self.table.follow((), True, now)

    def follow(self, touched: set[str], lost: bool, now: float) -> None:
        self.table.begin(now)
        self.table.follow(touched, lost, now)

    def peer(self, node: str) -> None:
        self.peers[node] = Peer(node, "address", 0.0, Limits(GossipSettings()))


def array(keys: set[int]) -> Keys:
    return np.array(sorted(keys), np.uint64)


@pytest.mark.parametrize("seed", range(8))
def test_all_sides_agree_whatever_comes_and_goes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_feed, "SLICE_KEYS", 20)
    rng, world, now = random.Random(seed), World(), 0.0
    for _ in range(250):
        now += rng.random()
        name = f"n{rng.randrange(6)}/{rng.randrange(2)}"
        mine, known = name.startswith("n0"), name in world.copies
        if not known:
            if mine:
                world.own(name, now)
            else:
                world.meet(name, now)
        elif rng.random() < 0.2:
            (world.drop_own if mine else world.forget)(name, now)
        elif mine:
            tokens = [rng.randrange(9) for _ in range(rng.randrange(200))]
            world.table.apply(name, stored(tokens), now)
        elif rng.random() < 0.3:
            world.peer(name[:2])
            world.follow({name}, False, now)
            standing = world.table.fleet.standings[name]
            assert isinstance(standing, PeerStanding) and standing.peer is world.peers[name[:2]]
        else:
            world.publish(name, {rng.randrange(300) for _ in range(rng.randrange(60))}, now)
        world.table._check()
    for name in list(world.copies):
        (world.drop_own if name in world.table.locals else world.forget)(name, now)
    while world.table.behind:
        world.table.begin(now)
        world.table.feed.go_on()
    assert len(world.table.index) == 0 and not world.table.fleet.by_bit and not world.table.fleet._ranking


def test_an_endpoint_has_one_row_and_one_of_this_nodes_own_its_owners_side() -> None:
    world = World()
    world.own("n0/0")
    world.meet("n1/0", 0.0)
    ours, theirs = (world.table.fleet.standings[name] for name in ("n0/0", "n1/0"))
    assert isinstance(ours, LocalStanding) and isinstance(theirs, PeerStanding)
    assert world.table.local("n0/0").standing is ours
    with pytest.raises(UsageError, match="no endpoint of this node"):
        world.table.local("n1/0")


def test_what_an_engine_does_is_news_and_a_probe_is_none() -> None:
    world = World()
    world.own("n0/0")
    world.table.apply("n0/0", stored(list(range(64))), 1.0)
    assert world.news == [1.0]
    world.table.probed("n0/0", LoadReport(queued_tokens=800, prefill_tokens_per_s=100), 2.0)
    assert world.news == [1.0]
    assert world.table.fleet.standings["n0/0"].wait_s(2.0) == 8.0
    world.table.probed("n0/0", LoadReport(asleep=True), 3.0)
    assert world.news == [1.0, 3.0], "an engine that sleeps has dropped its cache"


def test_a_batch_of_another_rank_changes_nothing_and_is_told_once() -> None:
    world = World()
    world.own("n0/0")
    for rank in (0, 1, 1):
        events = stored(list(range(rank, rank + 64))).events
        world.table.apply("n0/0", EngineBatch(events, rank), 1.0)
    assert [event.state for event in world.journal.take_events() if isinstance(event, ResidencyChanged)] == ["mixed"]
    assert world.table.local("n0/0").residency.live_blocks == 4


def test_the_first_blocks_that_a_node_holds_are_told_as_such_and_no_others() -> None:
    world = World()
    world.own("n0/0")
    world.own("n0/1")
    world.table.apply("n0/0", EngineBatch(()), 1.0)
    world.table.apply("n0/0", stored(list(range(64))), 2.0)
    world.table.apply("n0/1", stored(list(range(64))), 3.0)
    world.table.apply("n0/0", stored(list(range(100, 164))), 4.0)
    assert world.first_news == [2.0]
