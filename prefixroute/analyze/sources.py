"""Lines of request logs, plain or compressed, with their numbers.

Rules:
1. A line is read whole or not at all: memory is bounded by LINE_BYTES, however long a line claims to be.
2. What is wrong with a line is the reader's to tell. A file that cannot be begun is a `UsageError`, before anything is
   read; one that cannot be read to its end ends with a line that says so, and hours of reading are not lost.
3. First bytes tell how a file is packed: a rotated or a piped log has any name.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from prefixroute import UsageError

from .records import printable

LINE_BYTES = 64 << 20
"""A longer line is skipped and counted: no prompt that an engine takes is as long."""

STDIN = "-"
BOM = b"\xef\xbb\xbf"


class SourceLine(NamedTuple):
    """A line of a file, called `source`; `data` is None for one that cannot be had, and `wrong` says why."""

    source: str
    number: int
    data: bytes | None
    wrong: str = ""


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


PACKED: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda raw: cast("IO[bytes]", gzip.GzipFile(fileobj=raw)),
    b"BZh": lambda raw: cast("IO[bytes]", bz2.BZ2File(raw)),
    b"\xfd7zXZ": lambda raw: cast("IO[bytes]", lzma.LZMAFile(raw)),  # noqa: SIM115 - the caller closes `raw`
    b"\x28\xb5\x2f\xfd": _zst,
}
"""By the first bytes of a file, what unpacks it."""

UTF16 = (b"\xff\xfe", b"\xfe\xff")


def check(paths: Sequence[Path]) -> int:
    """Return the bytes of all files together, 0 when that is not known. Raises `UsageError` for one that is no log."""
    total, known = 0, True
    for path in paths:
        if str(path) == STDIN:
            known = False
            continue
        try:
            found = path.stat()
            if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
                with path.open("rb") as raw:
                    _unpacked(raw, path)
                total += found.st_size
            else:
                # A pipe can be opened once.
                known = False
                if not os.access(path, os.R_OK):
                    raise PermissionError(0, "Permission denied")
        except OSError as error:
            raise UsageError(f"cannot read {label(path)}: {error.strerror or error}") from None
    return total if known else 0


def label(path: Path) -> str:
    """Return what a file is called in a report."""
    return "standard input" if str(path) == STDIN else printable(str(path))


def _unpacked(raw: BufferedReader, path: Path) -> IO[bytes]:
    first = raw.peek(8)[:8]
    if first.startswith(UTF16):
        raise UsageError(f"{label(path)} is UTF-16, run: iconv -f UTF-16 -t UTF-8")
    return next((unpack(raw) for magic, unpack in PACKED.items() if first.startswith(magic)), raw)


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    if str(path) == STDIN:
        yield cast("BufferedReader", sys.stdin.buffer)
        return
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {label(path)}: {error.strerror}") from None
    with raw:
        yield raw


def lines(paths: Sequence[Path], progress: Callable[[int], None] | None = None) -> Iterator[SourceLine]:
    """Yield the lines of all files in order; `progress` is told the bytes of the files as they are on disk.

    Of a pipe it is told the bytes of the lines. Raises `UsageError` for a file that cannot be opened.
    """
    before = 0
    for path in paths:
        with _opened(path) as raw:
            unpacked, source, number, had = _unpacked(raw, path), label(path), 0, 0
            where = raw.tell if raw.seekable() else None
            while True:
                number += 1
                try:
                    data = unpacked.readline(LINE_BYTES)
                    whole = len(data) < LINE_BYTES or data.endswith(b"\n")
                    while not data.endswith(b"\n") and len(data) == LINE_BYTES:
                        had += len(data)
                        data = unpacked.readline(LINE_BYTES)
                except Exception as error:  # each way of packing has errors of its own
                    yield SourceLine(source, number, None, f"the file cannot be read on: {error}")
                    break
                if not data and whole:
                    if number == 1 and unpacked is not raw:
                        # Not every way of packing notices that its file is cut off.
                        yield SourceLine(source, number, None, "nothing can be unpacked: the file is empty or cut off")
                    break
                had += len(data)
                if number == 1:
                    data = data.removeprefix(BOM)
                yield SourceLine(source, number, data if whole else None, "" if whole else _too_long())
                if progress is not None and not number & 0xFF:
                    progress(before + (had if where is None else where()))
            before += had if where is None else where()
    if progress is not None:
        progress(before)


def _too_long() -> str:
    return f"longer than {LINE_BYTES >> 20} MB"
