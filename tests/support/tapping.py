"""Stand-ins for what engines hand to a publisher in their own process, and a tap that a test turns by hand."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import prefixroute_vllm
import pytest
from prefixroute_inproc import Tap, TapFollower
from prefixroute_inproc.frames import Resume, encode
from prefixroute_zmq import EventSource
from publishing import Seen, running


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As in vLLM 0.32.0."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As in both engines."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As in both engines."""


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As in vLLM 0.32.0."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class SglangBatch(msgspec.Struct, array_like=True, gc=False):
    """As in SGLang 0.5.23."""

    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


def removal(number: int) -> VllmBatch:
    """A batch that `publishing.told` tells by its number."""
    return VllmBatch(float(number), [BlockRemoved([number])])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket, whatever the temporary folder of tests is."""
    made = Path(tempfile.mkdtemp(prefix="tap-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def source(path: Path | str, rank: int = 0) -> EventSource:
    return EventSource(f"tap://{path}", rank=rank)


def follower_of(path: Path | str, seen: Any, **options: Any) -> TapFollower:
    """A follower that does not make tests wait."""
    return TapFollower(source(path), seen, prefixroute_vllm.ENGINE, pause_s=(0.001, 0.01), **options)


@contextlib.asynccontextmanager
async def following(path: Path | str) -> AsyncIterator[tuple[TapFollower, Seen]]:
    seen = Seen()
    follower = follower_of(path, seen)
    async with running(follower):  # type: ignore[arg-type]
        yield follower, seen


@contextlib.contextmanager
def tap_at(path: Path | str | None, *, started: bool = True, **options: Any) -> Iterator[Tap]:
    tap = Tap("vllm", path=None if path is None else str(path), **options)
    if started:
        tap.start()
    try:
        yield tap
    finally:
        tap.close()


class Reader:
    """A reader that a test moves by hand: it reads only what it is told to."""

    def __init__(self, path: Path, life: int = 0, next_seq: int = 0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        self.socket.sendall(encode(Resume(life, next_seq)))

    def read(self) -> bytes:
        """What is there, without waiting."""
        self.socket.setblocking(False)
        got = bytearray()
        try:
            while data := self.socket.recv(1 << 16):
                got += data
        except BlockingIOError:
            pass
        return bytes(got)

    def close(self) -> None:
        self.socket.close()
