"""The contract of adapters on our own, on recordings of both engines; and that it finds adapters that break it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prefixroute_sglang import decode_batch as decode_sglang
from prefixroute_vllm import decode_batch as decode_vllm

from prefixroute import BlocksRemoved, BlocksStored, DecodeError, EngineBatch, UnknownEvent, UsageError
from prefixroute.cli.replay import streams
from prefixroute.testing import AdapterContract

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


@pytest.mark.parametrize(
    ("broken", "check"),
    [
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
