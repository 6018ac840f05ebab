"""A hostile member and an outsider against a fleet that serves: nothing crashes, nothing grows, requests go on."""

from __future__ import annotations

import gc
import random
import tracemalloc
from functools import cache, lru_cache
from math import inf

import msgspec
import numpy as np
import pytest
from hostile_fleet import EVIL, Attack, Attacker, Fleet, fleet
from network import DOMAIN
from said import sent_by

from prefixroute import Node, NodeSettings
from prefixroute.keys.keyset import checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.limits import honest_datagrams_per_s
from prefixroute.replication.wire import KEY_LIMIT, LAST_BEAT, MAX_MISSING, Kind, LoadWire, Update, VectorEntry, Want

LONG = "\N{SNOWMAN}" * 78
NEVER = 2**63 - 1


@lru_cache
def random_keys(n: int, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.unique(np.random.default_rng(seed).integers(0, KEY_LIMIT, n, dtype=np.uint64))


@cache
def coded(n: int, seed: int) -> tuple[int, bytes]:
    keys = random_keys(n, seed)
    return checksum(keys), encode_sorted(keys, KEY_LIMIT)


def snapshot(endpoint: str, incarnation: int, version: int, n: int, **more: object) -> Update:
    total, code = coded(n, version)
    fields = {"url": "http://evil:1", "contact": "evil", **more}
    return Update(endpoint, incarnation, 0, version, total, 1, 0, 0, code, b"", **fields)  # type: ignore[arg-type]


# --- attacks -----------------------------------------------------------------------------------------------


def outsider_floods(evil: Attacker, now: float) -> None:
    for name in evil.fleet.names:
        for i in range(2000):
            junk = b"PRT2" + evil.rng.randbytes(60)
            evil.fleet.inject(name, junk, f"spoofed {now} {i}" if i % 2 else evil.rng.choice(evil.fleet.names))


def outsider_replays(evil: Attacker, now: float) -> None:
    for name in evil.fleet.names:
        for source, _, data in evil.rng.sample(evil.tape, min(len(evil.tape), 200)):
            evil.fleet.inject(name, data, evil.rng.choice([source, "elsewhere"]))


def member_floods(evil: Attacker, now: float) -> None:
    for name in evil.fleet.names:
        for _ in range(150):
            evil.say(name, Kind.SYN, nonce=7, complete=True)


def member_speaks_for_all(evil: Attacker, now: float) -> None:
    for name in evil.fleet.names:
        for other in evil.fleet.names:
            for _ in range(20):
                evil.say(name, Kind.SYN, sender=other, nonce=7, life=evil.rng.getrandbits(31) + 1)
                evil.say(name, Kind.SYN_ACK, sender=other, echo=evil.rng.getrandbits(40), nonce=9)


def member_forges_lives(evil: Attacker, now: float) -> None:
    for name in evil.fleet.names:
        for endpoint in evil.fleet.endpoints:
            for incarnation, beat in ((NEVER, 5), (NEVER, LAST_BEAT), (2**62 + 1, 1), (5, LAST_BEAT)):
                evil.say(name, Kind.ACK, [VectorEntry(endpoint, incarnation, beat, NEVER)])
            evil.say(name, Kind.ACK, [VectorEntry(endpoint, 1, 1, 2, revision=NEVER, load=LoadWire(state=2))])
            evil.say(name, Kind.ACK, updates=[snapshot(endpoint, NEVER, NEVER, 50)])


def member_inflates(evil: Attacker, now: float) -> None:
    """Many endpoints of maximal names, each with as many keys as a datagram takes, and wants of sixteen ranges."""
    want = Want(1, 0, 2, [(i << 20, (i << 20) + 1) for i in range(MAX_MISSING)])
    for name in evil.fleet.names:
        for i in range(4):
            names = [f"{LONG[:75]}{evil.rng.getrandbits(32):x}"[:78] + "/0" for _ in range(40)]
            evil.say(name, Kind.SYN, [VectorEntry(n, NEVER // 2 - 1, 5, 9, 1, 2, 3, LoadWire(), want) for n in names])
            evil.say(name, Kind.ACK, [VectorEntry(f"{EVIL}/{i}{now}", 1, 5, 9)])
            evil.say(name, Kind.ACK, updates=[snapshot(f"{EVIL}/{i}{now}", 1, 2, 2000, url="u" * 256)])


def member_cuts(evil: Attacker, now: float) -> None:
    """Transfers in parts that never end."""
    for name in evil.fleet.names:
        for i in range(5):
            endpoint = f"{EVIL}/{i}"
            evil.say(name, Kind.ACK, [VectorEntry(endpoint, 1, 5, 9)])
            parts = []
            for _ in range(60):
                lower = 2 * evil.rng.getrandbits(46)
                parts.append(Update(endpoint, 1, 0, 9, 1, 1, lower, lower + 1, b"", b""))
            evil.say(name, Kind.ACK, updates=parts)


def member_claims_all(evil: Attacker, now: float) -> None:
    """It holds every prompt, is idle, and serves nothing."""
    keys = np.array(sorted(evil.fleet.all_keys()), np.uint64)
    version = 2 + int(now * 2)
    update = Update(
        *(f"{EVIL}/0", 1, 0, version, checksum(keys), 1, 0, 0, encode_sorted(keys, KEY_LIMIT), b""), url="http://evil:1"
    )
    load = LoadWire(prefill_tokens_per_s=2**32 - 1, overhead_us=1, capacity_tokens=NEVER)
    for name in evil.fleet.names:
        entry = VectorEntry(f"{EVIL}/0", 1, version, version, checksum(keys) & 0xFFFF, 0, version, load)
        evil.say(name, Kind.ACK, [entry], [update])


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        *(outsider_floods, outsider_replays, member_floods, member_speaks_for_all, member_forges_lives),
        *(member_inflates, member_cuts, member_claims_all),
    )
}


def everything(evil: Attacker, now: float) -> None:
    list(ATTACKS.values())[int(now) % len(ATTACKS)](evil, now)


# --- what must hold ----------------------------------------------------------------------------------------


@lru_cache
def undisturbed() -> Fleet:
    run = fleet(lambda evil, now: None)
    run.run()
    return run


@lru_cache
def attacked(name: str) -> Fleet:
    run = fleet(ATTACKS.get(name, everything))
    run.run()
    return run


def whole(run: Fleet) -> None:
    """Every request was answered, and every node agrees with itself and keeps no more than it may."""
    assert run.served.counts["answered"] == len(run.trace.arrivals)
    for node in run.nodes:
        settings: NodeSettings = node.settings
        node._check()
        digests = node.digests()
        members = node._members
        by_owner: dict[str, int] = {}
        for endpoint in digests:
            owner = endpoint.partition("/")[0]
            by_owner[owner] = by_owner.get(owner, 0) + 1
        kept = {
            c.endpoint: len(c.keys) + (c.assembly.size if c.assembly else 0)
            for c in members.copies.values()
            if not c.mine
        }
        members.holdings._check(kept)
        assert len(digests) <= settings.max_endpoints
        assert max(by_owner.values()) <= settings.max_owner_endpoints
        assert len(members.left) <= settings.max_endpoints
        assert sum(kept.values()) <= settings.max_all_keys
        assert len(members.peers) == len(run.nodes)
        assert len(node.counters) < 80, "a counter is no place for what others say"
        assert len(node.events()) <= 1024


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_crashes_and_honest_requests_keep_their_throughput(name: str) -> None:
    run, usual = attacked(name), undisturbed()
    whole(run)
    throughput = len(run.trace.arrivals) / run.served.virtual_s
    assert throughput >= 0.95 * len(usual.trace.arrivals) / usual.served.virtual_s


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_leaves_no_trace_when_it_is_over(name: str) -> None:
    """Some rounds later the honest ones know each other's caches as if nothing had been."""
    run = attacked(name)
    run.settle(10.0)
    for node in run.nodes:
        digests = node.digests()
        for other, endpoint in zip(run.nodes, run.endpoints, strict=True):
            owners = other.digests()[endpoint]
            assert digests[endpoint][:2] == owners[:2]
            assert np.array_equal(digests[endpoint].keys, owners.keys)
            assert node.endpoint_url(endpoint) == endpoint
        rows = {row.endpoint: row for row in node.stats(run.now).endpoints}
        assert all(rows[endpoint].usable for endpoint in run.endpoints)


def test_all_attacks_at_once() -> None:
    run = attacked("everything")
    whole(run)
    assert run.served.virtual_s <= undisturbed().served.virtual_s / 0.95


def test_who_refuses_what_it_draws_is_not_chosen_after_twenty() -> None:
    run = attacked("member_claims_all")
    assert 0 < len(run.tried_at) <= 20 * len(run.nodes)
    first, last = run.tried_at[0], run.tried_at[-1]
    assert sum(at > (first + last) / 2 for at in run.tried_at) <= len(run.tried_at) / 2


@pytest.mark.parametrize("name", ["member_floods", "outsider_replays", "member_speaks_for_all"])
def test_answers_are_bounded(name: str) -> None:
    run = attacked(name)
    settings = run.nodes[0].settings
    seconds = run.served.virtual_s + 2
    most = settings.excess * 2 / settings.interval_s * seconds
    answers = sum(data[4] != Kind.SYN for _, to, data in run.attacker.tape if to == EVIL)
    assert answers <= len(run.nodes) * most * (1 + settings.burst_bytes / settings.datagram_bytes)


def test_a_flood_is_looked_at_no_more_than_it_may() -> None:
    run = attacked("outsider_floods")
    for node in run.nodes:
        sources = 1 + node.settings.fan_out * (len(run.nodes) - 1 + 1)
        most = node.settings.excess * honest_datagrams_per_s(node.settings) * sources * (run.served.virtual_s + 2)
        assert node.counters["rejected_forged"] <= most
        assert node.counters["rejected_limited"] > 1000


BYTES_OF_A_NODE = 4 << 20
BYTES_OF_A_KEY = 136
BYTES_OF_AN_ENDPOINT = 16384
"""The bound that docs/security.md states."""


def test_memory_of_a_node_stays_within_its_stated_bound() -> None:
    """All that one member can make a node keep: endpoints of maximal names, sets, parts of transfers, last words."""
    bounds = {"max_endpoints": 500, "max_hearsay": 200, "max_all_keys": 150_000, "max_owner_keys": 100_000}
    settings = NodeSettings(replay_window=0, peer_work=inf, excess=inf, **bounds)  # type: ignore[arg-type]
    node = Node("a", DOMAIN, rng=random.Random(1), now=0.0, settings=settings)
    node.add_peer(EVIL, EVIL, 0.0)

    def say(**fields: object) -> None:
        node.receive_datagram(sent_by(EVIL, Kind.ACK, **fields), EVIL, 1.0)

    coded(900, 2)
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(300):
            names = [f"{LONG[:70]}{i:05}"[:76] + "/0", f"{EVIL}/{i}"]
            say(vector=[VectorEntry(name, 1, 5, 9, 1, 2, 3, LoadWire(reason="r" * 64)) for name in names])
            say(updates=[snapshot(name, 1, 2, 900, url="u" * 256, contact="c" * 80) for name in names])
            part = Update(names[1], 1, 0, 9, 1, 1, 2 * i, 2 * i + 1, b"", b"")
            say(updates=[msgspec.structs.replace(part, lower=4 * j, upper=4 * j + 1) for j in range(40)])
        for i in range(600):
            say(vector=[VectorEntry(f"{EVIL}/{i}", 1, LAST_BEAT), VectorEntry(f"{EVIL}/x{i}", 1, 1)])
        while node.next_timer() <= 1.0:
            node.handle_timer(1.0)
            node.datagrams_to_send(1.0)
        node.events()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    keys, endpoints = node._members.holdings.total, len(node.digests())
    assert keys > 40_000 and endpoints > 400 and len(node._members.left) > 200
    assert held <= BYTES_OF_A_NODE + BYTES_OF_A_KEY * keys + BYTES_OF_AN_ENDPOINT * endpoints
