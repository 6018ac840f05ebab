"""Lines of request logs, plain or compressed, with their numbers.

Rules:
1. A line is read whole or not at all: memory is bounded by LINE_BYTES, however long a line claims to be.
2. What is wrong with a line is the reader's to tell; what is wrong with a file is a `UsageError`.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from prefixroute import UsageError

LINE_BYTES = 64 << 20
"""A longer line is skipped and counted: no prompt that an engine takes is as long."""


class Line(NamedTuple):
    """A line of a file; `data` is None for one that is longer than LINE_BYTES."""

    path: Path
    number: int
    data: bytes | None


def _zst(raw: IO[bytes]) -> IO[bytes]:
    """Python 3.14 has it; before, either package of that name does."""
    for name in ("compression.zstd", "backports.zstd", "pyzstd"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        return cast("IO[bytes]", module.ZstdFile(raw))
    try:
        module = importlib.import_module("zstandard")
    except ImportError:
        raise UsageError("to read .zst run: pip install zstandard (or unpack the file first)") from None
    return cast("IO[bytes]", Joined(module.ZstdDecompressor().stream_reader(raw, read_across_frames=True)))


class Joined:
    """Lines of something that can only read."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._rest = b""

    def readline(self, limit: int) -> bytes:
        """Return up to `limit` bytes, to the end of a line or of the file."""
        while b"\n" not in self._rest and len(self._rest) < limit:
            more = self._raw.read(1 << 20)
            if not more:
                break
            self._rest += more
        end = self._rest.find(b"\n", 0, limit) + 1 or limit
        line, self._rest = self._rest[:end], self._rest[end:]
        return line


OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": lambda raw: cast("IO[bytes]", gzip.GzipFile(fileobj=raw)),
    ".bz2": lambda raw: cast("IO[bytes]", bz2.BZ2File(raw)),
    ".xz": lambda raw: cast("IO[bytes]", lzma.LZMAFile(raw)),  # noqa: SIM115 - the caller closes `raw`
    ".zst": _zst,
}
"""By the end of a file's name, what unpacks it."""


def check(paths: Sequence[Path]) -> int:
    """Return the bytes of all files together. Raises `UsageError` for one that cannot be read."""
    total = 0
    for path in paths:
        try:
            with path.open("rb"):
                total += path.stat().st_size
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return total


def lines(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Iterator[Line]:
    """Yield the lines of all files in order; `progress` is told the bytes of the files as they are on disk.

    Raises `UsageError` for a file that cannot be unpacked.
    """
    before = 0
    for path in paths:
        try:
            with path.open("rb") as raw:
                unpack = OPENERS.get(path.suffix)
                unpacked = raw if unpack is None else unpack(raw)
                number = 0
                while data := unpacked.readline(LINE_BYTES):
                    number += 1
                    whole = len(data) < LINE_BYTES or data.endswith(b"\n")
                    while not data.endswith(b"\n") and len(data) == LINE_BYTES:
                        data = unpacked.readline(LINE_BYTES)
                    yield Line(path, number, data if whole else None)
                    if progress is not None and not number & 0xFF:
                        progress(before + raw.tell())
                before += raw.tell()
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise UsageError(f"cannot read {path}: {error}") from None
    if progress is not None:
        progress(before)
