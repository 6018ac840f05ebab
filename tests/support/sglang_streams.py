"""Recorded SGLang streams: the files, their payloads, their plainest reading, and prompts to ask for."""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from prefixroute import Domain, Namespace, TokenChain
from prefixroute.keys.chain import ChainSpec

DATA = Path(__file__).parents[1] / "data" / "sglang_events"
SMALL = [
    *("radix_p1", "radix_p16", "radix_p64", "radix_p4_eagle", "legacy_0.5.17_p16", "legacy_0.5.18_p16"),
    *("unified_python_p1", "unified_python_p16", "unified_rust_p16", "zmq_frames_p16", "server_p16"),
]
LOADED = ["radix_p1_load", "radix_p16_load", "radix_p64_load"]
STREAMS = [*SMALL, *LOADED]


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def raw(name: str) -> tuple[Path, bytes]:
    """The recording, and the path it has (without the compression that the large ones are kept in)."""
    (path,) = [path for path in DATA.iterdir() if path.name.partition(".msgpack")[0].partition(".frames")[0] == name
               or path.name == f"{name}.bin"]  # fmt: skip
    data = path.read_bytes()
    return (path.with_suffix(""), lzma.decompress(data)) if path.suffix == ".xz" else (path, data)


@cache
def payloads(name: str) -> list[bytes]:
    path, data = raw(name)
    found, at = [], 0
    while at < len(data):
        if path.suffix == ".msgpack":
            found.append(data[at + 4 : at + 4 + _u32(data, at)])
            at += 4 + _u32(data, at)
            continue
        frames, at = _u32(data, at), at + 4
        for _ in range(frames):
            last = data[at + 4 : at + 4 + _u32(data, at)]
            at += 4 + len(last)
        found.append(last)
    return found


def numbered(name: str) -> list[tuple[int, bytes]]:
    """Messages with their numbers; the server's first one was missed."""
    return list(enumerate(payloads(name), start=int(name == "server_p16")))


NAMES = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "more")


def events(payload: bytes) -> list[dict[str, Any]]:
    """Events as maps, whatever their form, with each field that matters."""
    return [_fields(event) for event in msgspec.msgpack.decode(payload)[1]]


def _fields(event: Any) -> dict[str, Any]:
    if isinstance(event, list):
        names = NAMES if event[0] == "BlockStored" else ("block_hashes", "medium")
        event = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
        event |= event.pop("more", {})
    return {"cache_salt": "", "lora_name": "", "medium": "GPU", **event}


def domain(size: int) -> Domain:
    return Domain("m", "t", size)


def prompt_of(namespace: tuple[str, str], tokens: list[int], size: int) -> TokenChain:
    return TokenChain(ChainSpec(size, domain(size).mix), domain(size).root_key(Namespace(*namespace)), tokens)
