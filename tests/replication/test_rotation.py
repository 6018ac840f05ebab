"""Secrets that authenticate are changed on a running fleet without losing a word; the one of the hashes costs more."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from network import DOMAIN, Network, copies, fleet, only
from said import told

from prefixroute import DatagramRejected, DomainMismatch, Node, NodeSettings, ReplicaChanged, UsageError
from prefixroute.replication.wire import decode

OLD, NEW = DOMAIN.secret, b"another secret of twenty"
STEPS: list[Sequence[bytes]] = [(OLD, NEW), (NEW, OLD), (NEW,)]


def losses(net: Network) -> list[object]:
    """What a fleet lost: refused datagrams, replicas forgotten or discarded."""
    lost = [e for told in net.told.values() for e in told if isinstance(e, (DatagramRejected, DomainMismatch))]
    gone = [e for told in net.told.values() for e in told if isinstance(e, ReplicaChanged) and e.state != "learnt"]
    return [*lost, *(event for event in gone if event.state != "replaced")]


def work(net: Network, seconds: float) -> None:
    for engine in net.engines.values():
        engine.store(20, net.now)
        engine.evict(net.now, 0.5)
    net.run(seconds)


@pytest.mark.parametrize("n", [2, 5])
def test_three_steps_change_the_secret_and_nothing_is_lost(n: int) -> None:
    net = fleet(n)
    held = {name: copies(node) for name, node in net.nodes.items()}
    for step in STEPS:
        for node in list(net.nodes.values()):
            node.set_secrets(step)
            # The fleet is mixed for a while, and works on.
            work(net, 0.4)
            assert net.unheard() == []
        assert net.settle(5) < 2
    assert losses(net) == []
    assert {name: copies(node) for name, node in net.nodes.items()} == held
    assert all(node.counters["updates_apply"] >= 5 for node in net.nodes.values())
    net.nodes["n0"].handle_timer(net.now + 1)
    assert decode(net.nodes["n0"].datagrams_to_send(net.now + 1)[0].data, NEW).message.sender == "n0"


def test_the_counter_tells_when_the_old_secret_is_not_used_any_more() -> None:
    net = fleet(3)
    for node in net.nodes.values():
        node.set_secrets((NEW, OLD))
        net.run(0.5)
    net.run(0.5)
    before = [node.counters["datagrams_signed_otherwise"] for node in net.nodes.values()]
    assert before[0] > 0
    net.run(5)
    assert [node.counters["datagrams_signed_otherwise"] for node in net.nodes.values()] == before


def test_a_step_too_early_is_refused_and_heals_when_the_other_has_the_secret() -> None:
    net = fleet(2, forget_after_s=30.0)
    net.nodes["n0"].set_secrets((NEW, OLD))
    net.run(5)
    assert {event.kind for event in told_all(net, "n1")} == {"forged"}
    net.nodes["n1"].set_secrets((OLD, NEW))
    work(net, 1)
    assert net.settle(5) < 2
    assert net.unheard() == []


def told_all(net: Network, name: str) -> list[DatagramRejected]:
    return [event for event in net.told[name] if isinstance(event, DatagramRejected)]


def test_a_dropped_secret_is_worth_nothing_and_a_new_node_needs_the_new_one() -> None:
    net = fleet(2)
    for step in STEPS:
        for node in net.nodes.values():
            node.set_secrets(step)
    net.run(1)
    outsider = Node("n2", DOMAIN, rng=random.Random(5), now=net.now, settings=net.settings)
    outsider.add_peer("n0", "n0", net.now)
    net.nodes["n0"].add_peer("n2", "n2", net.now)
    outsider.handle_timer(net.now)
    net.inject("n0", only(outsider, net.now), "n2")
    assert told_all(net, "n0")[-1].kind == "forged"
    joiner = Node("n2", DOMAIN, rng=random.Random(5), now=net.now, settings=net.settings, secrets=[NEW])
    joiner.add_peer("n0", "n0", net.now)
    joiner.handle_timer(net.now)
    net.nodes["n0"].receive_datagram(only(joiner, net.now), "n2", net.now)
    challenge = next(data for address, data in net.nodes["n0"].datagrams_to_send(net.now) if address == "n2")
    joiner.receive_datagram(challenge, "n0", net.now)
    assert not told(joiner, DatagramRejected)
    assert joiner.stats(net.now).peers == {"n0": "heard"}


@pytest.mark.parametrize("secrets", [(), b"bare", "text", (b"x" * 65,), (b"a", b"a"), tuple(b"abcde"), [b"a"] * 5])
def test_secrets_that_cannot_be_used_are_refused(secrets: Sequence[bytes]) -> None:
    node = Node("a", DOMAIN, rng=random.Random(1), now=0.0)
    with pytest.raises(UsageError, match="secret"):
        node.set_secrets(secrets)


def test_the_hash_secret_changes_node_by_node_and_the_halves_share_nothing_meanwhile() -> None:
    """Both halves go on, refuse each other by name, and are one fleet again at the end."""
    settings = NodeSettings(suspect_after_s=1.0, forget_after_s=4.0)
    net = Network(2, settings=settings)
    names = [f"n{i}" for i in range(4)]
    other = dataclasses.replace(DOMAIN, secret=NEW)
    for name in names:
        net.add(name)
        net.nodes[name].set_secrets([OLD])
    work(net, 3)
    for i, name in enumerate(names):
        net.stop(name)
        node = net.add(name, incarnation=2, domain=other)
        node.set_secrets([OLD])
        for _ in range(8):
            work(net, 1.0)
        moved = names[: i + 1]
        for half in (moved, names[i + 1 :]):
            for one in half:
                assert set(net.nodes[one].digests()) == {f"{mate}/0" for mate in half}
        if 0 < i < 3:
            fields = {e.field for told in net.told.values() for e in told if isinstance(e, DomainMismatch)}
            # Who has heard of no field yet is told by its fingerprint.
            assert {"secret"} <= fields <= {"secret", "fingerprint"}
    assert net.settle(5) < 2
    assert all(node.counters["checksum_mismatches"] == 0 for node in net.nodes.values())
