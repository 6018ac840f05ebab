"""What one engine reuses, and what the node beside it expects: the ordinary life of a cache.

LoRA adapters are tried on vLLM alone: SGLang 0.5.23 cannot load one on a CPU, since its adapter memory is pinned, which
takes an accelerator ("pin_memory=True requires a CUDA or other accelerator backend").
"""

from __future__ import annotations

import random

import pytest
from live_engines import LiveEngine
from live_oracle import EstimateTally, Probe, assert_residency_is_true, counted, draw, probed, probes_of
from live_shapes import each_engine, with_adapter
from live_sidecars import LiveSidecar, SidecarFleet, adapter_of


@pytest.fixture
def sidecar(fleet: SidecarFleet, engine: LiveEngine) -> LiveSidecar:
    """A node beside the only engine."""
    return fleet.add(engine)


@each_engine
def test_cold_then_warm(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(1)
    block = sidecar.engine.shape.block
    for length in (5, 31, 32, 33, 200, 384):
        prompt = draw(rng, length)
        cold = probed(tally, sidecar, Probe("cold", prompt))
        warm = probed(tally, sidecar, Probe("warm", prompt))
        assert (cold.predicted, cold.actual, warm.actual) == (0, 0, (length - 1) // block * block)
        assert cold.right
        assert warm.right
        assert_residency_is_true(tally, sidecar, probes_of(rng, [prompt]))


@each_engine
def test_a_conversation_grows_turn_by_turn(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(2)
    words = ["cache", "block", "prefix", "engine", "node", "token"]
    messages: list[dict[str, str]] = []
    rows = []
    for turn in range(6):
        messages.append({"role": "user", "content": " ".join(rng.choices(words, k=60))})
        sidecar.settle()
        answer = sidecar.chat(messages, answer_tokens=20)
        rows.append(tally.note(f"turn {turn}", sidecar, *counted(answer)))
        messages.append({"role": "assistant", "content": answer.text})
    assert all(row.right for row in rows), rows
    assert [row.actual for row in rows] == sorted(row.actual for row in rows)
    assert rows[-1].actual > rows[1].actual > 0


@each_engine
def test_prompts_share_prefixes_and_part_inside_blocks(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(3)
    prefixes = [draw(rng, 300), draw(rng, 217)]
    prompts = [
        [*prefix[: rng.randrange(100, len(prefix))], *draw(rng, rng.randrange(1, 90))]
        for prefix in prefixes
        for _ in range(6)
    ]
    rows = assert_residency_is_true(tally, sidecar, [Probe("shared", prompt) for prompt in prompts])
    assert sum(row.actual > 0 for row in rows) >= 8
    assert_residency_is_true(tally, sidecar, probes_of(rng, prefixes))


@each_engine
def test_decoded_tokens_are_held_as_far_as_the_engine_holds_them(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(4)
    prompt = draw(rng, 100)
    for answer_tokens in (1, 40, 90):
        sidecar.settle()
        answer = sidecar.ask(prompt, answer_tokens=answer_tokens, here=True)
        assert tally.note("decoding", sidecar, *counted(answer)).right
    assert_residency_is_true(tally, sidecar, probes_of(rng, [prompt]))


@each_engine
def test_salts_separate_caches(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(5)
    prompt = draw(rng, 250)
    rows = [probed(tally, sidecar, Probe(f"salt {salt!r}", prompt, salt)) for salt in ("", "a", "b", "", "a", "b")]
    assert [row.actual for row in rows[:3]] == [0, 0, 0]
    assert all(row.actual for row in rows[3:])
    assert all(row.right for row in rows), rows
    assert_residency_is_true(tally, sidecar, probes_of(rng, [prompt], "a"))


@with_adapter
def test_adapters_separate_caches(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(6)
    prompt, other = draw(rng, 250), draw(rng, 130)
    lo = adapter_of(sidecar.engine)
    assert lo
    asked = [
        *(Probe("plain", prompt), Probe("adapter", prompt, adapter=lo), Probe("adapter, salted", prompt, "a", lo)),
        *(Probe("plain", prompt), Probe("adapter", prompt, adapter=lo), Probe("adapter, salted", prompt, "a", lo)),
        *(Probe("adapter", other, adapter=lo), Probe("plain", other), Probe("salt named like it", prompt, lo)),
    ]
    rows = assert_residency_is_true(tally, sidecar, asked)
    assert [row.actual > 0 for row in rows] == [False] * 3 + [True] * 3 + [False] * 3


@each_engine
def test_a_small_cache_evicts_all_the_time(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(7)
    capacity = sidecar.engine.shape.capacity_tokens
    prefixes = [draw(rng, rng.randrange(200, 900)) for _ in range(8)]
    sent, asked = 0, []
    while sent < 5 * capacity:
        prompt = rng.choice(prefixes)
        if rng.random() < 0.3:
            prompt = prompt[: rng.randrange(100, len(prompt))]
        prompt = [*prompt, *draw(rng, rng.randrange(1, 80))]
        asked.append(Probe("evicting", prompt, rng.choice(("", "", "", "tenant"))))
        sent += len(prompt)
    rows = assert_residency_is_true(tally, sidecar, asked)
    assert sum(row.actual for row in rows) > 0
    assert_residency_is_true(tally, sidecar, probes_of(rng, prefixes[:3]))


@each_engine
def test_a_reset_leaves_nothing(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(8)
    prompts = [draw(rng, 300) for _ in range(3)]
    assert_residency_is_true(tally, sidecar, [Probe("first", prompt) for prompt in prompts * 2])
    sidecar.engine.reset()
    rows = assert_residency_is_true(tally, sidecar, [Probe("after reset", prompt) for prompt in prompts])
    assert [(row.predicted, row.actual) for row in rows] == [(0, 0)] * 3
    assert_residency_is_true(tally, sidecar, probes_of(rng, prompts))
