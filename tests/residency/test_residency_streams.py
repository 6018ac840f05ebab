"""Recorded streams of vLLM 0.32.0, and one batch in every version's own form, against the plainest possible consumer.

The consumer shares nothing with the library: it reads the bytes with msgspec, counts copies in a dict, and rebuilds
each block's path of tokens from its parents.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from matching import matched, trees_of
from prefixroute_vllm import decode_batch

from prefixroute import Domain, Namespace, Residency, TokenChain
from prefixroute.events import BlocksCleared, BlocksStored, EngineBatch
from prefixroute.keys.chain import ChainSpec, wire_key
from prefixroute.routing.index import MergedIndex

DATA = Path(__file__).parents[1] / "data" / "vllm_events"
FOLDERS = [
    "v0.32.0_bs32_sha256",
    "v0.32.0_bs128_sha256cbor_bytes_lora",
    "v0.32.0_bs32_hybrid_gemma3",
    "v0.32.0_bs32_dp2/r0",
    "v0.32.0_bs32_dp2/r1",
]
BLOCKS_OF_ENGINE = dict(zip(FOLDERS, (100, 40, 200, 0, 0), strict=True))
CANONICAL = [16, 48, 20]
SYNTHETIC = sorted((DATA / "synthetic_by_version").glob("*.msgpack"))
Prefix = tuple[str, str, tuple[int, ...]]
"""A canonical block's identity: LoRA name, salt, and every token from the root to its end."""


class Row(NamedTuple):
    """A live engine block's key."""

    rank: int
    medium: str
    group: int
    hash: int | bytes


class Told(NamedTuple):
    """What a store said of a block."""

    parent: int | bytes | None
    tokens: tuple[int, ...]
    lora: str
    salt: str


class PlainConsumer:
    """Counts of copies by (rank, medium, group, hash), and what was said of each (group, hash)."""

    def __init__(self) -> None:
        self.copies: Counter[Row] = Counter()
        self.told: dict[tuple[int, int | bytes], Told] = {}
        self.full: set[int] = set()
        self.sparse = 0
        """Blocks of events whose tokens do not cover their blocks one by one."""

    def apply(self, payload: bytes) -> None:
        _, events, *rank = msgspec.msgpack.decode(payload)
        for event in events:
            self.event(event, rank[0])

    def event(self, event: dict[str, Any], rank: int) -> None:
        if event["type"] == "AllBlocksCleared":
            for row in [row for row in self.copies if row.medium == "GPU"]:
                del self.copies[row]
            return
        if (
            event["type"] == "BlockStored"
            and len(event["token_ids"]) != len(event["block_hashes"]) * event["block_size"]
        ):
            self.sparse += len(event["block_hashes"])
        for i, value in enumerate(event["block_hashes"]):
            row = Row(rank, event["medium"], event["group_idx"], value)
            if event["type"] == "BlockRemoved":
                assert self.copies[row] > 0, "the recorded streams are clean"
                self.copies[row] -= 1
                continue
            self.copies[row] += 1
            if event["kv_cache_spec_kind"] != "full_attention":
                continue
            self.full.add(row.group)
            size = event["block_size"]
            keys = event["extra_keys"][i] or []
            lora = event["lora_name"] or ""
            self.told[row.group, value] = Told(
                event["block_hashes"][i - 1] if i else event["parent_block_hash"],
                tuple(event["token_ids"][i * size : (i + 1) * size]),
                lora,
                "".join(key for key in keys if key != lora),
            )

    def path(self, group: int, value: int | bytes) -> list[tuple[int | bytes, Told]] | None:
        """The blocks from the root to this one, or None when an ancestor was never told."""
        path = []
        at: int | bytes | None = value
        while at is not None:
            told = self.told.get((group, at))
            if told is None:
                return None
            path.append((at, told))
            at = told.parent
        return path[::-1]

    def live(self) -> dict[tuple[int, str, int], tuple[int, int]]:
        """(rank, medium, group) -> distinct hashes, copies."""
        rows: dict[tuple[int, str, int], list[int]] = {}
        for row, n in self.copies.items():
            if n:
                rows.setdefault(row[:3], []).append(n)
        return {key: (len(counts), sum(counts)) for key, counts in rows.items()}

    def canonical(self, size: int) -> set[Prefix]:
        """Canonical blocks all of whose tokens, and whose ancestors' tokens, are held."""
        live = {(row.group, row.hash) for row, n in self.copies.items() if n}
        (group,) = self.full or {0}
        whole: set[Prefix] = set()
        for _, value in [block for block in live if block[0] == group]:
            path = self.path(group, value)
            if path is None:
                continue
            tokens = [token for _, told in path for token in told.tokens]
            owner = [at for at, told in path for _ in told.tokens]
            lora, salt = path[0][1].lora, path[0][1].salt
            above = len(tokens) - len(path[-1][1].tokens)
            for end in range(above // size * size + size, len(tokens) + 1, size):
                if all((group, at) in live for at in set(owner[end - size : end])):
                    whole.add((lora, salt, tuple(tokens[:end])))
        held: set[Prefix] = set()
        for lora, salt, prefix in sorted(whole, key=lambda block: len(block[2])):
            if len(prefix) == size or (lora, salt, prefix[:-size]) in held:
                held.add((lora, salt, prefix))
        return held

    def prompts(self) -> list[Prefix]:
        """Every path that was ever told, from its root."""
        found = []
        for group, value in self.told:
            path = self.path(group, value)
            if path is not None:
                found.append((path[0][1].lora, path[0][1].salt, tuple(t for _, told in path for t in told.tokens)))
        return found


def payloads(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((DATA / folder).glob("*.msgpack"))]


def domain(size: int) -> Domain:
    return Domain("m", "t", size)


def prompt_of(prefix: Prefix, size: int) -> TokenChain:
    lora, salt, tokens = prefix
    spec = ChainSpec(size, domain(size).mix)
    return TokenChain(spec, domain(size).root_key(Namespace(lora, salt)), list(tokens))


@cache
def key_of(prefix: Prefix, size: int) -> int:
    return prompt_of(prefix, size).key(len(prefix[2]) // size)


def assert_equal(residency: Residency, truth: PlainConsumer, size: int, rng: random.Random, rank: int) -> None:
    """Live blocks and copies, canonical blocks, and match depths of prompts that were seen, cut and altered."""
    assert {(rank, row.tier.upper(), row.group): (row.handles, row.copies) for row in residency.live()} == truth.live()
    held = truth.canonical(size)
    keys = list(residency.keys())
    assert set(keys) == {key_of(prefix, size) for prefix in held}
    assert len(keys) == len(held) == residency.canonical_blocks
    seen = truth.prompts()
    for lora, salt, tokens in rng.sample(seen, min(4, len(seen))):
        cut = tokens[: rng.randint(0, len(tokens))]
        other = list(tokens)
        other[rng.randrange(len(other))] ^= 1
        for prompt in ((lora, salt, (*tokens, 5)), (lora, salt, cut), (lora, salt, tuple(other)), (lora, "?", tokens)):
            depth = 0
            while (*prompt[:2], prompt[2][: (depth + 1) * size]) in held and (depth + 1) * size <= len(prompt[2]):
                depth += 1
            assert [matched(tree, prompt_of(prompt, size)) for tree in trees_of(residency)] == [depth] * len(truth.full)


@pytest.mark.parametrize("size", CANONICAL)
@pytest.mark.parametrize("folder", FOLDERS)
def test_mirror_equals_the_plain_consumer_after_every_batch(folder: str, size: int) -> None:
    rng = random.Random(f"{folder} {size}")
    residency, truth = Residency(domain(size)), PlainConsumer()
    published: set[int] = set()
    for payload in payloads(folder):
        batch = decode_batch(payload)
        truth.apply(payload)
        residency.apply(batch)
        residency._check()
        assert_equal(residency, truth, size, rng, batch.rank)
        changes = residency.take_changes()
        published = published - changes.removed | changes.added
        assert published == set(residency.published())
    counts = residency.counts
    assert counts.unknown_events == counts.unknown_removals == counts.orphans == 0
    assert counts.hash_only == truth.sparse
    assert not residency.partial


@pytest.mark.parametrize("size", CANONICAL)
def test_hits_of_the_hybrid_end_where_each_of_its_groups_has_what_it_needs(size: int) -> None:
    """Blocks of 32 in each group, windows of 128 tokens: the last four blocks in front of a hit's end."""
    folder, rng = "v0.32.0_bs32_hybrid_gemma3", random.Random(size)
    residency, truth, index = Residency(domain(size)), PlainConsumer(), MergedIndex()
    index.join("e")
    found: Counter[int] = Counter()
    for payload in payloads(folder):
        truth.apply(payload)
        residency.apply(decode_batch(payload))
        changes = residency.take_changes()
        index.update("e", map(wire_key, changes.added), map(wire_key, changes.removed))
        hashes = {prefix: at for prefix, at in hashes_by_prefix(truth).items() if truth.copies[row(2, at)]}
        for lora, salt, tokens in truth.prompts():
            for prompt in (tokens, (*tokens, 5), tokens[: rng.randint(1, len(tokens))], (*tokens[:200], 5, 6)):
                chain = prompt_of((lora, salt, prompt), size)
                hit = reused(prompt, hashes, truth, lcm(32, size))
                assert index.depth(chain, index.bit("e")) * size == hit
                found[hit] += 1
    assert found[0] > 0
    assert sum(found.values()) - found[0] > 10


def row(group: int, value: int | bytes) -> Row:
    return Row(0, "GPU", group, value)


def hashes_by_prefix(truth: PlainConsumer) -> dict[tuple[int, ...], int | bytes]:
    """The engine's hash of every whole number of blocks that full attention told of."""
    found = {}
    for group, value in truth.told:
        path = truth.path(group, value)
        assert path is not None
        found[tuple(t for _, told in path for t in told.tokens)] = value
    return found


def reused(prompt: tuple[int, ...], held: dict[tuple[int, ...], int | bytes], truth: PlainConsumer, step: int) -> int:
    """Tokens that the engine would reuse, by its own search: from the left in full attention, then back to a window."""
    length = 0
    while length + 32 < len(prompt) and prompt[: length + 32] in held:
        length += 32
    length -= length % step
    while length:
        last = [held[prompt[:end]] for end in range(length, max(0, length - 128), -32)]
        if all(truth.copies[row(group, at)] for group in (0, 1) for at in last):
            return length
        length -= step
    return 0


def test_payloads_are_what_the_index_says() -> None:
    """The consumer's input is the recording and nothing else."""
    for folder in FOLDERS:
        lines = [json.loads(line) for line in (DATA / folder / "index.jsonl").read_text().splitlines()]
        found = payloads(folder)
        assert [line["bytes"] for line in lines] == [len(payload) for payload in found]
        assert [line["msg"][0] for line in lines] == [msgspec.msgpack.decode(payload)[0] for payload in found]


@pytest.mark.parametrize("folder", FOLDERS)
def test_capacity_is_never_exceeded_and_half_of_it_is_found_out(folder: str) -> None:
    blocks = BLOCKS_OF_ENGINE[folder]
    batches = [decode_batch(payload) for payload in payloads(folder)]
    size = max(event.block_size for batch in batches for event in batch.events if isinstance(event, BlocksStored))
    enough = Residency(domain(16), capacity_tokens=(blocks - 1) * size if blocks else 0)
    for batch in batches:
        enough.apply(batch)
    assert (enough.counts.inflated, enough.partial, enough.hit_unit) == (0, False, size)
    if blocks:
        half = Residency(domain(16), capacity_tokens=blocks // 2 * size)
        for batch in batches:
            half.apply(batch)
        assert half.counts.inflated > 0


# --- late joiners, and stores out of order -----------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("folder", FOLDERS)
def test_late_joiner_holds_what_can_be_known_and_never_more(folder: str, size: int) -> None:
    found = payloads(folder)
    rng = random.Random(f"late {folder} {size}")
    for first in sorted(rng.sample(range(1, len(found)), min(3, len(found) - 1))):
        residency, truth, whole = Residency(domain(size)), PlainConsumer(), PlainConsumer()
        for payload in found[:first]:
            whole.apply(payload)
        for payload in found[first:]:
            batch = decode_batch(payload)
            whole.apply(payload)
            for event in msgspec.msgpack.decode(payload)[1]:
                if is_known(event, truth, batch.rank):
                    truth.event(event, batch.rank)
            residency.apply(batch)
            residency._check()
            assert_equal(residency, truth, size, rng, batch.rank)
        everything = {key_of(prefix, size) for prefix in whole.canonical(size)}
        assert set(residency.keys()) <= everything


def is_known(event: dict[str, Any], truth: PlainConsumer, rank: int) -> bool:
    """Whether an event is no removal, or the removal of a block whose store was seen."""
    if event["type"] != "BlockRemoved":
        return True
    (value,) = event["block_hashes"]
    return truth.copies[Row(rank, event["medium"], event["group_idx"], value)] > 0


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("folder", FOLDERS)
def test_stores_in_any_order_end_in_the_same_state(folder: str, size: int) -> None:
    rng = random.Random(f"shuffled {folder} {size}")
    truth = PlainConsumer()
    stores = []
    for payload in found_before_the_first_removal(folder):
        truth.apply(payload)
        stores += [(event, decode_batch(payload).rank) for event in decode_batch(payload).events]
    for _ in range(5):
        rng.shuffle(stores)
        residency = Residency(domain(size))
        for event, rank in stores:
            residency.apply(EngineBatch((event,), rank))
        residency._check()
        assert_equal(residency, truth, size, rng, stores[0][1])
        assert residency.counts.unknown_events == 0


def found_before_the_first_removal(folder: str) -> list[bytes]:
    found = []
    for payload in payloads(folder):
        if any(event["type"] != "BlockStored" for event in msgspec.msgpack.decode(payload)[1]):
            break
        found.append(payload)
    return found


# --- every version -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SYNTHETIC, ids=lambda path: path.stem)
def test_batch_of_every_version_does_the_same(path: Path) -> None:
    """Two blocks of 16 at the root, one below them, the first one removed, and all cleared."""
    batch = decode_batch(path.read_bytes())
    residency = Residency(domain(16))
    root, child, removal, clear = batch.events
    salted = isinstance(root, BlocksStored) and root.namespace.salt != ""
    namespace = Namespace(salt="saltA" if salted else "")
    prompt = TokenChain(ChainSpec(16, domain(16).mix), domain(16).root_key(namespace), [*range(32), *range(16)])
    residency.apply(EngineBatch((root, child)))
    residency._check()
    assert [matched(trees_of(residency)[0], prompt), residency.canonical_blocks, residency.live_blocks] == [3, 3, 3]
    residency.apply(EngineBatch((removal,)))
    residency._check()
    assert [matched(trees_of(residency)[0], prompt), residency.canonical_blocks, residency.live_blocks] == [0, 0, 2]
    assert clear == BlocksCleared("gpu")
    residency.apply(EngineBatch((clear,)))
    assert (residency.live_blocks, residency.counts.unknown_removals, residency.counts.unknown_events) == (0, 0, 0)
    whole = Residency(domain(16))
    whole.apply(batch)
    assert (whole.live(), whole.canonical_blocks, whole.hit_unit) == ([], 0, 16)
