"""The fair queue: what it releases and when, whose turn it is, what it charges; it never holds without need."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from prefixroute import Entry, FairQueue, FairSettings, UsageError
from prefixroute.fairness import MAX_TENANTS, OTHER, FairStats

ONE = FairSettings(window_tokens=1, overhead_tokens=1)
"""One request at the engine at a time."""


def rows(queue: FairQueue) -> dict[str, FairStats]:
    return {row.tenant: row for row in queue.stats()}


def order(queue: FairQueue, first: object, n: int = 1000) -> list[object]:
    """The tickets in the order in which they are released, when each one ends before the next is asked for."""
    found, at = [first], 0.0
    todo = deque([first])
    while todo and len(found) < n:
        at += 1
        released = queue.leave(todo.popleft(), at)
        found += released
        todo += released
    queue._check()
    return found


def test_the_engine_is_given_a_window_and_the_rest_is_held() -> None:
    queue = FairQueue(FairSettings(window_tokens=100, overhead_tokens=10))
    assert [queue.enter(i, "a", 30, 0.0) for i in range(4)] == [Entry.GO, Entry.GO, Entry.GO, Entry.HELD]
    assert (queue.held, queue.ahead_tokens, queue.window_tokens) == (1, 120, 100)
    assert queue.first_token(0, 1.0) == [3]
    assert queue.first_token(0, 1.0) == []
    assert queue.ahead_tokens == 120
    assert queue.leave(0, 2.0) == queue.leave(0, 2.0) == []
    row = rows(queue)["a"]
    assert (row.held, row.released, row.tokens, row.waited_s) == (0, 4, 160, 1.0)
    queue._check()


def test_an_idle_engine_never_waits_however_long_the_prompt() -> None:
    queue = FairQueue(ONE)
    assert queue.enter("long", "a", 10**9, 0.0) is Entry.GO
    assert queue.enter("next", "a", 0, 0.0) is Entry.HELD
    assert queue.leave("long", 1.0) == ["next"]


def test_tenants_that_wait_take_turns_and_within_one_it_is_first_come_first_served() -> None:
    queue = FairQueue(ONE)
    queue.enter(("a", 0), "a", 9, 0.0)
    for i in range(1, 5):
        queue.enter(("a", i), "a", 9, 0.0)
    for i in range(3):
        queue.enter(("b", i), "b", 9, 0.0)
    names = [*"abababaa"]
    counts: Counter[str] = Counter()
    for name, ticket in zip(names, order(queue, ("a", 0)), strict=True):
        assert ticket == (name, counts[name])
        counts[name] += 1


def test_the_charge_is_what_has_to_be_computed() -> None:
    """Of one tenant most is cached: it is served ten times as often."""
    queue = FairQueue(FairSettings(window_tokens=1, overhead_tokens=10))
    queue.enter("first", "a", 0, 0.0)
    for i in range(100):
        queue.enter(("cached", i), "a", 0, 0.0)
        queue.enter(("new", i), "b", 90, 0.0)
    served = Counter(ticket[0] for ticket in order(queue, "first", 67)[1:] if isinstance(ticket, tuple))
    # 600 tokens each, the first one's among them, and the request that is under way.
    assert served == {"cached": 59, "new": 7}


def test_a_weight_is_a_share() -> None:
    queue = FairQueue(FairSettings(1, 1, {"a": 3.0}))
    queue.enter("first", "c", 9, 0.0)
    for i in range(40):
        queue.enter(("a", i), "a", 9, 0.0)
        queue.enter(("b", i), "b", 9, 0.0)
    served = Counter(ticket[0] for ticket in order(queue, "first", 41)[1:] if isinstance(ticket, tuple))
    assert served == {"a": 30, "b": 10}


def test_a_tenant_that_comes_back_is_next_and_has_saved_nothing_up() -> None:
    queue = FairQueue(ONE)
    queue.enter(0, "greedy", 9, 0.0)
    for i in range(1, 50):
        queue.enter(i, "greedy", 9, 0.0)
    done = order(queue, 0, 20)
    for i in range(5):
        queue.enter(("light", i), "light", 9, 1.0)
    following = order(queue, done[-1], 9)[1:]
    assert [isinstance(ticket, tuple) for ticket in following] == [True, False] * 4


def test_who_used_an_idle_engine_owes_nobody() -> None:
    queue = FairQueue(ONE)
    for i in range(20):
        queue.enter(i, "a", 1000, float(i))
        queue.leave(i, i + 0.5)
    queue.enter("x", "c", 1, 30.0)
    queue.enter("a", "a", 9, 30.0)
    queue.enter("b", "b", 9, 30.0)
    assert order(queue, "x") == ["x", "a", "b"]


def test_what_the_engine_really_computed_is_charged() -> None:
    """A prompt was taken for cached and was not: the other tenant gets as much before it is its turn again."""
    queue = FairQueue(FairSettings(window_tokens=1, overhead_tokens=10))
    queue.enter("wrong", "a", 0, 0.0)
    for i in range(20):
        queue.enter(("a", i), "a", 0, 0.0)
        queue.enter(("b", i), "b", 0, 0.0)
    assert rows(queue)["a"].tokens == 10
    (following,) = queue.leave("wrong", 1.0, 90)
    assert rows(queue)["a"].tokens == 100
    assert rows(queue)["a"].deficit_tokens == -100
    names = [ticket[0] for ticket in order(queue, following) if isinstance(ticket, tuple)]
    assert names[:11] == ["b"] * 10 + ["a"]


def test_turns_that_corrections_made_void_do_not_pile_up() -> None:
    queue = FairQueue(FairSettings(window_tokens=10**6, overhead_tokens=1))
    for i in range(300):
        queue.enter(i, "a", 9, 0.0)
    queue.resize(1, 0.0)
    queue.enter("held", "a", 9, 0.0)
    for i in range(299):
        assert queue.leave(i, 1.0, i + 10) == []
        assert len(queue._turns) <= 67
    queue._check()
    assert queue.leave(299, 1.0) == ["held"]


def test_what_came_to_nothing_costs_nothing() -> None:
    queue = FairQueue(FairSettings(window_tokens=1, overhead_tokens=10))
    queue.enter("failed", "a", 500, 0.0)
    queue.enter("a", "a", 5, 0.0)
    queue.enter("b", "b", 5, 0.0)
    queue.enter("b2", "b", 5, 0.0)
    assert rows(queue)["a"].deficit_tokens == -510
    assert queue.leave("failed", 1.0, 0) == ["b"]
    assert rows(queue)["a"].tokens == 0
    assert order(queue, "b") == ["b", "a", "b2"]


def test_a_request_that_is_cancelled_while_it_is_held_leaves_no_trace() -> None:
    queue = FairQueue(ONE)
    for ticket in ("x", "y", "z"):
        queue.enter(ticket, "a", 9, 0.0)
    queue.enter("only", "b", 9, 0.0)
    assert queue.leave("y", 1.0) == queue.leave("only", 1.0) == []
    queue._check()
    assert rows(queue)["b"]._replace(tenant="") == FairStats("", 0, 0, 0.0, 0, 0, 0.0, 0)
    assert order(queue, "x") == ["x", "z"]
    assert (queue.held, queue.ahead_tokens) == (0, 0)


def test_one_tenant_never_takes_the_last_place() -> None:
    queue = FairQueue(FairSettings(1, 1, max_held=8))
    entries = [queue.enter(i, "greedy", 9, 0.0) for i in range(20)]
    assert Counter(entries) == {Entry.GO: 1, Entry.HELD: 4, Entry.FULL: 15}
    assert queue.enter("light", "light", 9, 0.0) is Entry.HELD
    assert (rows(queue)["greedy"].refused, rows(queue)["light"].refused) == (15, 0)
    for i in range(100):
        queue.enter(("many", i), f"t{i}", 9, 0.0)
        queue._check()
    assert queue.held <= 8


def test_the_window_can_be_set_while_requests_wait() -> None:
    queue = FairQueue(ONE)
    for i in range(6):
        queue.enter(i, "a", 9, 0.0)
    assert queue.resize(40, 1.0) == [1, 2, 3]
    assert queue.resize(1, 1.0) == queue.first_token(1, 1.0) == []
    with pytest.raises(UsageError, match="at least one"):
        queue.resize(0, 1.0)


def test_what_a_request_would_overtake() -> None:
    queue = FairQueue(ONE)
    queue.enter("x", "greedy", 9, 0.0)
    assert queue.overtaken("light") == 0
    for i in range(10):
        queue.enter(i, "greedy", 9, 0.0)
    # It is level with the latest turn; the greedy tenant has had one request since.
    assert (queue.overtaken("light"), queue.overtaken("greedy")) == (100, 0)
    for i in range(3):
        queue.enter(("light", i), "light", 9, 0.0)
    assert queue.overtaken("light") == 80
    assert queue.overtaken("greedy") == 0


def test_tenants_without_number_share_an_account_while_the_others_are_busy() -> None:
    queue = FairQueue(FairSettings(1, 1, max_held=4 * MAX_TENANTS))
    for i in range(MAX_TENANTS + 3):
        queue.enter(i, f"t{i}", 9, 0.0)
    assert len(queue.stats()) == MAX_TENANTS + 1
    assert rows(queue)[OTHER].held == 3
    queue._check()
    assert len(order(queue, 0, 5000)) == MAX_TENANTS + 3
    # Nobody is busy any more: who was here longest ago makes room.
    queue.enter("new", "new", 9, 0.0)
    assert "new" in rows(queue)
    assert "t0" not in rows(queue)


@pytest.mark.parametrize(
    "settings",
    [
        {"window_tokens": 0},
        {"overhead_tokens": 0},
        {"max_held": 1},
        {"weights": {"a": 0.0}},
        {"weights": {"a": float("inf")}},
        {"weights": {"a": float("nan")}},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        FairSettings(**settings)  # type: ignore[arg-type]


def test_a_ticket_enters_once() -> None:
    queue = FairQueue()
    queue.enter("x", "a", 1, 0.0)
    with pytest.raises(UsageError, match="already"):
        queue.enter("x", "b", 1, 0.0)
    assert queue.first_token("unknown", 0.0) == queue.leave("unknown", 0.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_at_random_counts_agree_and_nothing_is_held_without_need(seed: int) -> None:
    rng = random.Random(seed)
    window, held = rng.choice((1, 100, 1000)), rng.choice((4, 64))
    queue = FairQueue(FairSettings(window, 5, {"t1": 2.5}, held))
    inside: set[int] = set()
    gone: list[int] = []
    for ticket in range(400):
        dice = rng.random()
        if dice < 0.5:
            entry = queue.enter(ticket, f"t{rng.randrange(5)}", rng.randrange(300), float(ticket))
            inside |= {ticket} if entry is not Entry.FULL else set()
            gone += [ticket] if entry is Entry.GO else []
        elif dice < 0.7 and gone:
            gone += queue.first_token(gone.pop(rng.randrange(len(gone))), float(ticket))
        elif dice < 0.95 and inside:
            leaving = rng.choice(sorted(inside))
            inside.discard(leaving)
            released = queue.leave(leaving, float(ticket), rng.choice((None, 0, 200)))
            gone = [one for one in gone + released if one != leaving]
        else:
            gone += queue.resize(window, float(ticket))
        queue._check()
        assert set(gone) <= inside
    for ticket in sorted(inside):
        queue.leave(ticket, 500.0)
        queue._check()
    assert (queue.held, queue.ahead_tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(10))
def test_tenants_that_always_wait_are_never_apart_by_more_than_a_request_of_each(seed: int) -> None:
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.0, "c": 0.5}
    queue = FairQueue(FairSettings(1, 1, weights))
    longest = 500
    queue.enter("first", "other", 1, 0.0)
    for i in range(300):
        for name in weights:
            queue.enter((name, i), name, rng.randrange(longest), 0.0)
    at, todo = 0.0, deque(["first"])
    while all(rows(queue)[name].held > 1 for name in weights):
        at += 1
        todo += queue.leave(todo.popleft(), at)  # type: ignore[arg-type]
        had = {name: rows(queue)[name].tokens / weight for name, weight in weights.items()}
        for one in weights:
            for two in weights:
                assert abs(had[one] - had[two]) <= longest / weights[one] + longest / weights[two]
    assert at > 100
