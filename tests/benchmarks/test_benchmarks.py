"""The benchmarks run and write what they promise; their figures are no test's business, but they are plausible."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from workbench import engine_traces

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark; return the JSON that it writes to standard output."""
    command = [sys.executable, str(BENCHMARKS / name), *arguments, "--json", "-"]
    written: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return written


def figures(name: str, *arguments: str) -> dict[str, float]:
    """Run a benchmark of replication; return its figures by name, each row checked for its form."""
    written = run(name, *arguments)
    assert set(written) == {"rows", "machine"} and written["machine"]["python"]
    for row in written["rows"]:
        assert set(row) == {"what", "value", "unit", "bar", "least", "met"}
        assert row["met"] is (row["bar"] is None or row["value"] <= row["bar"])
    values = {row["what"]: row["value"] for row in written["rows"]}
    assert len(values) == len(written["rows"])
    return values


def the(values: dict[str, float], *parts: str) -> float:
    """The one figure whose name has all these parts."""
    (value,) = [value for what, value in values.items() if all(part in what for part in parts)]
    return value


def test_route_writes_a_row_for_each_case_and_form() -> None:
    rows = run("route.py", "--endpoints", "3", "--blocks", "40", "--repeat", "1")["rows"]
    assert [(row["case"], row["form"]) for row in rows] == [
        (case, form) for case in ("hit", "half", "miss") for form in ("list", "buffer", "chain")
    ]
    assert all(row["endpoints"] == 3 and row["blocks"] == 40 and row["route_us"] > 0 for row in rows)


def test_ingest_times_of_both_engines_and_memory() -> None:
    sizes = ["--pages", "1,16", "--cached", "2", "--steps", "2", "--long", "32", "--repeat", "1"]
    values = figures("ingest.py", *sizes)
    for engine in ("vllm", "sglang"):
        for page in (1, 16):
            title = f"{engine}, pages of {page}:"
            for what in ("store", "removal"):
                name = f"{title} {what},"
                whole = the(values, name, ", all")
                assert abs(the(values, name, "decoding") + the(values, name, "applying") - whole) < 0.001 * whole
                assert the(values, name, "over the floor") > 0
            both = the(values, title, "store, all") + the(values, title, "removal, all")
            assert abs(the(values, title, "a block in and out") - both) < 0.001 * both
            assert abs(2 * the(values, title, "together") - both) < 0.001 * both
    assert sum("prompt of 32 pages of one token" in what for what in values) == 12
    # 32 bytes of an int, 8 in a list, 4 of a token; a canonical block has its tokens, its key and two entries.
    assert 60 < the(values, "memory, pages of 1: per engine block") < 300
    assert 150 < the(values, "memory, pages of 16: per engine block") < 900


def test_digest_sizes_and_times() -> None:
    values = figures(
        "digest.py", "--only", "snapshot,delta,times", "--keys", "4000", "--changed", "50", "--repeat", "2"
    )
    # 48 bits less log2(n), and 1.44 at least: no code of a random set is shorter.
    assert (48 - 12 + 1.44) / 8 < the(values, "snapshot", "streams") < the(values, "snapshot", "1,200 B") < 6
    assert (40 - 12 + 1.44) / 8 < the(values, "40-bit") < the(values, "snapshot", "streams")
    assert the(values, "removals on 4,000: removals") < the(values, "removals on 4,000: adds")
    both = the(values, "removals on 4,000: removals") + the(values, "removals on 4,000: adds")
    assert 50 * both < the(values, "the whole update") < 50 * both + 100
    assert all(value > 0 for what, value in values.items() if "of 2" in what)


def test_digest_anchors_of_chat_and_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"hash_ids": [0, *range(10 * i + 1, 10 * i + 8), *([10 * i + 8] if i % 2 else [])]} for i in range(60)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ["--requests", "500", "--queries", "200", "--trace", str(trace), "--trace-requests", "50"]
    values = figures("digest.py", "--only", "chat,trace", *sizes)
    assert the(values, "trace", "requests") == 50
    # One block of ids is shared, seven are each request's own, and every other has one more.
    assert the(values, "trace", "cached blocks") == 32 * (1 + 50 * 7 + 25)
    for workload in ("chat", "trace"):
        assert the(values, workload, "stride") == 2
        assert 50 <= the(values, workload, "share") < 70
        assert the(values, workload, "over-estimate, continued") == the(values, workload, "over-estimate, fork") == 0
        assert the(values, workload, "under-estimate, continued", "mean") == 0
        assert 0 < the(values, workload, "under-estimate, fork", "mean") < 1
        assert the(values, workload, "under-estimate, fork", "p99") == 1


def test_gossip_idle_processes() -> None:
    sizes = ["--idle-nodes", "2", "--idle-blocks", "20", "--settle", "0.1", "--measure", "0.5"]
    values = figures("gossip.py", "--only", "idle", *sizes)
    datagrams = the(values, "datagrams sent")
    assert datagrams > 0
    headers = the(values, "with UDP and IP") - the(values, "payload")
    assert abs(headers - 28 * datagrams) < 0.01 * headers
    assert the(values, "payload") > 50 * datagrams
    assert 0 < the(values, "CPU", "mean") <= the(values, "CPU", "most")


def test_gossip_busy_fleets() -> None:
    nodes = ["--nodes", "4", "--datagram-nodes", "3", "--base", "500", "--rate", "100"]
    times = ["--warm", "1", "--seconds", "2", "--datagram-seconds", "2"]
    values = figures("gossip.py", "--only", "busy", *nodes, *times)
    for name in ("4 nodes, streams, 0%", "4 nodes, streams, 30%", "3 nodes, 1,200 B, 0%", "3 nodes, 1,200 B, 30%"):
        spread = [the(values, name, f": staleness, {part}") for part in ("p50", "p99", "most")]
        assert 0 <= spread[0] <= spread[1] <= spread[2] < 5
        assert 0 < the(values, name, "staleness, mean") < spread[2]
        assert 0 <= the(values, name, "of the last quarter") <= spread[2]
        assert 1 < the(values, name, "over the ideal") < 10
        parts = [the(values, name, f"of it {kind}") for kind in ("vectors", "deltas", "snapshots")]
        assert parts[0] > 0 and parts[1] > 0
        assert abs(sum(parts) - the(values, name, "sent per node", "busy", ": sent")) < 0.01
        assert 0 < the(values, name, "until all have its new set") < 50
        assert 0 < the(values, name, "until it has all sets again") < 50
    assert the(values, "streams, 30%", "over the ideal") > the(values, "streams, 0%", "over the ideal")


def test_gossip_joiners_and_memory() -> None:
    sizes = ["--keys", "12000", "--holders", "2", "--joiners", "2", "--changes", "20000"]
    values = figures("gossip.py", "--only", "joiner,memory", *sizes)
    joins = {what.rpartition(":")[0] for what in values if what.startswith("joiner")}
    assert len(joins) == 6
    for name in joins:
        assert 0 < the(values, f"{name}: whole, median") <= the(values, f"{name}: whole, most") < 50
        assert the(values, f"{name}: bytes") > 1
    for published, keys in (("every block", 12000), ("default anchors", 6360)):
        # 8 bytes in the set, 32 of an int, 16 at least in a dict.
        assert 56 < the(values, "memory", published, f"idle, per key of {keys}") < 250
        assert (
            the(values, "memory", published, "after all of them") > 0
            and the(values, "memory", published, "growth") > -50
        )


# --- real engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trace", "requests", "topics"), [("W1", 48, 6), ("W2", 96, 12), ("W3", 40, 8)])
def test_traces_of_engines_are_what_they_say(trace: str, requests: int, topics: int) -> None:
    asks = engine_traces.TRACES[trace](1)
    assert asks == engine_traces.TRACES[trace](1) != engine_traces.TRACES[trace](2)
    assert len(asks) == requests and {ask.topic for ask in asks} <= set(range(topics))
    assert all(later.at >= ask.at for ask, later in pairwise(asks))
    if trace == "W1":
        assert {len(ask.prompt) for ask in asks} == {1024 + 32}
        assert len({ask.prompt[:1024] for ask in asks}) == 6
    elif trace == "W2":
        assert 600 + 48 <= min(len(ask.prompt) for ask in asks) <= max(len(ask.prompt) for ask in asks) <= 1000 + 80
        assert Counter(ask.topic for ask in asks).most_common(1)[0][0] < 3
    else:
        for topic in range(topics):
            turns = [ask.prompt for ask in asks if ask.topic == topic]
            assert [len(turn) for turn in turns] == [119 + 154 * i for i in range(5)]
            assert all(later[: len(turn)] == turn for turn, later in pairwise(turns))


def test_engines_compares_contenders_on_the_same_requests() -> None:
    written = run("engines.py", "--engines", "emulated,emulated", "--traces", "W1", "--repetitions", "1")
    rows = {row["contender"]: row for row in written["rows"]}
    assert set(rows) == {"alone", "sticky", "routed"}
    assert all(row["errors"] == 0 and sum(row["splits"][0]) == 48 for row in rows.values())
    assert rows["alone"]["cached_share"] < rows["sticky"]["cached_share"]
    assert rows["sticky"]["cold"] == [6] and rows["sticky"]["forwards"] == [0]
    # One cold prefill a prefix, and one more where two nodes got it at once.
    assert 6 <= rows["routed"]["cold"][0] <= 9 and rows["routed"]["forwards"][0] > 0


def test_upkeep_times_each_kind_of_change_and_the_longest_call() -> None:
    values = figures("upkeep.py", "--keys", "3000", "--repeat", "1", "--path", "200")
    for frame in ("streams", "1,200 B"):
        for what in ("added", "snapshot, 10 % differ", "snapshot, all differ", "another life", "forgotten"):
            both = [value for name, value in values.items() if frame in name and what in name and "best" in name]
            # Microseconds a key; the longest call; but for what nobody sends, the sender's.
            assert len(both) == (2 if what == "forgotten" else 3) and min(both) > 0
    assert 0 < the(values, "index, 4 endpoints", "add", "best") < 100
    assert the(values, "batches of 64, every block: publish, longest", "best") > 0


def test_scale_fits_growth_over_cells() -> None:
    values = figures("scale.py", "--endpoints", "4,8", "--blocks", "5000,20000", "--depths", "1")
    assert the(values, "4 endpoints, 5,000 blocks", "memory per key") > 20
    for n in (4, 8):
        assert 4 < the(values, f"{n} endpoints, 5,000 blocks", "snapshot") / 5 < 6
        # Every other block of 20,000 would be too much: a quarter, and the ends.
        assert 40 < the(values, f"{n} endpoints, 20,000 blocks, 3 depths", "snapshot") < 50
    assert the(values, "growth of gossip to a joiner with endpoints", "5,000") == pytest.approx(1.22, abs=0.1)
    assert abs(the(values, "growth of memory with distinct depths")) < 1
