"""FLEET.toml and ``prefixroute plan place``: the example, the JSON, and refusals that name the line and the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixroute import UsageError, cli
from prefixroute.plan import adaptive, certify, read_fleet

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan" / "fleet.toml"


def changed(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The example with texts replaced, each of which must be there."""
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_the_example_is_placed_with_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "place", str(EXAMPLE)]) == 0
    printed = capsys.readouterr().out
    assert "certificate: every block is held, and weights and caches fit every server" in printed
    assert "planned for 78 requests" in printed
    assert re.search(r"big-paris-1 +1-42", printed)


def test_json_has_the_promised_keys_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "place", str(EXAMPLE), "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(plan) >= {"servers", "ms_per_token", "lower_bound", "theorem2_bound", "gap"}
    fleet = read_fleet(EXAMPLE)
    assert [set(server) for server in plan["servers"]] == [{"name", "first_block", "blocks"}] * 20
    assert [server["name"] for server in plan["servers"]] == list(fleet.servers)
    held = {b for s in plan["servers"] for b in range(s["first_block"], s["first_block"] + s["blocks"])}
    assert held == set(range(1, 71))
    assert plan["lower_bound"] <= plan["ms_per_token"] <= plan["theorem2_bound"]
    assert plan["gap"] == pytest.approx(plan["ms_per_token"] / plan["lower_bound"] - 1, abs=1e-5)
    assert plan["covered"] and plan["fits"]
    assert sum(chain["requests"] for chain in plan["chains"]) == plan["requests"] == 78
    for chain in plan["chains"]:
        assert sum(server["blocks"] for server in chain["servers"]) == 70


def test_json_and_plots_go_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, plot = tmp_path / "plan.json", tmp_path / "spans.png"
    assert cli.main(["plan", "place", str(EXAMPLE), "--json", str(plan), "--plot", str(plot)]) == 0
    assert "ms a token on average" in capsys.readouterr().out
    assert json.loads(plan.read_text())["requests"] == 78
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_better_plan_is_looked_for_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = changed(
        tmp_path, ("requests_per_s = 1.0 ", "concurrent = 3 #"), ("count = 8", "count = 1"), ("count = 8", "count = 1")
    )
    assert cli.main(["plan", "place", str(few), "--exact", "20"]) == 0
    assert "exact (cp-sat, optimal): " in capsys.readouterr().out
    assert cli.main(["plan", "place", str(few), "--exact", "20", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["lower_bound"] <= plan["exact"]["ms_per_token"] <= plan["ms_per_token"] + 1e-3
    assert cli.main(["plan", "place", str(few), "--exact", "0"]) == 2
    assert "time_limit_s above 0" in capsys.readouterr().err


def test_a_json_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_bytes(msgspec.json.encode(msgspec.toml.decode(EXAMPLE.read_bytes())))
    ours, theirs = read_fleet(EXAMPLE), read_fleet(path)
    assert ours.file == theirs.file
    assert adaptive(ours.problem) == adaptive(theirs.problem)


def test_what_the_file_says_is_what_is_planned_for() -> None:
    fleet = read_fleet(EXAMPLE)
    problem = fleet.problem
    assert problem.blocks == 70
    assert problem.session_bytes == 57344 * 148
    assert problem.requests == (52, 26)
    tokyo = fleet.servers.index("slice-tokyo-3")
    assert problem.rtt_ms[:, tokyo].tolist() == [320.0, 102.0]
    assert problem.prompt_rtt_ms[0, tokyo] == pytest.approx(220 + 67 + 0.7049 * 20)
    assert problem.prefill_ms[tokyo] == pytest.approx(206.3547 + 0.1041 * 20)
    assert problem.hop_ms is None


def test_servers_that_pass_on_have_half_a_round_trip_between(tmp_path: Path) -> None:
    fleet = read_fleet(changed(tmp_path, ('topology = "hub"', 'topology = "chain"')))
    hops = fleet.problem.hop_ms
    assert hops is not None
    paris, tokyo = fleet.servers.index("big-paris-1"), fleet.servers.index("slice-tokyo-1")
    assert hops[paris, tokyo] == hops[tokyo, paris] == (220 + 100) / 2
    plan = adaptive(fleet.problem)
    certificate = certify(fleet.problem, plan.placement)
    assert certificate.covered and certificate.fits
    assert certificate.lower_bound <= certificate.ms_per_token
    assert certificate.theorem2_bound is not None


def test_a_number_of_requests_instead_of_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(tmp_path, ("requests_per_s = 1.0 ", "concurrent = 30 #"))
    assert read_fleet(path).problem.requests == (20, 10)
    assert cli.main(["plan", "place", str(path)]) == 0
    assert "planned for 30 requests under way at once\n" in capsys.readouterr().out


def test_more_than_fits_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(tmp_path, ("requests_per_s = 1.0", "requests_per_s = 50.0"))
    assert cli.main(["plan", "place", str(path)]) == 0
    assert "requests will queue" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "at", "said"),
    [
        ("blocks = 70", "blocks = 0", "blocks = 0", "model.blocks: must be above 0"),
        ("block_gb = 1.3234", "block_gb = 40.0", "blocks = 70", "does not fit by"),
        ("block_gb = 1.3234", "block_tb = 1.3234", "block_tb", "unknown key; known are blocks, block_gb"),
        ("block_gb = 1.3234 ", "# ", "[model]", "block_gb is missing: add it"),
        ("memory_gb = 8.2", 'memory_gb = "8"', 'memory_gb = "8"', "expected `float`, got `str`"),
        ("requests_per_s = 1.0", "concurrent = 0", "[workload]", "give one of requests_per_s and concurrent"),
        ("setup_ms = 70", "setup_ms = -1", "setup_ms = -1", "workload.setup_ms: must be 0 or more"),
        ("inside_ms = 2.0", "inside_ms = nan", "inside_ms = nan", "network.inside_ms: must be 0 or more"),
        ("share = 1.0", "share = 0.0", "share = 0.0", "clients[1].share: must be above 0"),
        ("rtt_ms = 150", "rtt_ms = -150", "rtt_ms = -150", "links[3].rtt_ms: must be 0 or more"),
        ('sites = ["ohio", "sydney"]', 'sites = ["ohio", "sidney"]', '"sidney"', "no server or client is at 'sidney'"),
        ('sites = ["ohio", "sydney"]', 'sites = ["ohio", "ohio"]', '["ohio", "ohio"]', "inside_ms of [network]"),
        ('sites = ["ohio", "sydney"]', 'sites = ["tokyo", "ohio"]', '["tokyo", "ohio"]', "keep one"),
        ('name = "big-ohio"', 'name = "big-paris"', "[[servers]]", "two are called 'big-paris-1': names must differ"),
        ("count = 8", "count = 0", "count = 0", "servers[2].count: must be above 0"),
        ('topology = "hub"', 'topology = "ring"', 'topology = "ring"', "topology: invalid enum value 'ring'"),
    ],
)
def test_refusals_name_the_line_and_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, at: str, said: str
) -> None:
    path = changed(tmp_path, (old, new))
    assert cli.main(["plan", "place", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error, error
    assert error.count("\n") == 1
    found = re.search(r"fleet\.toml:(\d+):", error)
    assert found is not None, error
    if at == "[[servers]]":
        assert int(found[1]) == line_of(path, at)
    else:
        assert int(found[1]) == line_of(path, at), error


def test_a_link_that_is_missing_is_refused_by_the_sites(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    path = tmp_path / "fleet.toml"
    path.write_text(text[: text.index('[[links]]\nsites = ["tokyo", "sydney"]')])
    with pytest.raises(UsageError, match=r'between tokyo and sydney: add one with sites = \["tokyo", "sydney"\]'):
        read_fleet(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_fleet(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"title = '\xff'")
    with pytest.raises(UsageError, match="not UTF-8 at byte 9"):
        read_fleet(bad)
    bad.write_text("title = 'x'\nblocks = = 3\n")
    with pytest.raises(UsageError, match=r"bad\.toml:2: not valid TOML"):
        read_fleet(bad)
    broken = tmp_path / "bad.json"
    broken.write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        read_fleet(broken)


def test_a_plan_needs_a_subject_and_a_place_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["plan"], "required: subject"),
        (["plan", "weather"], "invalid choice: 'weather'"),
        (["plan", "place", "/nowhere/at/all"], "cannot read /nowhere/at/all"),
        (["plan", "place", str(EXAMPLE), "--json", "/dev/null/x"], "cannot write /dev/null/x"),
        (["plan", "place", str(EXAMPLE), "--plot", "/dev/null/x"], "cannot write /dev/null/x"),
    ):
        assert cli.main(arguments) == 2
        assert said in capsys.readouterr().err
