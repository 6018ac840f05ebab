"""The contract of adapters on our own, on recordings of both engines; and that it finds adapters that break it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prefixroute_sglang import decode_batch as decode_sglang
from prefixroute_vllm import decode_batch as decode_vllm

from prefixroute import BlocksCleared, BlocksRemoved, BlocksStored, DecodeError, EngineBatch, UnknownEvent, UsageError
from prefixroute.cli.replay import streams
from prefixroute.testing import AdapterContract, stored

DATA = Path(__file__).parents[1] / "data"


def payloads(path: Path) -> list[bytes]:
    """The payloads of a recording, in order."""
    ((_, rows),) = streams(path)
    return [row.data for row in rows]


class TestVllmContract(AdapterContract):
    def decode(self, payload: bytes) -> EngineBatch:
        return decode_vllm(payload)

    def recordings(self) -> Sequence[Sequence[bytes]]:
        return [payloads(DATA / "vllm_events" / "v0.32.0_bs32_sha256")]


class TestSglangContract(AdapterContract):
    def decode(self, payload: bytes) -> EngineBatch:
        return decode_sglang(payload)

    def recordings(self) -> Sequence[Sequence[bytes]]:
        names = ("radix_p16", "legacy_0.5.17_p16", "legacy_0.5.18_p16", "unified_rust_p16", "unified_python_p1")
        return [payloads(DATA / "sglang_events" / f"{name}.msgpack") for name in names]


class _Swallows(TestSglangContract):
    """Takes anything for an empty batch."""

    def decode(self, payload: bytes) -> EngineBatch:
        try:
            return super().decode(payload)
        except DecodeError:
            return EngineBatch(())


class _Raises(TestSglangContract):
    """Lets its parser's own errors out."""

    def decode(self, payload: bytes) -> EngineBatch:
        try:
            return super().decode(payload)
        except DecodeError as error:
            raise ValueError(error) from error


class _Changes(TestSglangContract):
    """Changes each event in a way of its own."""

    @staticmethod
    def change(event: object) -> object:
        return event

    def decode(self, payload: bytes) -> EngineBatch:
        batch = super().decode(payload)
        return replace(batch, events=tuple(self.change(event) for event in batch.events))  # type: ignore[arg-type]


class _Forgets(_Changes):
    @staticmethod
    def change(event: object) -> object:
        return UnknownEvent("BlockRemoved") if isinstance(event, BlocksRemoved) else event


class _Halves(_Changes):
    @staticmethod
    def change(event: object) -> object:
        return replace(event, tokens=event.tokens[1:]) if isinstance(event, BlocksStored) and event.tokens else event


class _Twice(_Changes):
    """Removes a block twice."""

    @staticmethod
    def change(event: object) -> object:
        return replace(event, handles=event.handles + event.handles[:1]) if isinstance(event, BlocksRemoved) else event


class _LosesParents(_Changes):
    @staticmethod
    def change(event: object) -> object:
        return replace(event, parent=None) if isinstance(event, BlocksStored) else event


class _Reverses(_Changes):
    @staticmethod
    def change(event: object) -> object:
        return replace(event, tokens=event.tokens[::-1]) if isinstance(event, BlocksStored) else event


class _NeverFlushes(TestSglangContract):
    def decode(self, payload: bytes) -> EngineBatch:
        batch = super().decode(payload)
        return replace(batch, events=tuple(event for event in batch.events if not isinstance(event, BlocksCleared)))


class _OneOf(TestVllmContract):
    """The same on the other engine's recording."""

    broken: type[_Changes]

    def decode(self, payload: bytes) -> EngineBatch:
        batch = super().decode(payload)
        return replace(batch, events=tuple(self.broken.change(event) for event in batch.events))  # type: ignore[arg-type]


class _LosesParentsOfVllm(_OneOf):
    broken = _LosesParents


class _ReversesVllm(_OneOf):
    broken = _Reverses


class TestKnownPrompts(AdapterContract):
    """A recording made here, of an adapter whose payloads are prompts; it tells what was cached."""

    handles_name_content = True
    flushes = False

    def recordings(self) -> Sequence[Sequence[bytes]]:
        return [[b"a:0:4", b"a:0:6", b"x:9:2", b"-:0:6"]]

    def prompts(self) -> Sequence[Sequence[Sequence[int]]]:
        return [[self.tokens("a", 6), self.tokens("a", 3), self.tokens("x", 2)]]

    @staticmethod
    def tokens(word: str, blocks: int) -> list[int]:
        return [1000 * ord(word[0]) + i for i in range(16 * blocks)]

    def decode(self, payload: bytes) -> EngineBatch:
        try:
            word, _, blocks = payload.decode().split(":")
            n = int(blocks)
            if n > 64 or len(word) != 1:
                raise ValueError(word)
        except ValueError as error:
            raise DecodeError("malformed", str(error)) from None
        if word == "-":
            handles = stored(self.tokens("a", n)).events[0].handles  # type: ignore[union-attr]
            return EngineBatch((BlocksRemoved(handles[::-1]),))
        (event,) = stored(self.tokens(word, n)).events
        assert isinstance(event, BlocksStored)
        start = 4 if n == 6 else 0
        return EngineBatch((event.part(start, n),))


class _ReversesBlocks(TestKnownPrompts):
    """Each block's tokens backwards: alike each time."""

    def decode(self, payload: bytes) -> EngineBatch:
        batch = super().decode(payload)
        for event in batch.events:
            if isinstance(event, BlocksStored):
                blocks = [event.tokens[i : i + 16][::-1] for i in range(0, len(event.tokens), 16)]
                return EngineBatch((replace(event, tokens=[token for block in blocks for token in block]),))
        return batch


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (_LosesParents, "test_a_block_is_told_alike_each_time"),
        (_LosesParents, "test_stores_name_the_block_that_they_continue"),
        (_LosesParentsOfVllm, "test_stores_name_the_block_that_they_continue"),
        (_Reverses, "test_a_block_is_told_alike_each_time"),
        (_ReversesVllm, "test_a_block_is_told_alike_each_time"),
        (_ReversesBlocks, "test_prompts_that_were_cached_are_held"),
        (_NeverFlushes, "test_a_flush_is_told"),
        (_Swallows, "test_bad_bytes_are_a_decode_error_or_a_batch"),
        (_Forgets, "test_reads_its_recordings_whole"),
        (_Halves, "test_stores_come_with_the_tokens_of_their_blocks"),
        (_Twice, "test_copies_are_counted"),
    ],
)
def test_the_contract_finds_a_broken_adapter(broken: type[AdapterContract], check: str) -> None:
    with pytest.raises(AssertionError):
        getattr(broken(), check)()


def test_the_contract_finds_an_adapter_that_lets_errors_out() -> None:
    with pytest.raises(ValueError):
        _Raises().test_bad_bytes_are_a_decode_error_or_a_batch()


def test_a_contract_without_an_adapter_says_so() -> None:
    with pytest.raises(UsageError, match="recordings"):
        AdapterContract().recordings()
    with pytest.raises(UsageError, match="decode"):
        AdapterContract().decode(b"")
