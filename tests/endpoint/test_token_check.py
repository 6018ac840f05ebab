"""Tokens that never match are told: where an engine stores prompts otherwise than this node hashes them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from prefixroute import (
    BlocksStored,
    ContentSpan,
    Differs,
    Domain,
    EngineBatch,
    Node,
    Outcome,
    StreamGap,
    StreamRestarted,
    TokensDiffer,
)
from prefixroute.residency.strays import parting

N, CACHED = 600, 592
Change = Callable[[list[int]], list[int]]


def prompts(n: int = 20, head: int = 0) -> list[list[int]]:
    """Prompts of which the first `head` tokens are the same."""
    rng = random.Random(7)
    first = [rng.randrange(1000, 50_000) for _ in range(head)]
    return [first + [rng.randrange(1000, 50_000) for _ in range(N - head)] for _ in range(n)]


class Engine:
    """A node, and an engine beside it that stores each prompt as `change` makes it, and finds it again."""

    def __init__(self, change: Change, counts: bool = True) -> None:
        self.node = Node("a", Domain("m", "t"), rng=random.Random(1), now=0.0)
        self.endpoint = self.node.add_endpoint(incarnation=1, now=0.0)
        self.change, self.counts = change, counts
        self.stored: set[tuple[int, ...]] = set()
        self.handle, self.now = 0, 0.0

    def serve(self, prompt: list[int], **more: object) -> None:
        self.now += 1.0
        decision = self.node.route(prompt, self.now, **more)  # type: ignore[arg-type]
        told, cached = self.change(prompt), 0
        whole = len(told) // 16
        if tuple(told) in self.stored:
            cached = CACHED
        else:
            handles = tuple(range(self.handle, self.handle + whole))
            self.handle += whole
            self.stored.add(tuple(told))
            event = BlocksStored(handles, None, told[: 16 * whole], 16)
            self.node.apply(self.endpoint, EngineBatch((event,)), self.now)
        self.node.report(decision, Outcome.served(cached_tokens=cached if self.counts else None), self.now)

    def told(self) -> list[TokensDiffer]:
        return [event for event in self.node.events() if isinstance(event, TokensDiffer)]

    def found(self) -> Differs | None:
        return self.node.stats(self.now).endpoints[0].differs


CHANGES: dict[str, tuple[Change, int, int | None]] = {
    "the beginning twice": (lambda p: [0, 128803, *p], 0, 0),
    "no beginning": (lambda p: p[1:], 0, None),
    "shifted by one": (lambda p: [1, *p], 0, 1),
    "a date": (lambda p: [*p[:37], 7, *p[38:]], 37, 7),
    "a date of four tokens": (lambda p: [*p[:37], 7, 8, 9, 10, *p[41:]], 37, 7),
    "a template": (lambda p: [*range(40), *p], 0, 0),
    "one token more within": (lambda p: [*p[:100], 5, *p[100:]], 100, 5),
}
"""What the engine makes of a prompt, the first place that differs, and its token there (None: that of the prompt)."""


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("head", [0, 64, 300])
@pytest.mark.parametrize("why", CHANGES)
def test_the_first_place_that_differs_is_told_once_with_both_tokens(why: str, head: int, counts: bool) -> None:
    change, position, theirs = CHANGES[why]
    engine, asked = Engine(change, counts), prompts(head=head)
    for _ in range(2):
        for prompt in asked:
            engine.serve(prompt)
    (event,) = engine.told()
    assert (event.endpoint, event.position) == (engine.endpoint, position)
    assert event.ours in {prompt[position] for prompt in asked}
    assert event.theirs == theirs or event.theirs in {prompt[1] for prompt in asked}
    assert engine.node.counters["prompts_stored_otherwise"] >= 15
    assert engine.found() is not None


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p,
        lambda p: [*p, 3, 4, 5, *range(60)],
        lambda p: random.Random(sum(p)).sample(range(90_000, 99_999), N),
    ],
    ids=["equal", "with an answer", "quite another"],
)
def test_nothing_is_told_where_nothing_differs_or_nothing_is_like_it(change: Change, counts: bool) -> None:
    engine = Engine(change, counts)
    for _ in range(3):
        for prompt in prompts():
            engine.serve(prompt)
    assert engine.told() == []
    assert engine.node.counters["prompts_stored_otherwise"] == 0
    assert engine.found() is None


def test_it_ends_when_a_prompt_is_found_again_and_a_new_life_begins_anew() -> None:
    engine, asked = Engine(CHANGES["the beginning twice"][0]), prompts()
    for prompt in [*asked, *asked]:
        engine.serve(prompt)
    assert engine.found() is not None
    engine.change = lambda p: p
    for prompt in [*asked, *asked]:
        engine.serve(prompt)
    assert engine.found() is None
    engine.told()
    engine.change = CHANGES["the beginning twice"][0]
    engine.stored.clear()
    engine.node.apply(engine.endpoint, EngineBatch((StreamRestarted(),)), engine.now)
    for prompt in [*asked, *asked]:
        engine.serve(prompt)
    assert [event.position for event in engine.told()] == [0]


def test_a_mirror_with_a_gap_and_prompts_with_images_say_nothing() -> None:
    engine = Engine(CHANGES["the beginning twice"][0])
    engine.node.apply(engine.endpoint, EngineBatch((StreamGap(),)), 0.0)
    for prompt in prompts() * 2:
        engine.serve(prompt)
    assert engine.told() == []
    engine = Engine(CHANGES["the beginning twice"][0])
    for prompt in prompts() * 2:
        engine.serve(prompt, contents=[ContentSpan("image", 5)])
    assert engine.told() == []


def test_events_that_are_under_way_are_waited_for() -> None:
    """The engine reuses what the node has not heard of yet: the next prompts tell."""
    engine, asked = Engine(lambda p: p), prompts()
    late: list[EngineBatch] = []
    for prompt in asked:
        decision = engine.node.route(prompt, engine.now)
        handles = tuple(range(engine.handle, engine.handle + 37))
        engine.handle += 37
        late.append(EngineBatch((BlocksStored(handles, None, prompt[:CACHED], 16),)))
        engine.node.report(decision, Outcome.served(cached_tokens=CACHED), engine.now)
        if len(late) > 1:
            engine.node.apply(engine.endpoint, late.pop(0), engine.now)
    assert engine.told() == []


def test_a_path_is_like_a_prompt_by_place_or_by_a_stretch() -> None:
    def pack(*tokens: int) -> bytes:
        return b"".join(token.to_bytes(4, "little") for token in tokens)

    ours = pack(*range(100, 164))
    assert parting(ours, [pack(*range(500, 564))], 0) is None
    assert parting(ours, [ours], 0) is None
    assert parting(ours, [pack(1, 2)], 0) is None
    assert parting(ours, [pack(*range(500, 564)), pack(*range(99, 163))], 32) == Differs(32, 100, 99)
    assert parting(ours, [b"\x64" + ours[:-1]], 0) is None, "tokens are compared, not bytes"
