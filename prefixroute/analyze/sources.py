"""Lines of request logs, plain or compressed, with their numbers.

Rules:
1. A line is read whole or not at all: memory is bounded by LINE_BYTES, however long a line claims to be.
2. The reader of a line reports what is wrong with it. A file that cannot be opened raises `UsageError` before anything
   is read; a file that breaks off ends with a line that says so, so that hours of reading are not lost.
3. The first bytes tell how a file is compressed, since a rotated or a piped log may have any name.
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
"""The longest line in bytes; a longer one is skipped and counted, as no engine takes so long a prompt."""

STDIN = "-"
BOM = b"\xef\xbb\xbf"


class SourceLine(NamedTuple):
    """A line of the file `source`; for a line that cannot be read `data` is None, and `wrong` says why."""

    source: str
    number: int
    data: bytes | None
    wrong: str = ""


def _zst(raw: IO[bytes]) -> IO[bytes]:
    """Unpack Zstandard: by Python 3.14's own module, or by either package for earlier versions."""
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
    """Lines of an object that has only `read`."""

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
"""First bytes of a file -> the function that unpacks it."""

UTF16 = (b"\xff\xfe", b"\xfe\xff")


def check(paths: Sequence[Path]) -> int:
    """Return the bytes of all files together, 0 if unknown. Raises `UsageError` for a path that is no log."""
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
                # A pipe can be opened only once.
                known = False
                if not os.access(path, os.R_OK):
                    raise PermissionError(0, "Permission denied")
        except OSError as error:
            raise UsageError(f"cannot read {label(path)}: {error.strerror or error}") from None
    return total if known else 0


def label(path: Path) -> str:
    """Return the name of a file for a report."""
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
    """Yield the lines of all files in order; `progress` is called with the bytes read of the files on disk.

    For a pipe it is called with the bytes of the lines. Raises `UsageError` for a file that cannot be opened.
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
                except Exception as error:  # each compression has errors of its own
                    yield SourceLine(source, number, None, f"the file cannot be read on: {error}")
                    break
                if not data and whole:
                    if number == 1 and unpacked is not raw:
                        # Not every compression notices that its file is cut off.
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
