"""The emulator's step loop in virtual time: service times, order, limits, and what each step announces."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from prefixroute.emulator import (
    BlockCache,
    BlockRemoved,
    BlockStored,
    Busy,
    CacheScope,
    Limits,
    RunningSequence,
    Scheduler,
    ServiceModel,
)
from prefixroute.emulator.vllm_wire import AllBlocksCleared, CacheEvent
from prefixroute.errors import UsageError

MODEL = ServiceModel(prefill_tokens_per_s=1000, overhead_s=0.5, decode_s_per_token=0.25)


def engine(blocks: int = 100, size: int = 4, model: ServiceModel = MODEL, **limits: int) -> Scheduler:
    return Scheduler(BlockCache(blocks, size), model, Limits(**limits))


def submit(
    scheduler: Scheduler, prompt: list[int], tokens: int = 1, now: float = 0.0, every_token: bool = True
) -> RunningSequence:
    return scheduler.submit(prompt, tokens, lambda index: 1000 + index, now, every_token=every_token)


def run(scheduler: Scheduler) -> list[tuple[float, RunningSequence, int, str]]:
    """Let all time pass; what came out, and when."""
    seen = []
    while (due := scheduler.next_timer()) < math.inf:
        scheduler.handle_timer(due)
        seen += [(due, output.sequence, output.tokens, output.state) for output in scheduler.outputs()]
        scheduler.cache._check()
    return seen


def test_first_token_comes_after_overhead_and_uncached_tokens_then_one_each_decode_time() -> None:
    scheduler = engine()
    one = submit(scheduler, [1] * 100, 3, now=10.0)
    assert [(t, n, state) for t, _, n, state in run(scheduler)] == [
        (pytest.approx(10.6), 1, "decode"),
        (pytest.approx(10.85), 2, "decode"),
        (pytest.approx(11.1), 3, "finished"),
    ]
    again = submit(scheduler, [1] * 100, now=20.0)
    assert (again.cached_tokens, one.cached_tokens) == (96, 0)
    assert run(scheduler)[0][0] == pytest.approx(20.504)


def test_prefill_is_serial_in_order_of_arrival_and_the_second_of_two_equal_prompts_hits() -> None:
    scheduler = engine()
    first, second, third = (submit(scheduler, prompt) for prompt in ([1] * 100, [1] * 100, [2] * 100))
    assert scheduler.load() == (1, 2, 300)
    assert [(pytest.approx(at), sequence) for at, sequence, _, _ in run(scheduler)] == [
        (0.6, first),
        (0.6 + 0.504, second),
        (0.6 + 0.504 + 0.6, third),
    ]
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 96, 0)
    assert scheduler.load() == (0, 0, 0)


def test_decode_goes_on_during_the_prefill_of_another() -> None:
    scheduler = engine()
    first = submit(scheduler, [1] * 100, 5)
    second = submit(scheduler, [2] * 200)
    times = {(sequence, tokens): at for at, sequence, tokens, _ in run(scheduler)}
    assert times[first, 5] == pytest.approx(0.6 + 4 * 0.25)
    assert times[second, 1] == pytest.approx(0.6 + 0.7)


def test_late_wake_ups_change_no_planned_time() -> None:
    def plan(wake_every: float) -> list[tuple[float, int]]:
        scheduler = engine()
        for topic in range(5):
            submit(scheduler, [topic] * 50, 9)
        now, steps = 0.0, []
        while scheduler.next_timer() < math.inf:
            now += wake_every
            scheduler.handle_timer(now)
            steps += [(round(step.at, 9), len(step.events)) for step in scheduler.steps()]
        return steps

    assert plan(0.001) == plan(0.7) == plan(100.0) != []


def test_time_scale_stretches_every_service_time() -> None:
    def end(scale: float) -> float:
        scheduler = engine(model=ServiceModel(1000, 0.5, 0.25, time_scale=scale))
        submit(scheduler, [1] * 100, 3)
        return run(scheduler)[-1][0]

    assert end(0.1) == pytest.approx(end(1.0) / 10)
    assert end(0.0) == 0.0


def test_infinite_prefill_rate_leaves_the_overhead() -> None:
    scheduler = engine(model=ServiceModel(math.inf, 0.5, 0.0))
    submit(scheduler, [1] * 100)
    assert run(scheduler)[-1][0] == 0.5


def test_long_prompt_is_announced_chunk_by_chunk_and_pays_its_overhead_once() -> None:
    scheduler = engine(max_num_batched_tokens=50)
    submit(scheduler, list(range(120)))
    assert run(scheduler)[-1][0] == pytest.approx(0.62)
    steps = scheduler.steps()
    assert [step.at for step in steps] == [pytest.approx(t) for t in (0.55, 0.6, 0.62)]
    stored = [step.events[0] for step in steps]
    assert all(isinstance(event, BlockStored) for event in stored)
    assert [len(event.block_hashes) for event in stored if isinstance(event, BlockStored)] == [12, 13, 5]


def test_decode_blocks_are_announced_when_they_fill_and_the_last_token_is_never_computed() -> None:
    scheduler = engine()
    submit(scheduler, [1] * 6, 7)
    run(scheduler)
    stored = [(step.at, event) for step in scheduler.steps() for event in step.events]
    # 6 + 7 - 1 tokens are computed: three blocks, the third with the seventh output token.
    assert [at for at, _ in stored] == [pytest.approx(t) for t in (0.506, 0.506 + 0.5, 0.506 + 1.5)]
    assert [event.token_ids for _, event in stored if isinstance(event, BlockStored)] == [
        (1, 1, 1, 1),
        (1, 1, 1000, 1001),
        (1002, 1003, 1004, 1005),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_reporting_every_token_or_only_the_end_changes_nothing_else(seed: int) -> None:
    def events(every_token: bool) -> list[tuple[float, list[CacheEvent]]]:
        rng = random.Random(seed)
        scheduler = engine(blocks=20)
        steps = []
        now = 0.0
        for _ in range(30):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            submit(scheduler, prompt, rng.randrange(1, 20), now, every_token)
            now += rng.random()
            scheduler.handle_timer(now)
            steps += scheduler.steps()
        run(scheduler)
        steps += scheduler.steps()
        # Evictions of one engine step may leave with another step's batch: compare what is stored, and all.
        return [(round(step.at, 9), [e for e in step.events if isinstance(e, BlockStored)]) for step in steps]

    assert [step for step in events(True) if step[1]] == [step for step in events(False) if step[1]]


def test_what_does_not_fit_waits_for_room_and_holds_up_those_behind_it() -> None:
    scheduler = engine(blocks=10)
    first = submit(scheduler, [1] * 4, 25)
    large = submit(scheduler, [2] * 20)
    small = submit(scheduler, [3] * 4)
    scheduler.handle_timer(1.0)
    assert (first.state, large.state, small.state) == ("decode", "waiting", "waiting")
    times = {sequence: at for at, sequence, _, state in run(scheduler) if state == "finished"}
    assert times[first] == pytest.approx(0.504 + 24 * 0.25)
    assert times[large] == pytest.approx(times[first] + 0.52)
    assert times[small] == pytest.approx(times[large] + 0.504)


def test_last_output_token_needs_no_room_since_it_is_never_computed() -> None:
    scheduler = engine(blocks=10)
    submit(scheduler, [1] * 20, 21)
    assert run(scheduler)[-1][2:] == (21, "finished")


def test_seats_limit_what_runs_at_once() -> None:
    scheduler = engine(max_num_seqs=1)
    first, second = submit(scheduler, [1] * 4, 3), submit(scheduler, [2] * 4)
    scheduler.handle_timer(0.6)
    assert (first.state, second.state) == ("decode", "waiting")
    assert [sequence for _, sequence, _, state in run(scheduler) if state == "finished"] == [first, second]


def test_queue_limit_counts_what_runs_and_what_waits() -> None:
    scheduler = engine(max_num_queued_reqs=2)
    submit(scheduler, [1] * 4)
    submit(scheduler, [2] * 4)
    with pytest.raises(Busy, match="currently busy") as refusal:
        submit(scheduler, [3] * 4)
    assert refusal.value.reason == "max_num_queued_reqs"
    run(scheduler)
    submit(scheduler, [3] * 4, now=10.0)


def test_backlog_limit_counts_prompt_tokens_until_their_prefill_ends() -> None:
    scheduler = engine(max_num_queued_tokens=150)
    submit(scheduler, [1] * 100, 50)
    submit(scheduler, [2] * 100)
    with pytest.raises(Busy, match="backlog") as refusal:
        submit(scheduler, [3] * 4)
    assert refusal.value.reason == "max_num_queued_tokens"
    submit(scheduler, [3] * 4, now=0.6)


def test_cancelling_frees_the_blocks_of_a_waiting_and_of_a_decoding_sequence_at_once() -> None:
    scheduler = engine()
    decoding, prefilling, waiting = (submit(scheduler, [n] * 40, 100) for n in range(3))
    scheduler.handle_timer(0.6)
    held = scheduler.cache.stats().in_use
    scheduler.cancel(waiting, 0.6)
    scheduler.cancel(decoding, 0.6)
    assert (waiting.state, decoding.state) == ("cancelled", "cancelled")
    assert scheduler.cache.stats().in_use < held
    assert scheduler.load() == (1, 0, 40)
    scheduler.cancel(prefilling, 0.6)
    run(scheduler)
    assert scheduler.load() == (0, 0, 0)
    assert scheduler.cache.stats().in_use == 0
    # What was computed before the end of its chunk stays cached, as in vLLM.
    assert scheduler.cache.match([1] * 41) == 40


def test_cancelling_during_a_chunk_stops_the_chunks_after_it() -> None:
    scheduler = engine(max_num_batched_tokens=20)
    sequence = submit(scheduler, [1] * 60, 5)
    scheduler.cancel(sequence, 0.1)
    assert [(at, state) for at, _, _, state in run(scheduler)] == [(pytest.approx(0.52), "cancelled")]
    assert scheduler.cache.match([1] * 60) == 20


def test_clear_is_announced_with_the_next_step_that_ends() -> None:
    scheduler = engine()
    submit(scheduler, [1] * 8)
    assert not scheduler.reset_cache(0.1)
    run(scheduler)
    scheduler.steps()
    assert scheduler.reset_cache(5.0)
    assert scheduler.steps() == []
    submit(scheduler, [1] * 8, now=6.0)
    run(scheduler)
    (step,) = scheduler.steps()
    assert [type(event) for event in step.events] == [AllBlocksCleared, BlockStored]


@pytest.mark.parametrize(("prompt", "tokens"), [([], 1), ([1], 0), ([1] * 401, 1), ([1], 401), ([1] * 200, 202)])
def test_what_could_never_fit_is_the_callers_error(prompt: list[int], tokens: int) -> None:
    scheduler = engine()
    with pytest.raises(UsageError, match="100 blocks of 4"):
        submit(scheduler, prompt, tokens)
    assert scheduler.load() == (0, 0, 0)


@pytest.mark.parametrize(
    "arguments",
    [(0.0,), (-1.0,), (math.nan,), (1.0, -0.1), (1.0, 0.0, -1.0), (1.0, 0.0, 0.0, math.inf), (1.0, math.nan)],
)
def test_impossible_service_times_are_the_callers_error(arguments: tuple[float, ...]) -> None:
    with pytest.raises(UsageError):
        ServiceModel(*arguments)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs"])
def test_impossible_limits_are_the_callers_error(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Limits(**{name: -1})


@pytest.mark.parametrize("seed", range(4))
def test_counting_consumer_of_all_steps_ends_with_the_true_content(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = engine(blocks=25, max_num_batched_tokens=16)
    mirror: Counter[object] = Counter()
    now = 0.0
    live: list[RunningSequence] = []
    removed = 0
    for _ in range(150):
        now += rng.random()
        prompt = [rng.randrange(2)] * rng.randrange(1, 40) + [rng.randrange(3)] * rng.randrange(8)
        scope = CacheScope(salt=rng.choice([None, "a"]))
        live.append(scheduler.submit(prompt, rng.randrange(1, 30), lambda i: i, now, scope=scope))
        if rng.random() < 0.2:
            scheduler.cancel(rng.choice(live), now)
        if rng.random() < 0.05:
            scheduler.reset_cache(now)
        scheduler.handle_timer(now)
        scheduler.cache._check()
    run(scheduler)
    assert scheduler.reset_cache(now + 1000) or scheduler.load() == (0, 0, 0)
    submit(scheduler, [5] * 80, now=now + 2000)
    run(scheduler)
    for step in scheduler.steps():
        for event in step.events:
            if isinstance(event, BlockStored):
                mirror.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                mirror.subtract(event.block_hashes)
                removed += 1
            else:
                mirror.clear()
        assert min(mirror.values(), default=0) >= 0
        assert sum(mirror.values()) <= scheduler.cache.capacity
    assert removed > 50
    assert +mirror == scheduler.cache.contents()
