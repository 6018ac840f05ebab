"""The comparison and the guard, at sizes that say nothing: what they time is right, and what they write is whole.

No rival is needed: a stand-in answers by a plain walk.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench
import compare
import pytest
from comparison import (
    compare_report,
    compare_tables,
    compare_upkeep,
    contest,
    floors,
    ours,
    rivals,
    rivals_dynamo,
    rivals_python,
    worlds,
)
from xxhash import xxh3_64_intdigest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def floor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The C floor, built anew, or what says why it cannot be."""
    try:
        return floors.load(tmp_path_factory.mktemp("cache"))
    except floors.NoFloor as reason:
        pytest.fail(f"the floor wants a C compiler and Python's headers: {reason}")


class Walk:
    """A rival that compares prompts token by token."""

    def __init__(self, world: worlds.World) -> None:
        self._world = world

    def depth(self, case: str, i: int) -> int:
        prompt = self._world.prompts[case][i]
        return max(_common(prompt, other) for held in self._world.held.values() for other in held)

    def runs(self, what: str, case: str, form: str) -> dict[str, contest.Run]:
        if what == "decide" and form == "buffer":
            return {}
        return {"walk": contest.calls(lambda i: self.depth(case, i), range(len(self._world.prompts[case])))}

    def close(self) -> None:
        self._world = self._world._replace(held={})


class Broken(Walk):
    """A rival that does not work here."""

    def depth(self, case: str, i: int) -> int:
        raise RuntimeError("no socket left")


def _common(prompt: list[int], other: list[int]) -> int:
    n = 0
    while prompt[n : n + worlds.BLOCK] and prompt[n : n + worlds.BLOCK] == other[n : n + worlds.BLOCK]:
        n += worlds.BLOCK
    return n // worlds.BLOCK


# --- the world, and who answers ----------------------------------------------------------------------------


def test_a_world_is_what_its_depths_say_and_the_node_learns_it() -> None:
    world = worlds.world(5, 24, variants=2, others=7)
    assert set(world.held) == set(range(5)) and all(len(prompts) == 2 for prompts in world.prompts.values())
    for case, prompts in world.prompts.items():
        assert {len(prompt) for prompt in prompts} == {24 * worlds.BLOCK}
        assert [Walk(world).depth(case, i) for i in range(2)] == [world.depths[case]] * 2
    node = worlds.asker(world)
    digests = node.digests()
    for i, prompts in world.held.items():
        expected = ours.node_keys(prompts)
        assert len(expected) == 7 + {0: 6, 1: 48, 2: 6, 3: 0, 4: 6}[i]
        if i:
            assert set(digests[worlds.endpoint_name(i)].keys.tolist()) == expected
    found = {c.endpoint: c.depth for c in node.route(world.prompts["hit"][1], 1e6).candidates}
    assert found["n1/0"] == 24 and found["n0/0"] == 3


def test_floor_hashes_as_xxhash_does(floor: Any) -> None:
    rng = random.Random(7)
    for n in range(17, 2500, 13):
        data, seed = rng.randbytes(n), rng.getrandbits(64)
        assert floor.hash(data, seed) == xxh3_64_intdigest(data, seed), n


@pytest.mark.parametrize("endpoints", [3, 64, 65, 130])
@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 70])
def test_floor_answers_as_the_index_does(floor: Any, endpoints: int, blocks: int) -> None:
    rng = random.Random(f"{endpoints} {blocks}")
    prompt = worlds.tokens_of(blocks, rng)
    index = ours.MergedIndex()
    beside = floors.Floor(floor, ours.SPEC, ours.ROOT, endpoints, blocks + 50)
    numbers = {}
    for i in range(endpoints):
        held = (
            prompt[: rng.randrange(blocks + 1) * worlds.BLOCK] if i % 3 else worlds.tokens_of(1, rng)[: 16 * (i < 50)]
        )
        keys = ours.node_keys([held])
        numbers[worlds.endpoint_name(i)] = i
        index.join(worlds.endpoint_name(i))
        index.update(worlds.endpoint_name(i), keys, ())
        beside.hold(i, keys)
    for cut in {1, blocks // 2, blocks}:
        asked = prompt[: cut * worlds.BLOCK] + worlds.tokens_of(3, rng) + [5]
        for form in (asked, array("I", asked)):
            assert beside.agrees(index, ours.TokenChain(ours.SPEC, ours.ROOT, asked), form, numbers)
    other = worlds.tokens_of(blocks, rng)
    assert beside.search(other) == [] == index.search(ours.TokenChain(ours.SPEC, ours.ROOT, other))
    # It would say so if it did not agree.
    index.update(worlds.endpoint_name(0), ours.node_keys([prompt]), ())
    assert not beside.agrees(index, ours.TokenChain(ours.SPEC, ours.ROOT, prompt), prompt, numbers)


def test_floor_refuses_what_the_chain_refuses(floor: Any) -> None:
    beside = floors.Floor(floor, ours.SPEC, ours.ROOT, 1, 10)
    for tokens, error in (([-1] * 16, OverflowError), ([2**32] * 16, OverflowError), (["a"] * 16, TypeError)):
        with pytest.raises(error):
            beside.search(tokens)
    with pytest.raises(OverflowError, match="more keys"):
        beside.hold(0, range(1, 200))


def test_floor_that_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(floors.NoFloor, match="no-such-compiler"):
        floors.load(tmp_path)


def test_pure_hash_ends_in_the_chains_own_key() -> None:
    tokens = worlds.tokens_of(70, random.Random(1))
    chain = ours.TokenChain(ours.SPEC, ours.ROOT, tokens)
    for form in (tokens, array("I", tokens)):
        assert floors.pure_hash(ours.SPEC, ours.ROOT)(form) == chain.key(70)


# --- timing ------------------------------------------------------------------------------------------------


def test_rounds_that_were_disturbed_do_not_count_and_where_all_were_the_best_does() -> None:
    mixed = contest.Times((9.0, 1.0, 2.0, 3.0, 0.5), (False, True, True, True, False))
    assert (mixed.best, mixed.median) == (1.0, 2.0)
    loud = mixed._replace(quiet=(False,) * 5)
    assert (loud.best, loud.median) == (0.5, 0.5)
    double = mixed._replace(rounds=(1.0, 2.0, 6.0, 6.0, 1.0))
    assert double.over(mixed) == 2.0 and double.less(mixed) == contest.Times((1.0, 4.0, 3.0), (True,) * 3)
    assert double.over(loud) == 6.0 / 0.5 and double.less(loud).rounds == (1.5,)


def test_a_run_is_made_again_while_it_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second thread is there for the first run only, and waited before that.
    waits = iter([{"1": 0, "2": 700}, {"1": 400, "2": 800}, {"1": 400}, {"1": 400, "3": 20}])
    monkeypatch.setattr(contest, "waits", lambda: next(waits))
    tally = contest.Tally()
    times = iter([1000, 1500])
    # Half of the first run was waiting, 1.3 % of the second.
    assert tally.least_disturbed(lambda: next(times)) == contest.Taken(20 / 1500, 1500)
    assert (tally.runs, tally.disturbed) == (1, 0)
    growing = iter(range(0, 10**6, 500))
    monkeypatch.setattr(contest, "waits", lambda: {"1": next(growing)})
    assert not tally.least_disturbed(lambda: 1000, tries=3).quiet
    assert (tally.runs, tally.disturbed) == (2, 1)


def test_contestants_take_turns() -> None:
    order: list[str] = []

    def contestant(name: str) -> contest.Run:
        def run(n: int) -> int:
            order.append(name)
            return 1000 * n * (1 if name == "a" else 3)

        return run

    times = contest.contest({name: contestant(name) for name in "abc"}, 3, slice_ns=2000)
    turns = [name for i, name in enumerate(order[12:]) if i == 0 or order[12:][i - 1] != name]
    assert "".join(turns).startswith("abcbca") and times["b"].over(times["a"]) == 3.0
    assert all(len(taken.rounds) == 3 for taken in times.values())


# --- the programs ------------------------------------------------------------------------------------------


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two stand-ins among the rivals: one that works and one that does not."""
    known = {"walk": rivals.Rival("xxhash", Walk, ours.OursChurn), "broken": rivals.Rival("xxhash", Broken, None)}
    for module in (rivals, compare, compare_upkeep):
        monkeypatch.setattr(module, "RIVALS", known)
    yield


def options(*arguments: str) -> Any:
    sizes = ["--endpoints", "2,4", "--blocks", "8", "--rounds", "2", "--variants", "1", "--conversation", "640"]
    return compare.parse([*sizes, *arguments])


@pytest.mark.usefixtures("walks")
def test_every_case_has_a_row_with_whoever_can_answer_it() -> None:
    said: list[str] = []
    rows = list(compare.decisions(options(), said.append))
    by = {(row["what"], row["endpoints"]): row for row in rows}
    assert len(by) == len(rows) == 2 * (2 * 3 * 3 + 3) + 6
    for what in ("match", "decide"):
        for case in worlds.CASES:
            for form in compare_report.FORMS:
                row = by[f"{what}, {case}, {form}", 4]
                theirs = set(row["rivals_us"])
                assert theirs == set(row["ratio"]) == set(row["best_ratio"]) == set(row["rivals_best_us"])
                assert ("walk" in theirs) is not (what == "decide" and form == "buffer")
                assert {"floor", "python hash"} <= theirs or what == "decide" or form == "prepared"
                assert 0 < row["ours_best_us"] <= row["ours_us"] and all(x > 0 for x in row["ratio"].values())
    assert set(by["growth of decide, hit, list", 2]["ratio"]) == {"ours, 4 endpoints"}
    assert [text for text in said if "broken" in text and "no socket left" in text and "left out" in text]


@pytest.mark.usefixtures("walks")
def test_ingest_turns_and_memory_have_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(compare_upkeep.ingest(options("--rivals", "walk"), print))
    assert [row["what"] for row in rows] == ["ingest, store, per block", "ingest, remove, per block"]
    assert all(set(row["ratio"]) == {"walk"} for row in rows)
    hashing, packing = compare.turns(options(), print)
    assert "640" in hashing["what"] and hashing["blocks"] == (640 + 500) // 16
    assert set(hashing["ratio"]) == {"all of it anew"} and packing["ours_us"] > 0
    monkeypatch.setattr(compare_upkeep, "WEIGHED_ENDPOINTS", 3)
    monkeypatch.setattr(compare_upkeep, "WEIGHED_BLOCKS", 64)
    monkeypatch.setattr(compare_upkeep, "WEIGHED_PROMPTS", 2)
    weighed = list(compare_upkeep.memory(compare.parse(["--rivals", "", "--quick"]), print))
    values = {row["what"]: row["ours_bytes"] for row in weighed}
    # Tokens, a key and a count are in the tree; a key and a dict's entry in the index.
    assert 76 < values["memory, radix tree, per block"] < 400
    assert 32 + 16 < values["memory, index, per key"] < 200
    shared = values["memory, shared, per block"] / values["memory, shared, per (endpoint, block)"]
    assert shared == pytest.approx(3, rel=0.01)


def test_churn_of_ours_comes_and_goes() -> None:
    prompts = [worlds.tokens_of(8, random.Random(i)) for i in range(3)]
    churn = ours.OursChurn(prompts)
    residency = churn._node.residency("n0/0")
    for i in range(3):
        churn.store(i)
    assert residency.canonical_blocks == 24
    churn.remove(1)
    assert residency.canonical_blocks == 16 and residency.counts.unknown_removals == 0


def row(what: str, blocks: int = 512, ours_us: float = 10.0, endpoints: int = 64, **theirs: float) -> dict[str, Any]:
    ratio = {name.replace("_", " "): us / ours_us for name, us in theirs.items()}
    names = {name.replace("_", " "): us for name, us in theirs.items()}
    times = {"ours_us": ours_us, "ours_best_us": ours_us / 2, "rivals_us": names, "rivals_best_us": names}
    return {"what": what, "endpoints": endpoints, "blocks": blocks, **times, "ratio": ratio, "best_ratio": ratio}


def test_bars_are_met_missed_or_not_run() -> None:
    rows = [
        row("decide, hit, list", dynamo_select=80.0),
        row("decide, hit, prepared", dynamo_select=149.0),
        row("decide, miss, list", ours_us=15.0, dynamo_select=1500.0),
        row("match, hit, list", gorgo=80.0, ray=79.0, floor=10 / 3),
        row("match, hit, buffer", floor=1.0),
        row(f"{compare_report.LAYERS}, hit, prepared", ours_us=15.1),
        compare_report.bytes_row("memory, index, per key", 4, 1, 88.0, {}),
    ]
    verdicts = {bar.what: bar.verdict for bar in compare_report.bars(rows)}
    assert [what for what, verdict in verdicts.items() if verdict == "MISSED"] == [
        "decision, prepared, 512 blocks: Dynamo's select over ours",
        "match, hit, 512 blocks: ray over ours",
        "match, hit, buffer, 512 blocks: ours over the floor",
        "policy, ledger and metrics, 512 blocks",
    ]
    assert [what for what, verdict in verdicts.items() if verdict == "met"] == [
        "decision, list, 512 blocks: Dynamo's select over ours",
        "cold prompt, 512 blocks: Dynamo's select over ours",
        "cold prompt, 512 blocks: ours",
        "match, hit, 512 blocks: gorgo over ours",
        "match, hit, list, 512 blocks: ours over the floor",
        "memory, index, per key",
    ]
    assert len(verdicts) == 13
    short = [row("match, hit, list", 64, gorgo=50.0, ray=49.0)]
    assert {bar.what: bar.met for bar in compare_report.bars(short) if bar.value is not None} == {
        "match, hit, 64 blocks: gorgo over ours": True,
        "match, hit, 64 blocks: ray over ours": False,
    }


def test_tables_go_between_the_marks_of_a_document() -> None:
    rows = [row("decide, hit, list", dynamo_select=1234.0), row("match, hit, list", floor=4.0, python_hash=8.0)]
    made = compare_tables.tables(rows, compare_report.bars(rows))
    assert "| 512 | hit | 10.0 | 1,234 (123x) | - |" in made["decide"]
    assert "| 512 | hit | 10.0 | 4.00 | 2.50 | 8.00 | 1.25 | - | - | - | - | - |" in made["floor"]
    for table in made.values():
        assert len({line.count("|") for line in table.splitlines()}) == 1
    document = "a\n<!-- compare: decide -->\nold\n<!-- end -->\nb\n<!-- compare: other -->\nkept\n<!-- end -->\n"
    once = compare_report.insert(document, made)
    assert "old" not in once and "kept" in once and once.startswith("a\n") and made["decide"] in once
    assert compare_report.insert(once, made) == once


def test_document_has_a_place_for_every_table() -> None:
    document = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    for name in compare_tables.TABLES:
        assert document.count(f"<!-- compare: {name} -->") == 1, name


def test_the_comparison_runs_without_a_rival_and_its_json_is_read_again(tmp_path: Path) -> None:
    sizes = ["--endpoints", "3", "--blocks", "8", "--rounds", "1", "--variants", "1", "--rivals", ""]
    written = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "compare.py")]
    first = [*command, *sizes, "--only", "decisions", "--json", str(written)]
    printed = subprocess.run(first, capture_output=True, text=True, check=True).stdout
    assert "bars met" in printed
    result = json.loads(written.read_text())
    assert set(result) == {"rows", "bars", "machine", "answers"} and result["machine"]["rivals"] == {}
    assert {"ours", "dynamo select", "dynamo tree", "gorgo", "ray", "floor"} <= set(result["answers"])
    again = subprocess.run(
        [*command, "--read", f"{written},{written}", "--markdown"], capture_output=True, text=True, check=True
    )
    assert again.stdout.startswith("<!-- compare: bars -->") and "| 8 | hit |" in again.stdout


def test_a_rival_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"walk": rivals.Rival("xxhash", Walk, None), "away": rivals.Rival("no-such-package", Walk, None)}
    monkeypatch.setattr(rivals, "RIVALS", known)
    there, absent = rivals.installed(list(known))
    assert list(there) == ["walk"] and absent == {"away": "no-such-package is not installed"}


def test_the_guard_says_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratio = bench.Ratio("x", 1.3)
    assert bench.compared(ratio, None).endswith("new")
    assert bench.compared(ratio, 1.0).endswith("moved: slower") and bench.compared(ratio, 2.0).endswith("moved: faster")
    assert "moved" not in bench.compared(ratio, 1.2)
    baseline = tmp_path / "baseline.json"
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--endpoints", "3", "--blocks", "8", "--rounds", "1"]
    command += ["--baseline", str(baseline)]
    subprocess.run([*command, "--update"], capture_output=True, check=True)
    found = json.loads(baseline.read_text())["ratios"]
    assert len(found) >= 13 and all(value > 0 for value in found.values())
    known = json.loads(bench.BASELINE.read_text())["ratios"]
    assert {what.partition(" ")[0] for what in known} == {"64", "512", "4096"}
    baseline.write_text(json.dumps({"ratios": {what: value / 1000 for what, value in found.items()}}))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("moved: slower") == len(found)


def test_rivals_prompts_in_their_own_forms() -> None:
    tokens = [0, 1, 35, 36, 127_999]
    text = rivals_python.text(tokens)
    assert len(text) == 4 * len(tokens) and rivals_python.text(tokens[:3]) == text[:12]
    assert [int(text[i : i + 4][::-1], 36) for i in range(0, len(text), 4)] == tokens
    chain = rivals_dynamo.chained([5, 6, 7])
    assert chain[0] == 5 and rivals_dynamo.chained([5, 6]) == chain[:2] and rivals_dynamo.chained([4, 6])[1] != chain[1]
