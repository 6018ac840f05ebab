"""The emulator's block cache: by hand, against a plain model, and against a recorded stream of vLLM 0.32.0."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixroute.emulator import (
    AllBlocksCleared,
    BlockCache,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    CacheScope,
    Lease,
    Scheduler,
    ServiceModel,
)
from prefixroute.errors import UsageError

RECORDED = Path(__file__).parents[1] / "data" / "vllm_events" / "v0.32.0_bs32_sha256"
SCOPES = (CacheScope(), CacheScope(salt="a"), CacheScope(salt="b"), CacheScope("lo", 1), CacheScope("lo", 1, "a"))


def compute(cache: BlockCache, prompt: list[int], scope: CacheScope = SCOPES[0]) -> Lease:
    """Admit a prompt and compute it whole."""
    lease = cache.admit(prompt, scope)
    assert lease is not None
    cache.grow(lease, len(prompt))
    cache.fill(lease, len(prompt))
    return lease


def serve(cache: BlockCache, prompt: list[int], scope: CacheScope = SCOPES[0]) -> int:
    """Compute a prompt, end it, and return how many of its tokens were cached."""
    lease = compute(cache, prompt, scope)
    cache.release(lease)
    return lease.cached_tokens


# --- by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "cached"), [(300, 288), (256, 224), (257, 256), (32, 0), (33, 32), (1, 0)])
def test_repeated_prompt_hits_the_full_blocks_of_all_but_its_last_token(tokens: int, cached: int) -> None:
    cache = BlockCache(100, 32)
    assert serve(cache, list(range(tokens))) == 0
    assert cache.match(list(range(tokens))) == cached
    assert serve(cache, list(range(tokens))) == cached


def test_store_names_parent_tokens_and_every_field_that_vllm_always_sends() -> None:
    cache = BlockCache(100, 4)
    serve(cache, list(range(9)))
    serve(cache, list(range(13)))
    first, second = cache.take_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.token_ids) == (None, tuple(range(8)))
    assert second.parent_block_hash == first.block_hashes[-1]
    assert msgspec.to_builtins(second) == {
        "type": "BlockStored",
        "block_hashes": second.block_hashes,
        "parent_block_hash": first.block_hashes[1],
        "token_ids": (8, 9, 10, 11),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": (None,),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert all(isinstance(handle, int) and 0 <= handle < 1 << 64 for handle in first.block_hashes)
    assert msgspec.to_builtins(BlockRemoved((7,), None)) == {
        "type": "BlockRemoved",
        "block_hashes": (7,),
        "medium": None,
    }


def test_byte_hashes_are_whole_digests_and_their_tail_is_the_int() -> None:
    ints, whole = BlockCache(10, 4), BlockCache(10, 4, int_hashes=False)
    serve(ints, list(range(8)))
    serve(whole, list(range(8)))
    (by_int,), (by_bytes,) = ints.take_events(), whole.take_events()
    assert isinstance(by_int, BlockStored) and isinstance(by_bytes, BlockStored)
    assert all(isinstance(digest, bytes) and len(digest) == 32 for digest in by_bytes.block_hashes)
    tails = [int.from_bytes(bytes(digest)[-8:], "big") for digest in by_bytes.block_hashes]  # type: ignore[arg-type]
    assert list(by_int.block_hashes) == tails


def test_hash_seed_changes_every_handle_and_nothing_else() -> None:
    one, other = BlockCache(10, 4), BlockCache(10, 4, hash_seed="x")
    for cache in (one, other):
        assert serve(cache, list(range(8))) == 0
        assert serve(cache, list(range(8))) == 4
    assert not set(one.contents()) & set(other.contents())


def test_scopes_share_nothing_and_extra_keys_name_them() -> None:
    cache = BlockCache(100, 4)
    for scope in SCOPES:
        assert serve(cache, list(range(9)), scope) == 0
    stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    assert [event.extra_keys for event in stored] == [
        (None, None),
        (("a",), None),
        (("b",), None),
        (("lo",), ("lo",)),
        (("lo", "a"), ("lo",)),
    ]
    assert [(event.lora_name, event.lora_id) for event in stored[2:4]] == [(None, None), ("lo", 1)]
    assert len({handle for event in stored for handle in event.block_hashes}) == 10
    for scope in SCOPES:
        assert serve(cache, list(range(9)), scope) == 8


def test_prompt_of_whole_blocks_stores_its_last_block_again_and_removes_it_twice() -> None:
    cache = BlockCache(4, 4)
    serve(cache, list(range(8)))
    assert serve(cache, list(range(8))) == 4
    assert sorted(cache.contents().values()) == [1, 2]
    cache.take_events()
    serve(cache, list(range(100, 113)))
    removed = [event.block_hashes[0] for event in cache.take_events() if isinstance(event, BlockRemoved)]
    # Four blocks are needed and one is empty: the copies of the tail go first, then the root.
    assert len(removed) == 3 and removed[0] == removed[1] != removed[2]


def test_two_equal_sequences_computed_at_once_both_store() -> None:
    cache = BlockCache(10, 4)
    one, two = cache.admit(list(range(9))), cache.admit(list(range(9)))
    assert one and two
    for lease in (one, two):
        cache.grow(lease, 9)
        cache.fill(lease, 9)
    assert set(cache.contents().values()) == {2}


def test_eviction_takes_empty_blocks_first_then_the_oldest_tail_and_removals_come_before_stores() -> None:
    cache = BlockCache(6, 4)
    serve(cache, list(range(8)))
    serve(cache, list(range(50, 58)))
    first, second = cache.take_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    serve(cache, list(range(90, 106)))
    events = cache.take_events()
    assert [type(event) for event in events] == [BlockRemoved, BlockRemoved, BlockStored]
    removed = [event.block_hashes for event in events if isinstance(event, BlockRemoved)]
    assert removed == [(first.block_hashes[1],), (first.block_hashes[0],)]


def test_a_hit_protects_blocks_from_eviction_and_renews_them() -> None:
    cache = BlockCache(4, 4)
    serve(cache, [1] * 4 + [0])
    serve(cache, [2] * 4 + [0])
    assert serve(cache, [1] * 4 + [0]) == 4
    serve(cache, [3] * 12)
    assert cache.match([1] * 5) == 4
    assert cache.match([2] * 5) == 0


def test_room_is_promised_at_admission_so_a_running_sequence_never_lacks_a_block() -> None:
    cache = BlockCache(4, 4)
    long = cache.admit([1] * 4, decode_tokens=8)
    assert long is not None
    assert cache.admit([2] * 8) is None
    short = cache.admit([2] * 4)
    assert short is not None
    for token in range(8):
        cache.append(long, token)
    cache.grow(long, 12)
    cache.release(short)
    cache._check()


def test_hits_on_idle_blocks_count_as_room() -> None:
    cache = BlockCache(2, 4)
    serve(cache, [1] * 8)
    again = cache.admit([1] * 8)
    assert again is not None and again.cached_tokens == 4
    cache._check()


def test_reset_is_refused_while_blocks_are_held_and_announced_once_done() -> None:
    cache = BlockCache(4, 4)
    lease = compute(cache, [1] * 8)
    cache.take_events()
    assert not cache.reset()
    assert cache.take_events() == []
    cache.release(lease)
    assert cache.reset()
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.match([1] * 8) == 0 and not cache.contents()
    cache._check()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda cache: cache.admit([]), "at least one token"),
        (lambda cache: cache.admit([1] * 41), "needs 11 blocks"),
        (lambda cache: cache.admit([-1]), "token ids"),
        (lambda cache: cache.admit([1 << 32]), "token ids"),
        (lambda cache: cache.admit(["x"]), "token ids"),
        (lambda cache: cache.grow(cache.admit([1]), 5), "not promised"),
        (lambda cache: cache.fill(cache.admit([1] * 4), 4), "grown"),
        (lambda cache: BlockCache(0, 4), "at least 1"),
        (lambda cache: BlockCache(4, 0), "at least 1"),
    ],
)
def test_misuse_is_told(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(BlockCache(10, 4))


# --- a plain model: lists, whole prefixes instead of hashes -------------------------------------------------


class PlainCache:
    """The same rules, written for clearness: a block is an object, a key is the whole prefix."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.size = block_size
        self.blocks: list[dict[str, Any]] = [{"key": None, "users": 0, "age": 0} for _ in range(capacity)]
        self.clock = 0
        self.log: list[tuple[str, object]] = []
        self.promised: dict[int, int] = {}

    def key(self, scope: CacheScope, tokens: list[int], depth: int) -> object:
        return (scope.lora_name, scope.salt, tuple(tokens[: depth * self.size]))

    def find(self, key: object) -> list[dict[str, Any]]:
        return [block for block in self.blocks if block["key"] == key]

    def hit(self, scope: CacheScope, tokens: list[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for depth in range(1, (len(tokens) - 1) // self.size + 1):
            copies = self.find(self.key(scope, tokens, depth))
            if not copies:
                break
            found.append(min(copies, key=lambda block: block["stored"]))
        return found

    def admit(self, scope: CacheScope, tokens: list[int], total: int) -> list[dict[str, Any]] | None:
        hit = self.hit(scope, tokens)
        free = [block for block in self.blocks if not block["users"] and not any(block is b for b in hit)]
        if len(free) - sum(self.promised.values()) < total - len(hit):
            return None
        for block in hit:
            block["users"] += 1
        return hit

    def take(self) -> dict[str, Any]:
        free = [block for block in self.blocks if not block["users"]]
        block = min(free, key=lambda block: (block["key"] is not None, block["age"]))
        if block["key"] is not None:
            self.log.append(("removed", block["key"]))
        block.update(key=None, users=1)
        return block

    def store(self, block: dict[str, Any], key: object) -> None:
        self.clock += 1
        block.update(key=key, stored=self.clock)
        self.log.append(("stored", key))

    def release(self, blocks: list[dict[str, Any]]) -> None:
        for block in reversed(blocks):
            self.clock += 1
            block["users"] -= 1
            block["age"] = self.clock

    def clear(self) -> bool:
        if any(block["users"] for block in self.blocks):
            return False
        for block in self.blocks:
            block["key"] = None
        self.log.append(("cleared", None))
        return True


class Pair:
    """The cache and its model side by side; handles are told from prefixes as stores announce them."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.cache = BlockCache(capacity, block_size)
        self.plain = PlainCache(capacity, block_size)
        self.live: list[tuple[Lease, list[dict[str, Any]], list[int], int]] = []
        self.names: dict[object, object] = {}

    def admit(self, prompt: list[int], scope: CacheScope, decode: int) -> None:
        total = self.cache.blocks_for(len(prompt) + decode)
        if total > self.cache.capacity:
            return
        hit = self.plain.admit(scope, prompt, total)
        lease = self.cache.admit(prompt, scope, decode_tokens=decode)
        assert (hit is None) == (lease is None)
        if hit is not None and lease is not None:
            assert lease.cached_tokens == len(hit) * self.plain.size
            self.plain.promised[id(lease)] = total - len(hit)
            self.live.append((lease, hit, list(prompt), len(prompt) + decode))

    def advance(self, which: int, tokens: int) -> None:
        lease, blocks, content, end = self.live[which]
        computed = min(max(lease.filled * self.plain.size, 1) + tokens, end)
        while len(content) < computed:
            content.append(len(content) % 3)
            self.cache.append(lease, content[-1])
        self.cache.grow(lease, computed)
        self.cache.fill(lease, computed)
        while len(blocks) < self.cache.blocks_for(computed):
            blocks.append(self.plain.take())
            self.plain.promised[id(lease)] -= 1
        for depth, block in enumerate(blocks[: computed // self.plain.size], 1):
            if block["key"] is None:
                self.plain.store(block, self.plain.key(lease.scope, content, depth))

    def release(self, which: int) -> None:
        lease, blocks, _, _ = self.live.pop(which)
        self.cache.release(lease)
        self.cache.release(lease)
        del self.plain.promised[id(lease)]
        self.plain.release(blocks)

    def check(self) -> None:
        self.cache._check()
        seen: list[tuple[str, object]] = []
        expected, self.plain.log = self.plain.log, []
        for event in self.cache.take_events():
            self._read(event, seen, expected)
        assert seen == expected
        keys = Counter(block["key"] for block in self.plain.blocks if block["key"] is not None)
        assert Counter({self.names[handle]: n for handle, n in self.cache.contents().items()}) == keys
        assert self.cache.stats().in_use == sum(bool(block["users"]) for block in self.plain.blocks)

    def _read(self, event: CacheEvent, seen: list[tuple[str, object]], expected: list[Any]) -> None:
        if isinstance(event, AllBlocksCleared):
            seen.append(("cleared", None))
        elif isinstance(event, BlockRemoved):
            seen += [("removed", self.names[handle]) for handle in event.block_hashes]
        else:
            for handle in event.block_hashes:
                what, key = expected[len(seen)]
                assert what == "stored" and self.names.setdefault(handle, key) == key
                seen.append(("stored", key))


def random_prompt(rng: random.Random, size: int) -> list[int]:
    """Few distinct blocks, so that prompts share prefixes; often an exact number of blocks."""
    blocks = [[rng.randrange(3)] * size for _ in range(rng.randrange(6))]
    tail = [9] * rng.choice([0, 0, 1, size - 1])
    return [token for block in blocks for token in block] + tail or [1]


@pytest.mark.parametrize("seed", range(8))
def test_random_workload_equals_the_plain_model_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng.choice([3, 8, 20]), rng.choice([1, 2, 4]))
    for step in range(300):
        action = rng.random()
        if action < 0.4:
            prompt = random_prompt(rng, pair.plain.size)
            pair.admit(prompt, rng.choice(SCOPES[:3]), rng.randrange(10))
        elif action < 0.75 and pair.live:
            pair.advance(rng.randrange(len(pair.live)), rng.randrange(1, 9))
        elif action < 0.98 and pair.live:
            pair.release(rng.randrange(len(pair.live)))
        elif action >= 0.98:
            assert pair.cache.reset() == pair.plain.clear()
        try:
            pair.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {pair.cache.stats()}") from error


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(5, 2)

    @rule(
        blocks=st.lists(st.integers(0, 1), max_size=4),
        tail=st.integers(0, 1),
        scope=st.sampled_from(SCOPES[:2]),
        decode=st.integers(0, 4),
    )
    def admit(self, blocks: list[int], tail: int, scope: CacheScope, decode: int) -> None:
        prompt = [token for token in blocks for _ in range(2)] + [7] * tail
        self.pair.admit(prompt or [1], scope, decode)

    @precondition(lambda self: self.pair.live)
    @rule(which=st.integers(0, 100), tokens=st.integers(1, 6))
    def advance(self, which: int, tokens: int) -> None:
        self.pair.advance(which % len(self.pair.live), tokens)

    @precondition(lambda self: self.pair.live)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.pair.release(which % len(self.pair.live))

    @rule()
    def reset(self) -> None:
        assert self.pair.cache.reset() == self.pair.plain.clear()

    @invariant()
    def equal(self) -> None:
        self.pair.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# --- the real thing ----------------------------------------------------------------------------------------


def renamed(batches: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The same events with each handle replaced by the number of its first appearance."""
    names: dict[object, int] = {}
    result = []
    for batch in batches:
        events = []
        for event in batch:
            event = dict(event)
            if "block_hashes" in event:
                event["block_hashes"] = [names.setdefault(h, len(names)) for h in event["block_hashes"]]
            if event.get("parent_block_hash") is not None:
                event["parent_block_hash"] = names[event["parent_block_hash"]]
            events.append(event)
        result.append(events)
    return result


@pytest.mark.parametrize("max_tokens", [2, 4])
def test_same_requests_give_the_event_stream_recorded_from_vllm_0_32(max_tokens: int) -> None:
    files = sorted(RECORDED.glob("*.msgpack"))[:18]
    recorded = [msgspec.msgpack.decode(file.read_bytes())[1] for file in files]
    cache = BlockCache(99, 32)
    scheduler = Scheduler(cache, ServiceModel(time_scale=0))

    def tokens(batch: int) -> list[int]:
        return list(recorded[batch][-1]["token_ids"])

    def submit(prompt: list[int], count: int = max_tokens, salt: str | None = None, said: list[int] = []) -> None:  # noqa: B006
        answer = [*said, *range(4000, 4100)]
        scheduler.submit(prompt, count, answer.__getitem__, 0.0, scope=CacheScope(salt=salt))

    shared, more, start, said = tokens(0), tokens(1), tokens(3), tokens(4) + tokens(5)
    submit(shared + [1] * 10)
    submit(shared + more + [2] * 5)
    submit(shared + more + [2] * 5)
    submit(shared)
    scheduler.handle_timer(0.0)
    submit(start + said[:3], 65, said=said[3:])
    submit([1, 2, 3])
    submit([*shared, 9], salt="tenantA")
    submit([*shared, 9], salt="tenantB")
    submit([*tokens(8), 5])
    submit([*tokens(8), 5])
    for batch in range(9, 17):
        submit([*tokens(batch), 3])
    scheduler.handle_timer(0.0)
    assert scheduler.reset_cache(0.0)
    submit(shared + [1] * 10)
    scheduler.handle_timer(0.0)

    emulated = json.loads(msgspec.json.encode([step.events for step in scheduler.steps()]))
    assert renamed(emulated) == renamed(recorded)
    assert sum(event["type"] == "BlockRemoved" for batch in recorded for event in batch) > 20
