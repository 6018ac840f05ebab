"""Three bugs that chitchat, a gossip library, once had: schedules written by hand, that must fail on each of them.

- #176: an off-by-one asked for a needless reset at a border of the acceptance rules.
- #179: a reset made for a stale vector came after a third peer had brought the receiver further.
- #170: the size budget was reckoned from the vector that came, so packets overflowed.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import Datagram, Node, NodeSettings
from prefixroute.replication.receiving import Verdict, judge
from prefixroute.sim import InvariantError, Link, Network
from prefixroute.sim.replication.quiet import settle

# --- #176: no snapshot where a delta applies ---------------------------------------------------------------

HELD = 5


@pytest.mark.parametrize(("since", "version"), [(s, v) for s, v in product(range(1, 8), range(2, 9)) if s < v])
def test_at_every_border_a_delta_leads_to_a_delta(since: int, version: int) -> None:
    verdict = judge((9, HELD), 9, since, version)
    if version <= HELD:
        assert verdict is Verdict.DUPLICATE
    elif since == HELD:
        assert verdict is Verdict.APPLY
    else:
        # Held stays, and the next vector says so: the owner's log reaches back to it.
        assert verdict is Verdict.WANT_DELTA


@pytest.mark.parametrize("behind", range(1, 6))
@pytest.mark.parametrize("relayed", [False, True])
def test_a_receiver_that_is_some_versions_behind_is_sent_no_snapshot(behind: int, relayed: bool) -> None:
    net = Network(behind, settings=NodeSettings(publish_within_s=0.0))
    for name in ("owner", "relay", "receiver"):
        net.add(name, endpoints=int(name == "owner"))
    engine = net.engines["owner/0"]
    engine.store(40, net.now)
    net.run(2)
    net.split(["receiver"])
    if relayed:
        net.block([("owner", "receiver")])
    version = net.nodes["owner"].digests()["owner/0"].version
    for _ in range(behind):
        engine.store(1, net.now)
        engine.evict(net.now, 0.05)
        net.run(0.5)
    assert net.nodes["owner"].digests()["owner/0"].version >= version + behind
    replaced = net.nodes["receiver"].counters["updates_replace"]
    net.heal()
    if relayed:
        net.block([("owner", "receiver")])
    net.run(3)
    assert not net.lagging()
    assert net.nodes["receiver"].counters["updates_replace"] == replaced
    assert net.nodes["receiver"].counters["updates_apply"] > 0


# --- #179: a late snapshot is dropped ----------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_that_comes_after_a_third_peer_told_more_changes_nothing(seed: int, restarts: bool) -> None:
    # The table alone must do: such a late datagram is of a contact that was never proved.
    net = Network(seed, settings=NodeSettings(replay_window=0))
    for name in ("owner", "relay", "receiver"):
        net.add(name, endpoints=int(name == "owner"))
    net.split(["receiver"], ["owner", "relay"])
    net.engines["owner/0"].store(30, net.now)
    net.run(2)
    # The relay answers the receiver's empty vector with a snapshot, which is long under way.
    net.heal()
    net.block([("owner", "receiver")])
    net.links["relay", "receiver"] = Link(delay_s=(6.0, 6.0))
    net.run(1)
    relay = net.nodes["relay"].digests()["owner/0"]
    assert net.nodes["receiver"].digests() == {}
    # Meanwhile the owner goes on, and tells the receiver itself.
    net.heal()
    if restarts:
        net.stop("owner")
        net.add("owner", incarnation=2)
    net.engines["owner/0"].store(5, net.now)
    net.run(2)
    held = net.nodes["receiver"].digests()["owner/0"]
    assert held[:2] > relay[:2]
    receiver = net.nodes["receiver"]
    late = "updates_drop" if restarts else "updates_duplicate"
    before = receiver.counters[late]
    net.run(5)
    assert receiver.counters[late] > before, "the late snapshot came"
    assert net.nodes["receiver"].digests()["owner/0"][:2] == held[:2]
    settle(net)


# --- #170: budgets hold for any vector ---------------------------------------------------------------------


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(
    st.integers(1000, 3000),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([1, 20, 700]),
    st.sampled_from([0, 1, 25]),
    st.integers(0, 3),
)
def test_whatever_vector_comes_the_answer_fits(
    datagram: int, bursts: int, endpoints: int, blocks: int, others: int, seed: int
) -> None:
    """The answerer's own vector, what it owes and the vector that came all vary; the oracle weighs every datagram."""
    net = Network(seed, settings=NodeSettings(datagram_bytes=datagram, burst_bytes=datagram * bursts))
    net.add("n0", endpoints=endpoints)
    net.add("a-name-that-is-as-long-as-names-may-be40", endpoints=others)
    rng = random.Random(seed)
    for engine in list(net.engines.values())[:: rng.randrange(1, 4)]:
        engine.store(blocks, net.now)
    net.run(1.0)
    for engine in net.engines.values():
        engine.store(1, net.now)
    net.run(0.5)


def test_a_datagram_one_byte_too_long_is_seen() -> None:
    net = Network(1)
    node: Node = net.add("n0")
    size = node.settings.datagram_bytes
    for length, burst in ((size, 1), (size + 1, 1), (size, 55)):
        out = [Datagram("n1", b"x" * length)] * burst
        if length <= size and burst * length <= node.settings.burst_bytes:
            net.oracle.acted("n0", node, {"n0/0"}, out, [], 0.0)
            continue
        with pytest.raises(InvariantError, match="budget"):
            net.oracle.acted("n0", node, {"n0/0"}, out, [], 0.0)
