"""Six inputs that make mirrors of KV caches wrong, and what a user of a node sees instead.

Each was found to fail in a mirror that is in wide use: a hole closed again, a chain stored twice, a child before its
parent, an engine that restarts without saying so, a gap that nobody can replay, and hashes of 32 bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from prefixroute_vllm import ReplayRequest, Sequencer, decode_batch

from prefixroute import (
    BlocksRemoved,
    BlocksStored,
    Candidate,
    Domain,
    EngineBatch,
    EngineEvent,
    Node,
    Outcome,
    ResidencyChanged,
    StreamGap,
)

BLOCK = 16
A = list(range(8 * BLOCK))
B = list(range(5000, 5000 + 4 * BLOCK))


class Mirror:
    """A node with one endpoint, and how many whole blocks of a prompt it says that endpoint has cached."""

    def __init__(self) -> None:
        self.node = Node("a", Domain("m", "t", BLOCK), rng=random.Random(1), now=0.0)
        self.endpoint = self.node.add_endpoint("0", url="http://127.0.0.1:1", incarnation=1, now=0.0)
        self.now = 0.0

    def apply(self, *events: EngineEvent) -> None:
        self.take(EngineBatch(events))

    def take(self, batch: EngineBatch) -> None:
        self.now += 1.0
        self.node.apply(self.endpoint, batch, self.now)
        self.node.handle_timer(self.now)
        self.node._check()

    def candidate(self, tokens: Sequence[int]) -> Candidate:
        # One token more than the blocks: an engine computes at least the last one.
        decision = self.node.route([*tokens, 1], self.now)
        assert decision.target == self.endpoint
        (candidate,) = decision.candidates
        assert candidate.matched_tokens == decision.matched_tokens
        # A question only: what is routed would count as held.
        self.node.report(decision, Outcome.cancelled(), self.now)
        return candidate

    def blocks(self, tokens: Sequence[int]) -> int:
        return self.candidate(tokens).matched_tokens // BLOCK

    def states(self) -> list[str]:
        return [event.state for event in self.node.events() if isinstance(event, ResidencyChanged)]


def stored(tokens: Sequence[int], first: int = 0, base: int = 100) -> BlocksStored:
    """Blocks `first` and on of a prompt; block i has the handle base + i."""
    n = len(tokens) // BLOCK
    parent = base + first - 1 if first else None
    return BlocksStored(tuple(range(base + first, base + n)), parent, tokens[first * BLOCK :], BLOCK)


def test_hole_middle_block_evicted_and_restored_gives_all_8() -> None:
    mirror = Mirror()
    mirror.apply(stored(A))
    assert mirror.blocks(A) == 8
    mirror.apply(BlocksRemoved((103,)))
    assert mirror.blocks(A) == 3
    mirror.apply(stored(A[: 4 * BLOCK], first=3))
    assert mirror.blocks(A) == 8


def test_duplicate_chain_stored_twice_and_its_tail_removed_once_gives_all_8() -> None:
    mirror = Mirror()
    mirror.apply(stored(A))
    mirror.apply(stored(A))
    mirror.apply(BlocksRemoved((107,)))
    assert mirror.blocks(A) == 8
    mirror.apply(BlocksRemoved((107,)))
    assert mirror.blocks(A) == 7


@pytest.mark.parametrize("at_once", [True, False])
def test_order_child_before_parent_gives_all_4(at_once: bool) -> None:
    mirror = Mirror()
    child, parent = stored(B, first=2), stored(B[: 2 * BLOCK])
    if at_once:
        mirror.apply(child, parent)
    else:
        mirror.apply(child)
        assert mirror.blocks(B) == 0
        mirror.apply(parent)
    assert mirror.blocks(B) == 4


def test_restart_without_a_word_drops_the_old_life_and_believes_the_new_one() -> None:
    """Sequence numbers begin at 0 again, and nothing says "cleared" (there is no epoch on vLLM's wire)."""
    mirror, sequencer = Mirror(), Sequencer(replay=False)
    lives = [
        [EngineBatch((stored(A[: 4 * BLOCK]),), ts=10.0), EngineBatch((stored(A, first=4),), ts=11.0)],
        [EngineBatch((stored(B, base=500),), ts=90.0)],
    ]
    seen = []
    for life in lives:
        for seq, batch in enumerate(life):
            for action in sequencer.receive_live(seq, batch, batch.ts):
                assert isinstance(action, EngineBatch)
                mirror.take(action)
        seen.append((mirror.blocks(A), mirror.blocks(B)))
    assert seen == [(8, 0), (0, 4)]
    assert mirror.states() == ["restarted"]


def test_restart_that_looks_like_a_gap_shows_in_the_replay() -> None:
    """The first batches of the new life are lost; the replay's time stamps tell that it is another life."""
    mirror, sequencer = Mirror(), Sequencer()
    old = EngineBatch((stored(A),), ts=10.0)
    new = [EngineBatch((stored(B[: (i + 2) * BLOCK], i + 1 if i else 0, 500),), ts=90.0 + i) for i in range(3)]
    actions = [*sequencer.receive_live(0, old, 10.0), *sequencer.receive_live(2, new[2], 92.0)]
    asked = []
    while actions:
        action = actions.pop(0)
        if isinstance(action, EngineBatch):
            mirror.take(action)
            continue
        assert isinstance(action, ReplayRequest)
        asked.append(action.start_seq)
        for seq in range(action.start_seq, 3):
            actions += sequencer.receive_replayed(action, seq, new[seq], 93.0)
        actions += sequencer.receive_replay_end(action, 93.0)
    assert asked == [0, 0]
    assert (mirror.blocks(A), mirror.blocks(B)) == (0, 4)
    assert mirror.states() == ["restarted"]


@pytest.mark.parametrize("lost", [1, 5])
def test_gap_without_replay_lowers_confidence_where_a_user_sees_it(lost: int) -> None:
    mirror, sequencer = Mirror(), Sequencer(replay=False)
    for seq, tokens in ((0, A), (1 + lost, B)):
        batch = EngineBatch((stored(tokens, base=100 + seq * 100),), ts=float(seq))
        for action in sequencer.receive_live(seq, batch, batch.ts):
            assert isinstance(action, EngineBatch)
            mirror.take(action)
    doubted = mirror.candidate(A)
    assert doubted.matched_tokens == 8 * BLOCK
    assert 0.5 <= doubted.confidence < 1.0
    assert mirror.node.residency(mirror.endpoint).partial
    assert mirror.states() == ["partial"]
    whole = Mirror()
    whole.apply(stored(A), stored(B, base=500))
    sure = whole.candidate(A)
    assert (sure.matched_tokens, sure.confidence) == (8 * BLOCK, 1.0)
    assert sure.cost_s < doubted.cost_s


def test_gap_of_unknown_length_is_a_gap() -> None:
    mirror = Mirror()
    mirror.apply(stored(A), StreamGap())
    assert mirror.candidate(A).confidence == 0.5


@pytest.mark.parametrize("size", [8, 16, 32])
def test_hash_form_bytes_of_any_length_give_all_4(size: int) -> None:
    mirror = Mirror()
    hashes = [bytes([i + 1]) * size for i in range(4)]
    store = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": B}
    store |= {"block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * 4}
    mirror.take(decode_batch(msgspec.msgpack.encode([1.0, [store], 0])))
    assert mirror.blocks(B) == 4
    removal = {"type": "BlockRemoved", "block_hashes": [hashes[3]], "medium": "GPU"}
    mirror.take(decode_batch(msgspec.msgpack.encode([2.0, [removal], 0])))
    assert mirror.blocks(B) == 3
