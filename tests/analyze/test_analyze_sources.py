"""Files of request logs: packed under any name, cut off, piped, too long, and how far reading is."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixroute import UsageError
from prefixroute.analyze.progress import reading, said
from prefixroute.analyze.sources import Joined, check, lines


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_compressed_files_are_read(tmp_path: Path, suffix: str, pack: Any) -> None:
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(pack(b"one\n\ntwo"))
    assert [(line.number, line.data) for line in lines([path])] == [(1, b"one\n"), (2, b"\n"), (3, b"two")]
    assert [line.data for line in lines([path.rename(tmp_path / "log.1")])][-1] == b"two", "whatever its name is"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_file_that_is_cut_off_ends_with_a_line_that_says_so(tmp_path: Path, pack: Any) -> None:
    (tmp_path / "log").write_bytes(pack(b"one\n" * 9000)[:-9])
    (tmp_path / "next").write_bytes(b"two\n")
    *_, last, after = lines([tmp_path / "log", tmp_path / "next"])
    assert last.data is None
    assert "cannot be read on" in last.wrong
    assert after.data == b"two\n"


def test_a_packed_file_that_gives_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(gzip.compress(b""))
    (line,) = lines([tmp_path / "log"])
    assert "nothing can be unpacked" in line.wrong


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xef\xbb\xbf{}\n{}\n")
    assert [line.data for line in lines([tmp_path / "log"])] == [b"{}\n", b"{}\n"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_before_anything_is_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "log").write_bytes(f"\ufeff{json.dumps({'prompt': 'hi'})}\n".encode(encoding))
    with pytest.raises(UsageError, match="iconv"):
        check([tmp_path / "log"])


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        check([tmp_path])


def test_a_pipe_is_read_once_and_its_length_is_not_known(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(gzip.compress(b"one\ntwo\n" * 200))
    path, told = Path(f"/dev/fd/{reading}"), list[int]()
    assert check([path]) == 0
    assert len(list(lines([path], told.append))) == 400
    assert told[-1] == 1600
    os.close(reading)


def test_standard_input_is_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BufferedReader(io.BytesIO(b"one\ntwo\n"))

    monkeypatch.setattr(sys, "stdin", Input)
    assert check([Path("-")]) == 0
    assert [(line.source, line.data) for line in lines([Path("-")])] == [
        ("standard input", b"one\n"),
        ("standard input", b"two\n"),
    ]


def test_progress_is_a_line_with_megabytes() -> None:
    assert said(250_000_000, 1_000_000_000, 10.0) == "read 250 of 1,000 MB, 25.0 MB/s, 30 s left "
    assert said(250_000_000, 0, 10.0) == "read 250 MB, 25.0 MB/s "
    assert said(0, 10, 0.0)


def test_progress_is_shown_where_no_bar_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prefixroute.analyze.progress.EVERY_S", 0.0)
    with reading(2_000_000) as told:
        told(1_000_000)
    assert "read 1 of 2 MB" in capsys.readouterr().err


def test_zst_says_what_to_install_where_nothing_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd", "pyzstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="pip install zstandard"):
        (tmp_path / "log").write_bytes(b"\x28\xb5\x2f\xfd....")
        check([tmp_path / "log"])


def test_what_can_only_be_read_has_lines() -> None:
    joined = Joined(io.BytesIO(b"one\n\nthree four\nfive"))
    assert [joined.readline(8) for _ in range(6)] == [b"one\n", b"\n", b"three fo", b"ur\n", b"five", b""]


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("x\n" * 700)
    told: list[int] = []
    assert len(list(lines(paths, told.append))) == 1400
    assert told == sorted(told)
    assert told[-1] == 2800


def test_a_line_that_is_too_long_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixroute.analyze.sources.LINE_BYTES", 8)
    path = tmp_path / "log"
    path.write_bytes(b"1234567\n" + b"x" * 40 + b"\nlast\n")
    found = list(lines([path]))
    assert [line.data for line in found] == [b"1234567\n", None, b"last\n"]
    assert "longer than" in found[1].wrong
