"""Calls through the sidecar that empty the engine's cache: which they are, and that they count at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prefixroute_serving.attach import KINDS
from prefixroute_serving.attach.resets import UNDER_WAY_S, AdminCall, OwnResets
from sidecar_pair import PREFIX, Pair, run_pair, until

from prefixroute import BlocksCleared, BlocksStored, Domain, EngineBatch, Node, StreamGap, StreamRestarted

NOW = 100.0


@pytest.mark.parametrize(
    ("kind", "path", "query", "asked", "told", "emptied"),
    [
        ("vllm", "/reset_prefix_cache", {}, {}, {"success": True}, True),
        ("vllm", "/reset_prefix_cache", {}, {}, {"success": False}, False),  # blocks are in use
        ("vllm", "/reset_prefix_cache", {}, {}, {}, True),  # older engines answer nothing
        ("vllm", "/sleep", {}, {}, {"status": "sleeping", "level": 1}, True),
        ("vllm", "/sleep", {"level": "2"}, {}, {}, True),
        ("vllm", "/sleep", {}, {}, {}, True),
        ("vllm", "/sleep", {"level": "0"}, {}, {}, False),
        ("vllm", "/sleep", {"level": "0"}, {}, {"status": "sleeping", "level": 0}, False),
        ("vllm", "/release_kv_cache_memory", {}, {}, {"status": "kv_cache_released"}, True),
        ("sglang", "/flush_cache", {}, {}, {}, True),
        ("sglang", "/release_memory_occupation", {}, {}, {}, True),
        ("sglang", "/release_memory_occupation", {}, {"tags": ["weights"]}, {}, False),
        ("sglang", "/release_memory_occupation", {}, {"tags": ["weights", "kv_cache"]}, {}, True),
        ("sglang", "/update_weights_from_disk", {}, {"model_path": "m"}, {"success": True}, True),
        ("sglang", "/update_weights_from_disk", {}, {"flush_cache": False}, {"success": True}, False),
    ],
)
def test_what_empties_a_cache(
    kind: str, path: str, query: dict[str, str], asked: dict[str, Any], told: dict[str, Any], emptied: bool
) -> None:
    assert KINDS[kind].empties[path](AdminCall(query, asked, told)) is emptied


def test_waking_up_empties_nothing() -> None:
    assert not {"/wake_up", "/resume_memory_occupation"} & {path for kind in KINDS.values() for path in kind.empties}


# --- the order of the two words ----------------------------------------------------------------------------


class Desk:
    """A node whose two ranks hold two blocks each, and a call under way."""

    def __init__(self) -> None:
        self.node = Node("n", Domain("m", "t"), rng=random.Random(0), now=NOW)
        self.endpoints = {self.node.add_endpoint(str(rank), incarnation=1, now=NOW): rank for rank in (0, 1)}
        self.resets = OwnResets(self.node)
        self.say(stored(1, 2))
        self.say(stored(1, 2), rank=1)
        self.before = self.resets.clears(self.endpoints)

    def say(self, *events: Any, rank: int = 0, now: float = NOW) -> None:
        """What the engine's stream brings."""
        endpoint = f"n/{rank}"
        self.node.apply(endpoint, self.resets.passed(endpoint, EngineBatch(events, rank), now), now)

    def answered(self) -> None:
        self.resets.emptied(self.endpoints, self.before, NOW)

    def held(self, rank: int = 0) -> int:
        return self.node.residency(f"n/{rank}").canonical_blocks


def stored(*handles: int) -> BlocksStored:
    return BlocksStored(handles, None, tuple(range(handles[0] * 100, handles[0] * 100 + 16 * len(handles))), 16)


def test_it_counts_at_once_for_every_rank() -> None:
    desk = Desk()
    assert (desk.held(0), desk.held(1)) == (2, 2)
    desk.answered()
    assert (desk.held(0), desk.held(1)) == (0, 0)
    assert desk.node.counters["batches_of_another_rank"] == 0


def test_what_was_under_way_is_void_and_what_follows_the_engines_clear_stays() -> None:
    desk = Desk()
    desk.answered()
    desk.say(stored(3, 4))  # made before the reset
    assert desk.held() == 0
    desk.say(BlocksCleared("gpu"), stored(5, 6))
    assert desk.held() == 2
    desk.say(stored(7))
    assert desk.held() == 3
    desk.say(stored(1, 2), rank=1)
    assert desk.held(1) == 0, "each rank awaits its own engine's word"


def test_an_engine_that_was_quicker_than_its_answer_is_not_cleared_again() -> None:
    desk = Desk()
    desk.say(BlocksCleared("gpu"), stored(5, 6))
    desk.answered()
    assert (desk.held(0), desk.held(1)) == (2, 0)
    desk.say(stored(7))
    assert desk.held() == 3


@pytest.mark.parametrize("mark", [StreamGap(1), StreamRestarted()])
def test_after_a_mark_the_engines_clear_is_awaited_no_longer(mark: Any) -> None:
    desk = Desk()
    desk.answered()
    desk.say(mark)
    desk.say(stored(5, 6))
    assert desk.held() == 2


def test_it_is_awaited_no_longer_than_a_message_is_under_way() -> None:
    desk = Desk()
    desk.answered()
    desk.say(stored(5, 6), now=NOW + UNDER_WAY_S)
    assert desk.held() == 2


# --- through the sidecar -----------------------------------------------------------------------------------


def test_a_reset_through_the_sidecar_is_known_everywhere_before_the_engine_says_so(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        one, two = pair.one.sidecar, pair.two.sidecar
        # Node 1 may know of it sooner: it is promised when its prefill begins.
        await until(lambda: two.node.residency("node-2/0").canonical_blocks > 10)
        assert (await pair.client.get(f"{pair.two.url}/reset_prefix_cache")).status_code != 200
        assert two.node.residency("node-2/0").canonical_blocks > 10, "the call has failed"
        reply = await pair.client.post(f"{pair.two.url}/reset_prefix_cache")
        assert reply.status_code == 200
        assert two.node.residency("node-2/0").canonical_blocks == 0
        await until(lambda: not any(row.blocks for row in one.node.stats(one.driver.now()).endpoints))
        await pair.ask(pair.two, PREFIX)
        await until(lambda: two.node.residency("node-2/0").canonical_blocks > 10)

    run_pair(test, tmp_path_factory.mktemp("s"), "longest")
