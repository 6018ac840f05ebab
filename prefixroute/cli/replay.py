"""``prefixroute replay``: apply a recorded event stream and print what the engine must hold at its end.

A stream is a folder of payloads named by sequence number (NNNNN.msgpack), or one file:

| file                  | holds                                                                               |
|-----------------------|-------------------------------------------------------------------------------------|
| .msgpack              | a payload; or payloads in a row from number 0, each after its length                |
| .frames, .bin         | messages in a row: a frame count, then each frame after its length; the payload is  |
|                       | the last frame, its number (8 bytes, big-endian) the one before                     |

Lengths and counts are 4 bytes, big-endian. Each folder with numbered payloads, at or below the one given, is a stream
of its own, and so is each file that is not named by a number.

Rules:
1. Each stream and each rank in it has a residency of its own, as each has in a running node.
2. A missing number is a gap, and a first number above 0 is a truncated history: both make the rank partial.
3. A payload that cannot be decoded is counted, and is a gap of one.
4. A file is read as payloads or messages in a row only if they fill it exactly. No single payload of an engine does:
   its first byte, that of an array, would begin a length of gigabytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DecodeError, UsageError
from ..events import EngineBatch, StreamGap
from ..keys.domain import Domain
from ..residency.mirror import Residency

SUFFIX = ".msgpack"
SUFFIXES_OF_MESSAGES = (".frames", ".bin")
_LENGTH = 4
TOTALS = ("stored", "removed", "unknown_events", "unknown_removals", "hash_only", "orphans", "gaps", "restarts")
"""Counters of a residency that the report sums up: blocks, except `unknown_events`, `gaps` and `restarts`."""


class Payload(NamedTuple):
    """One recorded message; `seq` is None when nothing tells its number."""

    seq: int | None
    data: bytes


def streams(source: Path) -> Iterator[tuple[str, Iterator[Payload]]]:
    """Yield the name and the payloads, in order, of each stream at or below `source`; raise `UsageError` if none is."""
    if source.is_file():
        yield source.name, payloads_of(source)
        return
    if not source.is_dir():
        raise UsageError(f"{source}: no such file or folder")
    found = False
    for folder in [source, *sorted(path for path in source.rglob("*") if path.is_dir())]:
        files = sorted(folder.glob(f"*{SUFFIX}"))
        numbered = sorted((int(path.stem), path) for path in files if path.stem.isdecimal())
        if numbered:
            found = True
            yield str(folder.relative_to(source)), (Payload(seq, path.read_bytes()) for seq, path in numbered)
        files += sorted(path for path in folder.iterdir() if path.is_file() and _holds_messages(path))
        for path in files:
            if not path.stem.isdecimal():
                found = True
                yield str(path.relative_to(source)), payloads_of(path)
    if not found:
        raise UsageError(f"{source}: no {SUFFIX} payload and no recording in it or below it")


def payloads_of(path: Path) -> Iterator[Payload]:
    """Yield the payloads of one file. Raises `UsageError` if it is named as a file of messages and is none."""
    data = path.read_bytes()
    if path.suffix not in SUFFIXES_OF_MESSAGES:
        rows = _rows(data)
        yield from [Payload(None, data)] if rows is None else [Payload(seq, row) for seq, row in enumerate(rows)]
        return
    messages = _messages(data)
    if messages is None:
        raise UsageError(f"{path}: not a recording of messages: pass frame counts and frames, each after its length")
    for frames in messages:
        numbered = len(frames) > 1 and len(frames[-2]) == 8
        yield Payload(int.from_bytes(frames[-2], "big") if numbered else None, frames[-1] if frames else b"")


def _holds_messages(path: Path) -> bool:
    return path.suffix in SUFFIXES_OF_MESSAGES and _messages(path.read_bytes()) is not None


def _rows(data: bytes) -> list[bytes] | None:
    """Byte strings in a row, each after its length; None if `data` is not that."""
    rows, at = [], 0
    while at < len(data):
        start = at + _LENGTH
        at = start + int.from_bytes(data[at:start], "big")
        rows.append(data[start:at])
    return rows if rows and at == len(data) else None


def _messages(data: bytes) -> list[list[bytes]] | None:
    """Messages in a row, each a frame count and its frames; None if `data` is not that."""
    messages, at = [], 0
    while at + _LENGTH <= len(data):
        count, at = int.from_bytes(data[at : at + _LENGTH], "big"), at + _LENGTH
        frames: list[bytes] = []
        while len(frames) < count and at + _LENGTH <= len(data):
            start = at + _LENGTH
            at = start + int.from_bytes(data[at:start], "big")
            frames.append(data[start:at])
        if len(frames) < count:
            return None
        messages.append(frames)
    return messages if messages and at == len(data) else None


class StreamReplay:
    """One stream, applied: a residency for each rank, and a count of the messages that could not be decoded."""

    def __init__(self, name: str, domain: Domain, decode: Callable[[bytes], EngineBatch]) -> None:
        self.name = name
        self.ranks: dict[int, Residency] = {}
        self.messages = 0
        self.events = 0
        self.undecodable = 0
        self._domain = domain
        self._decode = decode
        self._last = -1

    def apply(self, payload: Payload) -> None:
        """Apply one message, and a gap before it if numbers are missing."""
        self.messages += 1
        try:
            batch = self._decode(payload.data)
        except DecodeError:
            # Its number counts as missing with the next message.
            self.undecodable += 1
            return
        residency = self.ranks.setdefault(batch.rank, Residency(self._domain))
        if payload.seq is not None:
            missing = payload.seq - self._last - 1
            self._last = payload.seq
            if missing > 0:
                residency.apply(EngineBatch((StreamGap(missing),), batch.rank))
        self.events += batch.told
        residency.apply(batch)


def report(replays: list[StreamReplay], block_size: int) -> dict[str, Any]:
    """Return totals over all streams and ranks, and live handles and copies by (stream, rank, tier, group)."""
    ranks = [(replay, rank, residency) for replay in replays for rank, residency in sorted(replay.ranks.items())]
    result: dict[str, Any] = {
        "messages": sum(replay.messages for replay in replays),
        "events": sum(replay.events for replay in replays),
        "undecodable": sum(replay.undecodable for replay in replays),
    }
    for name in TOTALS:
        result[name] = sum(getattr(residency.counts, name) for _, _, residency in ranks)
    result["partial"] = result["undecodable"] > 0 or any(residency.partial for _, _, residency in ranks)
    result["live"] = [
        {"stream": replay.name, "rank": rank, **row._asdict()}
        for replay, rank, residency in ranks
        for row in residency.live()
    ]
    blocks = sum(residency.canonical_blocks for _, _, residency in ranks)
    return {**result, "canonical_blocks": blocks, "tokens": blocks * block_size}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "source", type=Path, metavar="DIR_OR_FILE", help="a recorded stream, a folder of them, a payload"
    )
    parser.add_argument("--engine", default="vllm", help="whose format it is: vllm, sglang (vllm)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="canonical block in tokens (16)")
    parser.add_argument("--json", metavar="FILE", help='write the report as JSON ("-": standard output)')


def run(options: argparse.Namespace) -> int:
    """Apply the stream and print the report. Raises `UsageError` if the source or the engine's adapter is missing."""
    decode = engine_decoder(options.engine)
    domain = Domain("replay", "replay", options.block_size)
    replays = []
    for name, payloads in streams(options.source):
        replay = StreamReplay(name, domain, decode)
        for payload in payloads:
            replay.apply(payload)
        replays.append(replay)
    result = report(replays, options.block_size)
    if options.json is None:
        print(_text(result))
        return 0
    text = json.dumps(result, indent=1)
    if options.json == "-":
        print(text)
        return 0
    try:
        Path(options.json).write_text(text + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {options.json}: {error.strerror}") from None
    return 0


def engine_decoder(name: str) -> Callable[[bytes], EngineBatch]:
    """Return the payload decoder of an installed engine adapter. Raises `UsageError`, with a list, if there is none."""
    found = {point.name: point for point in entry_points(group="prefixroute.engines")}
    if name not in found:
        raise UsageError(f"no adapter for engine {name!r}; installed: {', '.join(sorted(found)) or 'none'}")
    decode: Callable[[bytes], EngineBatch] = found[name].load().decode
    return decode


def _text(result: dict[str, Any]) -> str:
    lines = [f"{name:<18}{value}" for name, value in result.items() if name != "live"]
    shape = "  {stream:<28}{rank:>5} {tier:<6}{group:>6}{handles:>9}{copies:>8}"
    columns = ("stream", "rank", "tier", "group", "handles", "copies")
    header = shape.format(**{column: column for column in columns})
    rows = [shape.format(**row) for row in result["live"]]
    return "\n".join([*lines, "live:", header, *rows])
