"""`prefixroute replay`: any folder of the layout, gaps and damage shown, errors as one line."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixroute.cli import main

DATA = Path(__file__).parents[1] / "data" / "vllm_events"
PLAIN = DATA / "v0.32.0_bs32_sha256"


def replay(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["replay", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def stored(hashes: list[int], parent: int | None, tokens: list[int], size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
    }


def write(folder: Path, batches: dict[int, list[dict[str, Any]]], rank: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seq, events in batches.items():
        (folder / f"{seq:05}.msgpack").write_bytes(msgspec.msgpack.encode([float(seq), events, rank]))


def plain_count(folder: Path) -> dict[str, Any]:
    """The plainest consumer: counts what the payloads say, with no idea of trees."""
    totals: Counter[str] = Counter()
    copies: Counter[tuple[int, int, int]] = Counter()
    for path in sorted(folder.glob("*.msgpack")):
        _, events, rank = msgspec.msgpack.decode(path.read_bytes())
        totals["messages"] += 1
        for event in events:
            totals["events"] += 1
            group = event.get("group_idx", 0)
            if event["type"] == "BlockStored":
                totals["stored"] += len(event["block_hashes"])
                copies.update((rank, group, _int(h)) for h in event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                totals["removed"] += len(event["block_hashes"])
                copies.subtract((rank, group, _int(h)) for h in event["block_hashes"])
            else:
                copies.clear()
    live: dict[tuple[int, int], list[int]] = {}
    for (rank, group, _), n in copies.items():
        if n:
            row = live.setdefault((rank, group), [0, 0])
            row[0] += 1
            row[1] += n
    return {**totals, "live": live}


def _int(engine_hash: int | bytes) -> int:
    return engine_hash if isinstance(engine_hash, int) else int.from_bytes(engine_hash[-8:], "big")


@pytest.mark.parametrize(
    "name",
    [
        "v0.32.0_bs32_sha256",
        "v0.32.0_bs128_sha256cbor_bytes_lora",
        "v0.32.0_bs32_hybrid_gemma3",
        "v0.32.0_bs32_dp2/r0",
        "v0.32.0_bs32_dp2/r1",
    ],
)
def test_a_recorded_stream_gives_what_a_plain_count_gives(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = replay(capsys, DATA / name)
    expected = plain_count(DATA / name)
    for key in ("messages", "events", "stored", "removed"):
        assert result[key] == expected.get(key, 0), key
    assert (result["unknown_removals"], result["orphans"], result["gaps"], result["restarts"]) == (0, 0, 0, 0)
    assert result["partial"] is False
    live = {(row["rank"], row["group"]): [row["handles"], row["copies"]] for row in result["live"]}
    assert live == expected["live"]
    assert result["tokens"] == 16 * result["canonical_blocks"] > 0


def test_sub_folders_are_streams_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    both = replay(capsys, DATA / "v0.32.0_bs32_dp2")
    parts = [replay(capsys, DATA / "v0.32.0_bs32_dp2" / rank) for rank in ("r0", "r1")]
    assert both["canonical_blocks"] == sum(part["canonical_blocks"] for part in parts)
    assert {(row["stream"], row["rank"]) for row in both["live"]} == {("r0", 0), ("r1", 1)}


def test_a_payload_by_itself_is_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    result = replay(capsys, PLAIN / "00000.msgpack")
    assert (result["messages"], result["stored"], result["canonical_blocks"]) == (1, 6, 12)


def test_any_folder_of_the_layout_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = list(range(48))
    write(
        tmp_path / "mine",
        {
            0: [stored([1, 2], None, tokens[:32], 16), stored([9], None, tokens[:16], 16)],
            1: [stored([3], 2, tokens[32:], 16), {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}],
        },
        rank=3,
    )
    result = replay(capsys, tmp_path / "mine")
    assert result["live"] == [{"stream": ".", "rank": 3, "tier": "gpu", "group": 0, "handles": 3, "copies": 3}]
    # Handles 1 and 9 name the same content, so three handles cover two canonical blocks.
    assert (result["canonical_blocks"], result["tokens"]) == (2, 32)
    assert replay(capsys, tmp_path / "mine", "--block-size", 32)["canonical_blocks"] == 1


def test_a_missing_number_is_a_gap_and_makes_the_stream_partial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(PLAIN, tmp_path / "holed")
    (tmp_path / "holed" / "00003.msgpack").unlink()
    result = replay(capsys, tmp_path / "holed")
    assert result["gaps"] == 1
    # The clear at message 17 ends the doubt; before it the stream is partial.
    assert result["partial"] is False
    for path in sorted((tmp_path / "holed").glob("*.msgpack"))[16:]:
        path.unlink()
    result = replay(capsys, tmp_path / "holed")
    assert (result["gaps"], result["partial"], result["orphans"]) == (1, True, 2)


def test_a_first_number_above_0_is_a_truncated_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {7: [stored([1], None, list(range(16)), 16)]})
    result = replay(capsys, tmp_path)
    assert (result["gaps"], result["partial"], result["canonical_blocks"]) == (1, True, 1)


def test_a_damaged_payload_is_counted_and_a_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = list(range(32))
    write(tmp_path, {0: [stored([1], None, tokens[:16], 16)], 2: [stored([2], 1, tokens[16:], 16)]})
    (tmp_path / "00001.msgpack").write_bytes(b"\xc1 not msgpack")
    result = replay(capsys, tmp_path)
    assert (result["messages"], result["undecodable"], result["gaps"], result["partial"]) == (3, 1, 1, True)
    assert result["canonical_blocks"] == 2


def test_without_json_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(PLAIN)]) == 0
    out = capsys.readouterr().out
    assert "canonical_blocks  12" in out
    assert out.splitlines()[-1].split() == [".", "0", "gpu", "0", "6", "12"]


def test_the_report_can_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(PLAIN), "--json", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "report.json").read_text())["messages"] == 19


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/nowhere/at/all"], "no such file or folder"),
        ([str(DATA.parent.parent), "--engine", "nobody"], "no adapter for engine 'nobody'; installed: "),
        ([str(PLAIN), "--block-size", "0"], "block_size"),
        ([str(PLAIN), "--block-size", "many"], "invalid int value"),
        ([str(PLAIN), "--json", "/nowhere/at/all.json"], "cannot write"),
        ([], "required"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def framed(messages: dict[int, bytes]) -> bytes:
    rows = [(b"kv", struct.pack(">Q", seq), data) for seq, data in messages.items()]
    return b"".join(struct.pack(">I", 3) + b"".join(struct.pack(">I", len(f)) + f for f in row) for row in rows)


def test_a_file_of_messages_is_a_stream_with_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = list(range(48))
    payloads = [[stored([i], i - 1 if i else None, tokens[16 * i : 16 * i + 16], 16)] for i in range(3)]
    encoded = [msgspec.msgpack.encode([float(i), events, 0]) for i, events in enumerate(payloads)]
    (tmp_path / "whole.frames").write_bytes(framed(dict(enumerate(encoded))))
    (tmp_path / "holed.bin").write_bytes(framed({0: encoded[0], 2: encoded[2]}))
    (tmp_path / "foreign.bin").write_bytes(b"not a recording")
    (tmp_path / "rows.msgpack").write_bytes(b"".join(struct.pack(">I", len(data)) + data for data in encoded))
    whole, holed, rows = (replay(capsys, tmp_path / name) for name in ("whole.frames", "holed.bin", "rows.msgpack"))
    assert (whole["messages"], whole["canonical_blocks"], whole["gaps"]) == (3, 3, 0)
    assert (rows["messages"], rows["canonical_blocks"], rows["gaps"]) == (3, 3, 0)
    assert (holed["messages"], holed["canonical_blocks"], holed["gaps"], holed["orphans"]) == (2, 1, 1, 1)
    assert replay(capsys, tmp_path)["messages"] == 8


def test_what_is_named_as_messages_and_is_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = framed({0: b"x"})
    for data in (b"", b"not a recording", good[:-1], good + b"\0", b"\xff" * 40):
        (tmp_path / "bad.frames").write_bytes(data)
        assert main(["replay", str(tmp_path / "bad.frames")]) == 2
        assert "not a recording of messages" in capsys.readouterr().err


def test_a_folder_without_payloads_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "no .msgpack payload" in capsys.readouterr().err
