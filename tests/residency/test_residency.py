"""The mirror of an engine: the twelve rules for whoever consumes vLLM's events, then what else streams taught."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from matching import trees_of
from prefixroute_vllm import decode_batch

from prefixroute import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    Domain,
    EngineBatch,
    EngineEvent,
    Namespace,
    Node,
    Outcome,
    Residency,
    ResidencyChanged,
    StreamGap,
    StreamRestarted,
    TokenChain,
    UnknownEvent,
)
from prefixroute.endpoint.local import SILENT_AFTER
from prefixroute.keys.chain import ChainSpec
from prefixroute.keys.keyset import Delta
from prefixroute.residency.live import DOUBT, Live

DOMAIN = Domain("m", "t", 4)
TOKENS = list(range(100, 132))
WINDOW = "sliding_window"
FULL = "full_attention"
PLAIN = Namespace()


def stored(
    handles: Sequence[int | bytes], parent: int | bytes | None = None, tokens: Any = None, **fields: Any
) -> BlocksStored:
    """Blocks of 4 tokens: those of `TOKENS` unless others are given."""
    if tokens is None:
        tokens = TOKENS[: 4 * len(handles)]
    return BlocksStored(tuple(handles), parent, tokens, **{"block_size": 4, **fields})


def mirror(*events: EngineEvent, **settings: Any) -> Residency:
    residency = Residency(DOMAIN, **settings)
    apply(residency, *events)
    return residency


def apply(residency: Residency, *events: EngineEvent) -> None:
    residency.apply(EngineBatch(events))
    residency._check()


def prompt(tokens: Any = TOKENS, namespace: Namespace = PLAIN, *items: ContentSpan) -> TokenChain:
    return TokenChain(ChainSpec(4, DOMAIN.mix), DOMAIN.root_key(namespace), tokens, items)


def depth(residency: Residency, tokens: Any = TOKENS, namespace: Namespace = PLAIN, *items: ContentSpan) -> int:
    """Leading blocks of a prompt whose keys are published."""
    wanted, keys = prompt(tokens, namespace, *items), set(residency.keys())
    return next((d - 1 for d in range(1, wanted.depth + 1) if wanted.key(d) not in keys), wanted.depth)


def node_with_endpoint(block_size: int = 4) -> tuple[Node, str]:
    node = Node("n", Domain("m", "t", block_size), rng=random.Random(1), now=0.0)
    return node, node.add_endpoint("0", url="http://127.0.0.1:1", incarnation=1, now=0.0)


# --- the twelve rules --------------------------------------------------------------------------------------


def test_rule_1_arrays_and_maps_give_one_mirror_and_a_bad_event_costs_itself_alone() -> None:
    store_map = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": TOKENS[:8]}
    store_map |= {"block_size": 4, "lora_id": None, "a field of tomorrow": {"x": 1}}
    store_array = ["BlockStored", [1, 2], None, TOKENS[:8], 4, None]
    bad: list[Any] = [{"type": "BlockStored", "block_hashes": "?"}, ["NewKind", 1], 7, {"no": "tag"}]
    for store in (store_map, store_array):
        payload = msgspec.msgpack.encode([1.0, [bad[0], bad[1], store, bad[2], bad[3]], 0])
        residency = Residency(DOMAIN)
        residency.apply(decode_batch(payload))
        assert depth(residency) == 2
        assert (residency.counts.unknown_events, residency.counts.events) == (4, 5)


def test_rule_2_state_is_apart_for_each_life_rank_tier_and_group() -> None:
    one_rank, other_rank = mirror(stored([1, 2])), mirror(stored([1], tokens=TOKENS[4:8]))
    assert (depth(one_rank), depth(other_rank)) == (2, 0)
    residency = mirror(stored([1]), stored([1], tier="cpu"), stored([1], group=1, group_kind=WINDOW))
    assert residency.live() == [Live("cpu", 0, 1, 1), Live("gpu", 0, 1, 1), Live("gpu", 1, 1, 1)]
    apply(residency, BlocksRemoved((1,), group=1), BlocksRemoved((1,)))
    assert residency.live() == [Live("cpu", 0, 1, 1)]
    assert residency.counts.unknown_removals == 0
    apply(residency, StreamRestarted(), BlocksRemoved((1,), "cpu"))
    assert (residency.live(), residency.counts.unknown_removals) == ([], 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": TOKENS[:7]},
        {"tokens": TOKENS[:9]},
        {"tokens": ()},
        {"tokens": (), "block_size": 0},
        {"block_size": 3},
        {"block_size": 0},
        {"block_size": -4},
        {"mappable": False},
        {"tokens": [1, 2, 3, 4, 5, 6, 7, -8]},
    ],
    ids=str,
)
def test_rule_3_blocks_are_mapped_to_tokens_only_when_the_counts_agree(fields: dict[str, Any]) -> None:
    residency = mirror(stored([1, 2], **fields))
    assert (residency.canonical_blocks, residency.live_blocks, residency.counts.hash_only) == (0, 2, 2)
    assert residency.counts.unknown_events == (-8 in fields.get("tokens", ()))
    apply(residency, BlocksRemoved((1, 2)))
    assert (residency.live_blocks, residency.counts.unknown_removals) == (0, 0)


def test_rule_4_copies_are_counted() -> None:
    residency = mirror(stored([1, 2]), stored([2], 1, TOKENS[4:8]))
    assert residency.live() == [Live("gpu", 0, 2, 3)]
    apply(residency, BlocksRemoved((2,)))
    assert depth(residency) == 2
    apply(residency, BlocksRemoved((2,)))
    assert depth(residency) == 1


def test_rule_4_more_copies_than_the_engine_has_blocks_proves_lost_removals() -> None:
    residency = mirror(stored([1, 2]), stored([1, 2]), capacity_tokens=16)
    assert (residency.counts.inflated, residency.partial) == (0, False)
    apply(residency, stored([1]))
    assert (residency.counts.inflated, residency.partial, residency.confidence) == (1, True, DOUBT)
    apply(residency, stored([1]), stored([1]))
    assert residency.counts.inflated == 1
    apply(residency, BlocksRemoved((1, 1, 1)))
    apply(residency, stored([1]))
    assert residency.counts.inflated == 2


def test_rule_4_inflation_counts_the_gpu_tier_over_all_groups() -> None:
    residency = mirror(*[stored([1, 2], tier="cpu")] * 5, capacity_tokens=16)
    assert residency.counts.inflated == 0
    apply(residency, stored([1, 2]), stored([1, 2], tokens=(), block_size=64, group=1, group_kind="mamba"))
    assert residency.counts.inflated == 0
    apply(residency, stored([3], tokens=(), block_size=64, group=1))
    assert residency.counts.inflated == 1


def test_rule_5_orphans_wait_for_their_parent() -> None:
    residency = mirror(stored([3, 4], 2, TOKENS[8:16]), stored([5], 4, TOKENS[16:20]))
    assert (residency.canonical_blocks, residency.live_blocks, residency.counts.orphans) == (0, 3, 3)
    apply(residency, stored([1, 2]))
    assert depth(residency) == 5


def test_rule_5_orphan_may_go_before_its_parent_comes() -> None:
    residency = mirror(stored([2], 1, TOKENS[4:8]), stored([3], 2, TOKENS[8:12]), BlocksRemoved((2, 3)))
    assert residency._groups[0].runs == residency._groups[0].waiting == {}
    apply(residency, stored([1]))
    assert (depth(residency), residency.live_blocks) == (1, 1)


@pytest.mark.parametrize("clear", [BlocksCleared(), BlocksCleared(None), StreamRestarted()], ids=str)
def test_rule_5_cleared_orphan_does_not_come_back_with_its_parent(clear: EngineEvent) -> None:
    residency = mirror(stored([2], 1, TOKENS[4:8]), clear, stored([1]))
    assert (depth(residency), residency.live_blocks) == (1, 1)


def test_rule_6_batch_is_applied_whole_and_in_order() -> None:
    residency = mirror(stored([1, 2]))
    residency.take_changes()
    # As vLLM sends it: what makes room goes before what takes it.
    apply(residency, BlocksRemoved((2,)), BlocksRemoved((1,)), stored([1]), UnknownEvent("x"), stored([3], 1, [9] * 4))
    assert (depth(residency), depth(residency, [*TOKENS[:4], 9, 9, 9, 9])) == (1, 2)
    wanted = prompt([*TOKENS[:4], 9, 9, 9, 9]), prompt()
    assert residency.take_changes() == Delta({wanted[0].key(2)}, {wanted[1].key(2)})
    assert (residency.counts.batches, residency.counts.stored, residency.counts.removed) == (2, 4, 2)


def test_rule_7_gap_makes_the_mirror_partial_and_lowers_confidence() -> None:
    residency = mirror(stored([1, 2, 3, 4]), StreamGap(5))
    assert (residency.partial, residency.confidence, residency.counts.gaps) == (True, DOUBT, 1)
    assert depth(residency) == 4


def test_rule_8_clear_empties_the_gpu_tier_and_an_own_reset_everything() -> None:
    events = stored([1, 2]), stored([1], tier="cpu"), stored([9], tier="disk")
    residency = mirror(*events, BlocksCleared())
    assert residency.live() == [Live("cpu", 0, 1, 1), Live("disk", 0, 1, 1)]
    assert depth(residency) == 1
    residency = mirror(*events, BlocksCleared(None))
    assert (residency.live(), residency.canonical_blocks) == ([], 0)
    apply(residency, stored([1, 2]))
    assert depth(residency) == 2


def test_rule_9_silent_stream_is_told_and_what_was_routed_stands_in() -> None:
    node, endpoint = node_with_endpoint()
    for i in range(SILENT_AFTER):
        assert not [event for event in node.events() if isinstance(event, ResidencyChanged)]
        decision = node.route(TOKENS, float(i))
        assert decision.matched_tokens == 0
        node.report(decision, Outcome.served(), float(i))
    (told,) = [event for event in node.events() if isinstance(event, ResidencyChanged)]
    assert (told.endpoint, told.state) == (endpoint, "silent")
    assert "no engine event" in told.reason
    guessed = node.route(TOKENS, 50.0)
    assert guessed.matched_tokens == len(TOKENS) - 4
    node.report(guessed, Outcome.cancelled(), 50.0)
    node.apply(endpoint, EngineBatch((stored([1]),)), 51.0)
    assert node.route(TOKENS, 52.0).matched_tokens == 4
    node._check()


def test_rule_9_window_group_of_an_engine_that_speaks_late_is_not_taken_for_what_was_guessed() -> None:
    node, endpoint = node_with_endpoint()
    for i in range(SILENT_AFTER):
        node.report(node.route(TOKENS, float(i)), Outcome.served(), float(i))
    window = stored([2], tokens=TOKENS[:8], group_kind=WINDOW, window=5)
    full = stored([1, 2], group=1, group_kind=FULL)
    node.apply(endpoint, EngineBatch((window, full)), 50.0)
    assert node.route(TOKENS, 51.0).matched_tokens == 8


def test_rule_10_block_size_is_read_from_each_groups_events() -> None:
    residency = Residency(DOMAIN)
    assert residency.hit_unit == 0
    assert mirror(stored([1], tier="cpu")).hit_unit == 0
    apply(residency, stored([1], tokens=TOKENS, block_size=32, group_kind=FULL))
    assert residency.hit_unit == 32
    apply(residency, stored([5], tokens=(), block_size=48, group=1, group_kind="mamba"))
    assert residency.hit_unit == 96
    # A partial block says nothing of the engine's own size, an event without tokens nothing at all.
    apply(residency, stored([2], 1, [1, 2], block_size=2), stored([1], tokens=(), block_size=0, tier="cpu"))
    # What another tier keeps as one may be several of the engine's blocks.
    apply(residency, stored([9], tokens=[1] * 256, block_size=256, tier="cpu"))
    assert residency.hit_unit == 96


@pytest.mark.parametrize(("n", "matched"), [(33, 32), (32, 28), (31, 28), (29, 28), (28, 24), (4, 0), (5, 4)])
def test_rule_11_last_token_is_never_a_hit(n: int, matched: int) -> None:
    node, endpoint = node_with_endpoint()
    node.apply(endpoint, EngineBatch((stored(range(8)),)), 1.0)
    assert node.route([*TOKENS, 7][:n], 2.0).matched_tokens == matched


def test_rule_11_hit_is_rounded_down_to_what_the_engine_reuses() -> None:
    node, endpoint = node_with_endpoint()
    node.apply(endpoint, EngineBatch((stored([1], tokens=TOKENS[:16], block_size=16),)), 1.0)
    node.apply(endpoint, EngineBatch((stored([2], 1, TOKENS[16:], block_size=16),)), 1.0)
    node.handle_timer(2.0)
    assert [node.route([*TOKENS, 7][:n], 2.0).matched_tokens for n in (33, 32, 17, 16)] == [32, 16, 16, 0]


def test_rule_12_full_attention_groups_decide_and_window_groups_only_confirm() -> None:
    window = stored([3, 4], tokens=TOKENS, group=0, group_kind=WINDOW)
    residency = mirror(window)
    assert (residency.canonical_blocks, residency.live_blocks, trees_of(residency)) == (0, 2, [])
    for kind in (FULL, "mla_attention", ""):
        both = mirror(window, stored([1, 2, 3, 4], group=2, group_kind=kind))
        assert depth(both) == 4
        apply(both, BlocksRemoved((3,), group=0), BlocksRemoved((4,), group=0))
        assert depth(both) == 4
        assert both.counts.unknown_removals == 0


# --- several full-attention groups -------------------------------------------------------------------------


def test_prefix_counts_only_when_every_full_attention_group_holds_it() -> None:
    residency = mirror(stored([1, 2, 3], group_kind=FULL))
    assert depth(residency) == 3
    published = residency.take_changes().added
    apply(residency, stored([1, 2], group=3, group_kind=FULL))
    assert (depth(residency), residency.canonical_blocks) == (2, 2)
    changes = residency.take_changes()
    assert (changes.added, changes.removed) == (set(), {prompt().key(3)})
    assert changes.removed <= published
    apply(residency, BlocksRemoved((1,), group=3))
    assert (depth(residency), residency.canonical_blocks) == (0, 0)
    apply(residency, stored([1, 2, 3], group=3))
    assert depth(residency) == 3
    apply(residency, BlocksCleared())
    assert (depth(residency), residency.canonical_blocks, residency._held._holders) == (0, 0, {})


def test_three_groups_and_their_changes_against_plain_sets() -> None:
    rng = random.Random(3)
    residency = Residency(DOMAIN)
    held: dict[int, set[int]] = {}
    published: set[int] = set()
    for step in range(300):
        group = rng.randrange(1 + min(step // 20, 2))
        mine = held.setdefault(group, set())
        at = rng.randrange(8)
        if at in mine:
            mine.remove(at)
            apply(residency, BlocksRemoved((at,), group=group))
        else:
            mine.add(at)
            tokens = TOKENS[4 * at : 4 * at + 4]
            apply(residency, stored([at], at - 1 if at else None, tokens, group=group, group_kind=FULL))
        changes = residency.take_changes()
        assert not changes.added & published
        assert changes.removed <= published
        published = published - changes.removed | changes.added
        everywhere = set.intersection(*held.values())
        expected = next((n for n in range(8) if n not in everywhere), 8)
        assert published == {prompt().key(d) for d in range(1, expected + 1)}
        assert residency.canonical_blocks == expected


# --- tiers -------------------------------------------------------------------------------------------------


def test_placeholder_gives_a_known_block_a_copy_in_another_tier() -> None:
    residency = mirror(stored([1, 2, 3]), BlocksStored((2, 3), None, (), 0, "cpu"))
    apply(residency, BlocksRemoved((3, 2)))
    assert depth(residency) == 3
    apply(residency, BlocksRemoved((3,), "cpu"))
    assert depth(residency) == 2
    assert residency.counts.hash_only == 0


def test_placeholder_of_an_unknown_block_learns_its_place_when_it_is_told() -> None:
    residency = mirror(BlocksStored((1,), None, (), 0, "cpu"), BlocksStored((2,), 1, (), 0, "cpu"))
    assert (residency.counts.hash_only, residency.canonical_blocks) == (2, 0)
    apply(residency, stored([2], 1, TOKENS[4:8]))
    assert residency.canonical_blocks == 0
    apply(residency, stored([1]))
    assert depth(residency) == 2
    apply(residency, BlocksRemoved((1,)), BlocksRemoved((2,)))
    assert depth(residency) == 2


@pytest.mark.parametrize(("credited", "found"), [(("gpu", "cpu"), 2), (("gpu",), 1), (("gpu", "cpu", "disk"), 3)])
def test_only_credited_tiers_count_for_a_match(credited: tuple[str, ...], found: int) -> None:
    residency = mirror(
        stored([1]),
        stored([2], 1, TOKENS[4:8], tier="cpu"),
        stored([3], 2, TOKENS[8:12], tier="disk"),
        credited=credited,
    )
    assert depth(residency) == found
    assert residency.live_blocks == 3


def test_unknown_tier_is_kept_apart() -> None:
    residency = mirror(stored([1], tier="remote-cpu"), BlocksRemoved((1,)))
    assert residency.live() == [Live("remote-cpu", 0, 1, 1)]
    assert (residency.canonical_blocks, residency.counts.unknown_removals) == (0, 1)
    apply(residency, BlocksCleared("nowhere"))
    assert residency.live_blocks == 1


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
def test_clear_of_a_tier_ends_the_doubt_about_what_it_held(tier: str) -> None:
    residency = mirror(stored([1, 2], tier=tier), StreamGap(1), BlocksCleared(tier))
    assert (residency.confidence, residency.live_blocks) == (1.0, 0)
    apply(residency, stored([1]))
    assert residency.confidence == 1.0


# --- gaps, restarts ----------------------------------------------------------------------------------------


def test_doubt_heals_as_blocks_are_stored_again_or_go() -> None:
    residency = mirror(stored([1, 2, 3, 4]), StreamGap())
    seen = [residency.confidence]
    for event in (stored([1]), BlocksRemoved((4,)), stored([3], 2, TOKENS[8:12]), BlocksRemoved((2,))):
        apply(residency, event)
        seen.append(residency.confidence)
    assert seen == pytest.approx([1 - DOUBT, 1 - DOUBT * 3 / 4, 1 - DOUBT * 2 / 3, 1 - DOUBT / 3, 1.0])
    apply(residency, stored([7], tokens=[7] * 4))
    assert residency.confidence == 1.0


def test_block_that_was_gone_before_a_gap_and_is_stored_after_it_is_not_doubted() -> None:
    residency = mirror(stored([1, 2]), BlocksRemoved((1,)), StreamGap())
    assert residency.confidence == DOUBT
    apply(residency, stored([1]))
    assert residency.confidence == 1 - DOUBT / 2


def test_what_is_stored_after_a_gap_is_not_doubted() -> None:
    residency = mirror(StreamGap(), stored([1, 2]))
    assert (residency.confidence, residency.partial) == (1.0, True)
    apply(residency, StreamGap())
    assert (residency.confidence, residency.counts.gaps) == (DOUBT, 2)


def test_clear_of_the_gpu_and_a_restart_end_a_partial_state() -> None:
    for end in (BlocksCleared(), BlocksCleared(None), StreamRestarted()):
        residency = mirror(stored([1]), StreamGap(2), end)
        assert (residency.partial, residency.confidence, residency.live_blocks) == (False, 1.0, 0)
    residency = mirror(stored([1]), stored([1], tier="cpu"), StreamGap(2), BlocksCleared())
    assert (residency.partial, residency.confidence) == (True, DOUBT)


def test_new_life_may_have_other_groups_and_other_blocks() -> None:
    residency = mirror(stored([1, 2], group_kind=FULL), stored([1, 2], group=1, group_kind=FULL), BlocksRemoved((2,)))
    apply(residency, StreamRestarted())
    assert (residency.hit_unit, residency.canonical_blocks, residency.live(), trees_of(residency)) == (0, 0, [], [])
    published = residency.take_changes()
    assert published == Delta(set(), set())
    apply(residency, stored([1, 2, 3, 4], tokens=TOKENS[:8], block_size=2, group_kind=FULL))
    assert (depth(residency), residency.hit_unit, residency.counts.restarts) == (2, 2, 1)


def test_restart_unpublishes_what_was_published() -> None:
    residency = mirror(stored([1, 2], group_kind=FULL), stored([1], group=1, group_kind=FULL))
    added = residency.take_changes().added
    apply(residency, StreamRestarted(), stored([9], tokens=[9] * 4))
    changes = residency.take_changes()
    assert (changes.removed, len(changes.added)) == (added, 1)


# --- what events teach beside their blocks -------------------------------------------------------------------


GOOD = list(range(1024))
ODD: dict[str, BlocksStored] = {
    "wrong token count": BlocksStored((9999,), None, [1, 2, 3], 4096),
    "no tokens": BlocksStored((9999,), None, [], 4096),
    "unknown parent": BlocksStored((9999,), 8888, list(range(4096)), 4096),
    "tokens that are none": BlocksStored((9999,), None, [-1] * 4096, 4096),
    "huge block": BlocksStored((9999,), None, [1], 2**62),
    "negative block": BlocksStored((9999,), None, [1], -16),
    "its own parent": BlocksStored((9999,), 9999, list(range(4096)), 4096),
    "not mappable": BlocksStored((9999,), None, list(range(4096)), 4096, mappable=False),
}


def good(first: int = 1) -> BlocksStored:
    return BlocksStored(tuple(range(first, first + 64)), None, GOOD, 16)


def matched(residency: Residency) -> tuple[int, int]:
    """Tokens of the good blocks that are published, and the hit unit."""
    residency._check()
    chain, keys = prompt_of(GOOD), set(residency.published())
    return 16 * next((d for d in range(64) if chain.key(d + 1) not in keys), 64), residency.hit_unit


def prompt_of(tokens: list[int]) -> TokenChain:
    domain = Domain("m", "t")
    return TokenChain(ChainSpec(16, domain.mix), domain.root_key(Namespace()), tokens)


TOKENS_UNREAD = {"no tokens", "not mappable", "tokens that are none"}
"""What a window or state group's store may be: the tokens are told by the full-attention group."""

OTHERS = [(0, "", 0), (7, "", 0), (7, "mamba", 0), (7, "sliding_window", 8)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("why", "group", "kind", "window"),
    [(why, *other) for why in ODD for other in OTHERS if not other[1] or why not in TOKENS_UNREAD],
)
def test_rubbish_teaches_no_size_no_group_and_no_window(
    why: str, group: int, kind: str, window: int, first: bool
) -> None:
    odd = replace(ODD[why], group=group, group_kind=kind, window=window)
    residency = Residency(Domain("m", "t"))
    for event in (odd, good()) if first else (good(), odd):
        residency.apply(EngineBatch((event,)))
    assert matched(residency) == (1024, 16)
    residency.apply(EngineBatch((BlocksRemoved((9999,), group=group),)))
    assert matched(residency) == (1024, 16)
    residency.apply(EngineBatch((BlocksCleared(None), good())))
    assert matched(residency) == (1024, 16)


@pytest.mark.parametrize("away", [BlocksRemoved((9999,)), BlocksRemoved((9999,), last_copy=True), BlocksCleared(None)])
@pytest.mark.parametrize("first", [True, False])
def test_a_size_goes_with_the_last_block_that_has_it(away: BlocksRemoved | BlocksCleared, first: bool) -> None:
    residency, odd = Residency(Domain("m", "t")), BlocksStored((9999,), None, list(range(5000, 9096)), 4096)
    for event in (odd, good()) if first else (good(), odd):
        residency.apply(EngineBatch((event,)))
    assert matched(residency) == (1024, 4096), "it is held, and could be so"
    residency.apply(EngineBatch((away,)))
    if isinstance(away, BlocksCleared):
        residency.apply(EngineBatch((good(),)))
    assert matched(residency) == (1024, 16)
    residency.apply(EngineBatch((BlocksRemoved(tuple(range(1, 65))),)))
    assert matched(residency) == (0, 16), "of the last that were held"


def test_the_removal_of_what_was_never_stored_changes_no_size() -> None:
    residency = Residency(Domain("m", "t"))
    residency.apply(EngineBatch((good(), BlocksRemoved((9999,)), BlocksRemoved((9999,), group=3))))
    assert matched(residency) == (1024, 16)
    assert residency.counts.unknown_removals == 2
