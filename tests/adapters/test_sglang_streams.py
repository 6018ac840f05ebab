"""Recorded streams of SGLang 0.5.23, and of older encodings, against the plainest possible consumer.

The consumer shares nothing with the library: it reads the bytes with msgspec, counts copies in a dict, and rebuilds
each page's path of tokens from its parents. The hashes are recomputed with hashlib.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
import sglang_streams as recorded
from matching import matched, trees_of
from prefixroute_sglang import decode_batch
from sglang_streams import domain, prompt_of

from prefixroute import Namespace, Residency
from prefixroute.cli import main
from prefixroute.cli import replay as replaying
from prefixroute.events import BlocksStored, UnknownEvent

# --- recorded streams --------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What a store said of a page."""

    parent: int | None
    tokens: tuple[int, ...]
    namespace: tuple[str, str]


class PlainConsumer:
    """Counts of copies by (medium, hash), and what was said of each hash. It shares nothing with the library."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[str, int]] = Counter()
        self.told: dict[int, Told] = {}
        self.blocks = Counter[str]()

    def apply(self, payload: bytes) -> None:
        for event in recorded.events(payload):
            if event["type"] == "AllBlocksCleared":
                self.copies.clear()
                continue
            self.blocks[event["type"]] += len(event["block_hashes"])
            for i, value in enumerate(event["block_hashes"]):
                key = (event["medium"], value)
                if event["type"] == "BlockRemoved":
                    assert self.copies[key] > 0, "the recorded streams are clean"
                    self.copies[key] -= 1
                    continue
                self.copies[key] += 1
                size = event["block_size"]
                page = event["token_ids"][i * size : (i + 1) * size]
                assert len(page) == size
                self.told[value] = Told(
                    event["block_hashes"][i - 1] if i else event["parent_block_hash"],
                    tuple(token[0] if isinstance(token, list) else token for token in page),
                    (event["lora_name"], event["cache_salt"]),
                )

    def live(self) -> dict[str, tuple[int, int]]:
        """medium -> distinct hashes, copies."""
        rows: dict[str, list[int]] = {}
        for (medium, _), n in self.copies.items():
            if n:
                rows.setdefault(medium, []).append(n)
        return {medium: (len(counts), sum(counts)) for medium, counts in rows.items()}

    def paths(self) -> Iterator[tuple[tuple[str, str], list[int]]]:
        """The held tokens from the root to each page that no other held page follows."""
        held = {value for (_, value), n in self.copies.items() if n}
        for value in held - {self.told[value].parent for value in held}:
            path, at = [], value
            while at is not None:
                path.append(at)
                at = self.told[at].parent  # type: ignore[assignment]
            tokens: list[int] = []
            for at in reversed(path):
                if at not in held:
                    break
                tokens += self.told[at].tokens
            yield self.told[value].namespace, tokens


def assert_equal(residency: Residency, truth: PlainConsumer, size: int, rng: random.Random) -> None:
    """Live blocks and copies, canonical blocks, and match depths of prompts that go on, are cut and altered."""
    assert {row.tier.upper(): (row.handles, row.copies) for row in residency.live()} == truth.live()
    paths = list(truth.paths())
    keys = {
        chain.key(depth)
        for namespace, tokens in paths
        for chain in [prompt_of(namespace, tokens, size)]
        for depth in range(1, len(tokens) // size + 1)
    }
    assert set(residency.keys()) == keys
    assert residency.canonical_blocks == len(keys)
    for namespace, tokens in rng.sample(sorted(paths), min(3, len(paths))):
        at = rng.randrange(len(tokens))
        other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
        for asked, prompt in (
            (namespace, [*tokens, 5]),
            (namespace, tokens[:at]),
            (namespace, other),
            (("", "?"), tokens),
        ):
            depth = max((common(prompt, held) // size for space, held in paths if space == asked), default=0)
            assert [matched(tree, prompt_of(asked, prompt, size)) for tree in trees_of(residency)] == [depth]


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("size", [16, 48, 20, 4])
@pytest.mark.parametrize("name", recorded.SMALL)
def test_mirror_equals_a_plain_count_after_every_batch(name: str, size: int) -> None:
    rng = random.Random(f"{name} {size}")
    residency, truth = Residency(domain(size)), PlainConsumer()
    published: set[int] = set()
    for payload in recorded.payloads(name):
        truth.apply(payload)
        residency.apply(decode_batch(payload))
        residency._check()
        assert_equal(residency, truth, size, rng)
        changes = residency.take_changes()
        published = published - changes.removed | changes.added
        assert published == set(residency.keys())
    counts = residency.counts
    assert counts.unknown_events == counts.unknown_removals == counts.orphans == counts.hash_only == 0
    assert (counts.stored, counts.removed) == (truth.blocks["BlockStored"], truth.blocks["BlockRemoved"])
    assert not residency.partial


@pytest.mark.parametrize("name", recorded.LOADED)
def test_mirror_equals_a_plain_count_under_eviction(name: str) -> None:
    rng = random.Random(name)
    residency, truth = Residency(domain(16), capacity_tokens=40_000), PlainConsumer()
    found = recorded.payloads(name)
    for number, payload in enumerate(found):
        truth.apply(payload)
        residency.apply(decode_batch(payload))
        if number % 60 == 50 or number == len(found) - 1:
            residency._check()
            assert_equal(residency, truth, 16, rng)
    counts = residency.counts
    assert counts.unknown_events == counts.unknown_removals == counts.orphans == counts.hash_only == 0
    assert (counts.inflated, residency.partial) == (0, False)
    assert residency.hit_unit == int(name.split("_")[1][1:])
    assert counts.removed > 1000


def test_an_extra_key_is_a_second_copy_of_the_same_pages() -> None:
    residency, most = Residency(domain(16)), 0
    for payload in recorded.payloads("radix_p16"):
        residency.apply(decode_batch(payload))
        most = max([most, *(row.copies - row.handles for row in residency.live())])
    assert most > 0


# --- hashes, recomputed from the decoded tokens ------------------------------------------------------------


@pytest.mark.parametrize("name", recorded.STREAMS)
def test_hashes_follow_from_the_decoded_tokens_parents_and_salts(name: str) -> None:
    """Each handle is the first 8 bytes, signed, of SHA-256 over the parent's digest and the page's tokens."""
    digests: dict[Any, bytes] = {}
    compared = 0
    for payload in recorded.payloads(name):
        decoded = decode_batch(payload)
        assert not any(isinstance(event, UnknownEvent) for event in decoded.events)
        for event, told in zip(decoded.events, recorded.events(payload), strict=True):
            if not isinstance(event, BlocksStored):
                continue
            salt = event.namespace.salt
            if name.startswith("legacy_0.5.17") and event.handles[0] == 3778757713228576601:
                assert salt == ""  # this release's events name no salt; the hashes were made with one
                salt = "tenant-1"
            first = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest() if salt else b""
            above = first if event.parent is None else digests[event.parent]
            for number, handle in enumerate(event.handles):
                start, end = number * event.block_size, (number + 1) * event.block_size
                words = array("I", event.tokens[start:end])
                if "eagle" in name:
                    following = [*event.tokens[start + 1 :], told["token_ids"][-1][1]]
                    words = array("I", [word for pair in zip(words, following, strict=False) for word in pair])
                above = digests[handle] = hashlib.sha256(above + words.tobytes()).digest()
                assert int.from_bytes(above[:8], "big", signed=True) == handle
                compared += 1
    assert compared == sum(
        len(event["block_hashes"])
        for payload in recorded.payloads(name)
        for event in recorded.events(payload)
        if event["type"] == "BlockStored"
    )
    assert compared > 0


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18"])
def test_older_encodings_decode_to_the_same_batches(release: str) -> None:
    salted = 0
    for old, new in zip(recorded.payloads(f"legacy_{release}_p16"), recorded.payloads("radix_p16"), strict=True):
        before, now = decode_batch(old), decode_batch(new)
        for event in now.events:
            salted += isinstance(event, BlocksStored) and event.namespace.salt == "tenant-1"
        if release == "0.5.17":
            unsalted = [replace(e, namespace=Namespace()) if isinstance(e, BlocksStored) else e for e in now.events]
            now = replace(now, events=tuple(unsalted))
        assert before == now
    assert salted == 1


# --- recordings through the command ------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorded.STREAMS)
def test_replay_gives_what_a_plain_count_gives(
    name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "engine_decoder", lambda engine: {"sglang": decode_batch}[engine])
    path, data = recorded.raw(name)
    (tmp_path / path.name).write_bytes(data)
    truth = PlainConsumer()
    for payload in recorded.payloads(name):
        truth.apply(payload)
    for source in (tmp_path, tmp_path / path.name):
        assert main(["replay", "--engine", "sglang", str(source), "--json", "-"]) == 0
        result = msgspec.json.decode(capsys.readouterr().out)
        assert result["messages"] == len(recorded.payloads(name))
        assert (result["stored"], result["removed"]) == (truth.blocks["BlockStored"], truth.blocks["BlockRemoved"])
        assert result["undecodable"] == result["unknown_events"] == result["unknown_removals"] == result["orphans"] == 0
        assert {row["tier"].upper(): (row["handles"], row["copies"]) for row in result["live"]} == truth.live()
        # The server's message 0 was missed; the flush ended the doubt.
        assert (result["gaps"], result["partial"]) == (int(name == "server_p16"), False)


STORE = ["BlockStored", [-7, 8], None, list(range(32)), 16, None, "GPU"]


def test_damage_in_a_recording_is_counted_and_a_gap() -> None:
    payloads = [
        msgspec.msgpack.encode([1.0, [STORE], 0]),
        b"\xc1",
        msgspec.msgpack.encode([3.0, [["BlockRemoved", [8]]], 0]),
    ]
    replay = replaying.StreamReplay("x", domain(16), decode_batch)
    for seq, data in enumerate(payloads):
        replay.apply(replaying.Payload(seq, data))
    assert (replay.undecodable, replay.ranks[0].counts.gaps, replay.ranks[0].canonical_blocks) == (1, 1, 1)
