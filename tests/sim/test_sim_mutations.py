"""Rules of replication broken on purpose: the simulator finds each, within a bounded number of schedules.

A mutation is a patch of the core. Where another rule covers for a broken one, both broken together are found, and the
broken one alone does no harm: the table says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from prefixroute.replication import copies, gossip, members, outbox, peers, receiving, transfer, writer_set
from prefixroute.replication.receiving import TABLE, Order, Reach, Verdict
from prefixroute.sim.replication.schedule import Schedule, generate, parse, play

SCHEDULES, STEPS = 100, 50
SNAPSHOT, DELTA = True, False

ROUGH = {"links": 25, "restart": 20, "heal": 10}
"""Weights of a schedule in which much is late and many restart."""

LATE_DELTA = """
nodes 3
settings interval_s=0.1 fan_out=2 idle_interval_s=0.1 publish_within_s=0.1
0.5 store n0 20
0 split n1
0.4 restart n0 1        # n1 goes on knowing the former life
0.6 store n0 20
0 links 0.0 0.0 0.5 0.4 0.0
0.1 store n0 5          # its delta is late
0 restart n2 1
0 heal
0 one-way n1 n0
0 one-way n0 n1         # n1 tells n2 of the former life meanwhile
0.5 wait
"""

Patch = tuple[Any, Any, Any]
"""What is patched (a table, a class, a module), the key or name in it, and the value that it gets."""


def row(order: Order, reach: Reach | None, snapshot: bool, verdict: Verdict) -> list[Patch]:
    """A row of the acceptance table that says something else."""
    return [(TABLE, (order, reach, snapshot), verdict)]


class Agreeable(int):
    """A number that differs from no other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def held_nothing(held: tuple[int, int], incarnation: int, since: int, version: int) -> Verdict:
    """Judge for a copy of which no keys have come as if not even its life were known."""
    known = held[1] or incarnation < held[0]
    return JUDGE(held if known else (0, 0), incarnation, since, version)


def learn_of_no_life(self: members.Members, entry: Any, teller: str, now: float) -> None:
    """Take no word of a new life, so that its snapshot is the first that is heard of it."""
    copy = self.copies.get(entry.endpoint)
    if copy is None or copy.mine or entry.incarnation <= copy.incarnation:
        LEARN(self, entry, teller, now)


def with_more_burst(self: gossip.Gossip, node: str, domain: Any, settings: Any, *rest: Any) -> None:
    settings = dataclasses.replace(settings, burst_bytes=4 * settings.burst_bytes)
    INIT(self, node, domain, settings, *rest)


def forget_at_all(self: members.Members, endpoint: str, reason: str) -> None:
    FORGET(self, endpoint, reason)
    self._gone.pop(endpoint, None)


def publish_in_place(self: writer_set.OwnedSet, now: float = 0.0) -> bool:
    version = self.version
    done = PUBLISH(self, now)
    self.version = version
    return done


def stand_still(self: peers.Tempo, n_peers: int, now: float) -> None:
    self.next_at = now


def raise_something(update: Any, held: Any) -> Any:
    raise RuntimeError("boom")


JUDGE, INIT, FORGET, LEARN = receiving.judge, gossip.Gossip.__init__, members.Members.forget, members.Members.learn
PUBLISH, OVERHEAD = writer_set.OwnedSet.publish, outbox.overhead_bytes

NOTHING_KNOWN: list[Patch] = [(receiving, "judge", held_nothing)]
NO_WORD_OF_LIVES: list[Patch] = [(members.Members, "learn", learn_of_no_life)]
NO_MEMORY: list[Patch] = [(members.Members, "forget", forget_at_all)]
NO_AGES: list[Patch] = [(copies, "_age_ms", lambda age_s: 0)]
NO_CHECKSUM: list[Patch] = [(writer_set.WriterSet, "checksum", property(lambda keys: Agreeable(keys._checksum)))]
NO_FIT: list[Patch] = [(writer_set.WriterSet, "fits", lambda keys, delta: True)]
NO_REFUTATION: list[Patch] = [(members.Members, "_defend", lambda *arguments: None)]


class Mutation(NamedTuple):
    """Patches, the rules of which one must be found broken, and the weights of the schedules that show it."""

    name: str
    patches: list[Patch]
    rules: set[str]
    weights: Mapping[str, int] = MappingProxyType({})
    story: str = ""
    """Steps to take instead, with another seed each time."""


def schedule_of(mutation: Mutation, seed: int) -> Schedule:
    told = parse(mutation.story) if mutation.story else generate(seed, STEPS, nodes=3, weights=mutation.weights)
    # Each rule is to hold on its own: a window would keep late and repeated datagrams from it.
    return dataclasses.replace(told, seed=seed, settings=dataclasses.replace(told.settings, replay_window=0))


MUTATIONS = [
    # The acceptance table, row by row.
    Mutation(
        "a snapshot for nothing is dropped",
        row(Order.NOTHING, None, SNAPSHOT, Verdict.DROP) + NOTHING_KNOWN,
        {"quiet"},
    ),
    Mutation(
        "a delta is applied to nothing",
        row(Order.NOTHING, None, DELTA, Verdict.APPLY) + NOTHING_KNOWN,
        {"checksum", "exception"},
        ROUGH,
    ),
    Mutation(
        "an older life's snapshot replaces",
        row(Order.OLDER, None, SNAPSHOT, Verdict.REPLACE),
        {"monotonic"},
        ROUGH,
    ),
    Mutation(
        "an older life's delta is applied",
        row(Order.OLDER, None, DELTA, Verdict.APPLY),
        {"checksum", "replica"},
        ROUGH,
    ),
    Mutation(
        "a newer life's snapshot is dropped",
        row(Order.NEWER, None, SNAPSHOT, Verdict.DROP) + NO_WORD_OF_LIVES,
        {"quiet"},
    ),
    Mutation(
        "a newer life's delta is applied",
        row(Order.NEWER, None, DELTA, Verdict.APPLY) + NO_WORD_OF_LIVES,
        {"checksum"},
        story=LATE_DELTA,
    ),
    Mutation("a past snapshot replaces", row(Order.SAME, Reach.PAST, SNAPSHOT, Verdict.REPLACE), {"monotonic"}),
    Mutation(
        "a past delta is applied",
        row(Order.SAME, Reach.PAST, DELTA, Verdict.APPLY),
        {"checksum", "monotonic", "replica"},
    ),
    Mutation("a first snapshot is dropped", row(Order.SAME, Reach.NEXT, SNAPSHOT, Verdict.DUPLICATE), {"quiet"}),
    Mutation("the next delta is dropped", row(Order.SAME, Reach.NEXT, DELTA, Verdict.DROP), {"quiet"}),
    Mutation("an overlapping snapshot is dropped", row(Order.SAME, Reach.OVERLAP, SNAPSHOT, Verdict.DROP), {"quiet"}),
    Mutation(
        "an overlapping delta is applied",
        row(Order.SAME, Reach.OVERLAP, DELTA, Verdict.APPLY),
        {"checksum", "replica"},
    ),
    Mutation("a delta from ahead is applied", row(Order.SAME, Reach.AHEAD, DELTA, Verdict.APPLY), {"checksum"}, ROUGH),
    # The other rules.
    Mutation("nothing is verified", NO_CHECKSUM + NO_FIT + NO_REFUTATION, {"replica", "quiet"}, ROUGH),
    Mutation("owners do not refute", NO_REFUTATION, {"quiet"}, {"restart": 20}),
    Mutation("datagrams are too long", [(outbox, "overhead_bytes", lambda head: OVERHEAD(head) - 80)], {"budget"}),
    Mutation("bursts are too long", [(gossip.Gossip, "__init__", with_more_burst)], {"budget"}, {"store": 60}),
    Mutation("hearsay is news, and the forgotten come back", NO_MEMORY + NO_AGES, {"quiet"}),
    Mutation("a version is used twice", [(writer_set.OwnedSet, "publish", publish_in_place)], {"monotonic"}),
    Mutation("a transfer ends early", [(transfer.Assembly, "missing", lambda *arguments: [])], {"checksum", "quiet"}),
    Mutation("a timer stands still", [(peers.Tempo, "went", stand_still)], {"timer"}),
    Mutation("an update raises", [(receiving, "decode_keys", raise_something)], {"exception"}),
]

COVERED = [
    # A copy is made from a vector's entry, so its life is known before any keys come.
    Mutation("a snapshot for nothing is dropped", row(Order.NOTHING, None, SNAPSHOT, Verdict.DROP), set()),
    # An entry that tells of a new life empties the copy, so its snapshot is the first of the same life.
    Mutation("a newer life's snapshot is dropped", row(Order.NEWER, None, SNAPSHOT, Verdict.DROP), set()),
    Mutation("a newer life's delta is applied", row(Order.NEWER, None, DELTA, Verdict.APPLY), set(), story=LATE_DELTA),
    Mutation("a new life shows by its snapshot only", NO_WORD_OF_LIVES, set(), ROUGH),
    Mutation("a copy without keys has no life", NOTHING_KNOWN, set(), ROUGH),
    # News that is too old is ignored, whether or not the endpoint is remembered ...
    Mutation("the forgotten are not remembered", NO_MEMORY, set()),
    # ... and what was forgotten comes back only with later words, however young those claim to be.
    Mutation("ages do not add up along relays", NO_AGES, set()),
]


def apply(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name, value in mutation.patches:
        setter: Callable[..., None] = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
        setter(where, name, value)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_rule_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(mutation, monkeypatch)
    for seed in range(SCHEDULES):
        violation = play(schedule_of(mutation, seed)).violation
        if violation is not None:
            assert violation.rule in mutation.rules, str(violation)
            return
    pytest.fail(f"{mutation.name}: not found in {SCHEDULES} schedules")


@pytest.mark.parametrize("mutation", COVERED, ids=lambda mutation: mutation.name)
def test_what_another_rule_covers_does_no_harm_alone(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(mutation, monkeypatch)
    for seed in range(5):
        assert play(schedule_of(mutation, seed)).violation is None


def test_every_row_of_the_table_has_a_mutation() -> None:
    mutated = {name for mutation in MUTATIONS for where, name, _ in mutation.patches if where is TABLE}
    # A snapshot starts from nothing, version 0, which is ahead of no copy.
    assert set(TABLE) - mutated == {(Order.SAME, Reach.AHEAD, SNAPSHOT)}
