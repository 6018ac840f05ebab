"""The commands of prefill planning: what they print, write and draw, and errors that name the line and the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prefill_case import EXAMPLE

from prefixroute import UsageError
from prefixroute.cli import main
from prefixroute.plan import read_clusters, read_trace

TEXT = EXAMPLE.read_text()


@pytest.fixture
def edited(tmp_path: Path) -> object:
    """Write the example with a line changed; return its path."""

    def write(find: str = "", put: str = "", more: str = "") -> Path:
        assert find in TEXT
        path = tmp_path / "cluster.toml"
        path.write_text(TEXT.replace(find, put, 1) + more)
        return path

    return write


def test_a_plan_as_json_has_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "prefill", str(EXAMPLE), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan) == {
        "threshold_tokens",
        "prefill_nodes",
        "decode_nodes",
        "requests_per_s",
        "egress_gbit_s",
        "bottleneck",
    }
    assert plan["threshold_tokens"] == pytest.approx(19_400, abs=500)
    assert (plan["prefill_nodes"], plan["decode_nodes"]) == (3, 5)
    assert plan["requests_per_s"] == pytest.approx(3.24, rel=0.03)
    assert plan["egress_gbit_s"] == pytest.approx(12.2, rel=0.05)
    assert plan["bottleneck"] in ("pool prefill", "local prefill")


def test_a_plan_as_a_table_and_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, written = tmp_path / "plan.png", tmp_path / "plan.json"
    assert main(["plan", "prefill", str(EXAMPLE), "--plot", str(plot), "--json", str(written)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"plan +19,\d{3} +4 +3 +5", out)
    assert re.search(r"all to the pool .*2\.501", out) and re.search(r"all local .*2\.110", out)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert json.loads(written.read_text())["decode_nodes"] == 5


def test_json_describes_clusters_as_toml_does(tmp_path: Path) -> None:
    described = {
        "workload": {"mu": 9.9, "sigma": 1.0, "min_tokens": 128},
        "model": {"kv_bytes_per_token": 17_047, "kv_state_bytes": 182_766_797},
        "pool": {"nodes": 4, "prefill_s": [[1024, 0.44], [131072, 7.4]]},
        "local": {"nodes": 8, "times_pool": 2.3},
        "link": {"gbit_per_s": 100, "connections": 4, "connection_gbit_per_s": 2},
    }
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(described))
    file, clusters = read_clusters(path)
    assert clusters.local_prefill_s(1024) == pytest.approx(2.3 * 0.44)
    assert clusters.kv_bytes(1_000) == 182_766_797 + 17_047_000
    assert file.transfer_bytes_per_s == 1e9
    assert file.alone_nodes == 8


def test_lengths_come_from_a_file_beside_it(edited: object, tmp_path: Path) -> None:
    assert callable(edited)
    (tmp_path / "lengths.csv").write_text("input_length,output_length\n100,1\n300,1\n")
    _, clusters = read_clusters(edited("mu = 9.90 ", 'file = "lengths.csv"\nmu = 9.90 '))
    assert (clusters.lengths.mean, clusters.lengths.longest) == (200, 300)


@pytest.mark.parametrize(
    ("find", "put", "at", "says"),
    [
        ("nodes = 4 ", 'nodes = "four" ', "nodes =", r"pool\.nodes: expected `int`, got `str`"),
        ("nodes = 8 ", "knots = 8 ", "knots =", r"local\.knots: unknown key; known are nodes, prefill_s"),
        ("nodes = 4 ", "# ", "[pool]", r"pool: the key nodes is missing: add it"),
        ("[link]", "[links]", "[links]", r"links: unknown key; known are workload, model, pool, local, link"),
        ("layers = 61", "layers = 0", "layers =", r"model\.layers: must be 1 or more"),
        ("sigma = 1.00", "sigma = -1.0", "sigma =", r"workload\.sigma: a log-normal length needs sigma > 0"),
        ("sigma = 1.00", "", "[workload]", r"give mu and sigma, or file"),
        ("[8192, 0.72]", "[512, 0.72]", "prefill_s =", r"pool\.prefill_s: a table's tokens must rise"),
        ("[8192, 308.9]", "[8192, -308.9]", "kv_mib =", r"model\.kv_mib: a table needs costs of 0 or more"),
        ("[8192, 0.72]", "[8192]", "prefill_s =", r"pool\.prefill_s\[1\]: expected `array` of length 2"),
        ("kv_mib =", "# kv_mib =", "[model]", r"no size of KV: give kv_mib = "),
        ("prefill_coefficients =", "# no", "[local]", r"no time of prefill: give prefill_s = .*times_pool = 2\.3"),
        ("gbit_per_s = 100", "gbit_per_s = 0", "gbit_per_s =", r"link\.gbit_per_s: must be above 0"),
        ("decode_slots = 32", "decode_slots = 0", "decode_slots =", r"slots >= 1"),
        ('average = "length"', 'average = "mode"', "average =", r"average: invalid enum value 'mode'"),
        ("nodes = 8 ", "nodes = 8 9 ", "nodes = 8 9", r"not valid TOML"),
        ("mu = 9.90 ", 'file = "none.csv"\nmu = 9.90 ', "file = ", r"workload\.file: cannot read .*none\.csv"),
    ],
)
def test_an_error_names_the_line_and_the_fix(edited: object, find: str, put: str, at: str, says: str) -> None:
    assert callable(edited)
    path = edited(find, put)
    with pytest.raises(UsageError) as caught:
        read_clusters(path)
    message = str(caught.value)
    assert re.search(says, message), message
    line = re.search(r"cluster\.toml:(\d+)", message)
    assert line is not None, message
    section = {"nodes =": "[pool]", "prefill_s =": "[pool]"}.get(at)
    lines = path.read_text().splitlines()
    begin = lines.index(section) if section else 0
    # A comment may name the key too: what counts is where it is written.
    wanted = next(
        i for i, text in enumerate(lines[begin:], begin + 1) if text.startswith(at) or at in text.split("#")[0]
    )
    assert int(line[1]) == wanted, message


def test_a_user_s_mistake_is_one_line_and_exit_code_2(
    edited: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert callable(edited)
    path = edited("nodes = 4 ", "nodes = -4 ")
    commands = (
        ["plan", "prefill", str(path)],
        ["plan", "prefill", str(tmp_path / "none.toml")],
        ["plan", "prefill", str(EXAMPLE), "--plot", str(tmp_path / "no" / "plot.png")],
        ["plan"],
        ["simulate", "prefill", str(EXAMPLE), "--cut", "1.5"],
        ["simulate", "prefill", str(EXAMPLE), "--requests", "5"],
        ["simulate", "prefill", str(EXAMPLE), "--rate", "-1"],
        ["simulate", "prefill", str(EXAMPLE), "--trace", str(EXAMPLE)],
    )
    for command in commands:
        assert main(command) == 2, command
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, command


def test_simulating_prints_and_writes_all_set_ups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "run.png"
    command = ["simulate", "prefill", str(EXAMPLE), "--requests", "400", "--plot", str(plot)]
    assert main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["set_ups"]) == ["plan", "all to the pool", "all local"]
    assert result["set_ups"]["plan"]["nodes"] == [4, 3, 5]
    shares = [row["offloaded"] for row in result["set_ups"].values()]
    assert shares[0] == pytest.approx(0.5, abs=0.1) and shares[1:] == [1.0, 0.0]


def test_simulating_a_cut_link_compares_both_thresholds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "cut.png"
    command = ["simulate", "prefill", str(EXAMPLE), "--cut", "0.05", "--rate", "1", "--plot", str(plot), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["thresholds"]
    assert list(found) == ["fixed", "adaptive"]
    assert found["fixed"]["threshold_moves"] == 0 < found["adaptive"]["threshold_moves"]
    assert plot.exists()


TRACES = {
    "a.jsonl": '{"timestamp": 500, "input_length": 1000, "hash_ids": [1, 2]}\n'
    '{"timestamp": 2500, "input_length": 1100, "hash_ids": [1, 2, 3]}\n',
    "b.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    "c.txt": "12\n\n34\n",
    "d.jsonl": '{"input_toks": 7, "arrival_time_ns": 3000000000}\n{"input_toks": 8, "arrival_time_ns": 4500000000}\n',
}


def test_traces_of_all_kinds(tmp_path: Path) -> None:
    found = {}
    for name, text in TRACES.items():
        (tmp_path / name).write_text(text)
        found[name] = [tuple(row) for row in read_trace(tmp_path / name)]
    assert found["a.jsonl"] == [(0.0, 1000, 0), (2.0, 1100, 1024)]
    assert found["b.csv"] == [(0.0, 374, 0), (pytest.approx(4.314579), 396, 0)]
    assert found["c.txt"] == [(None, 12, 0), (None, 34, 0)]
    assert found["d.jsonl"] == [(0.0, 7, 0), (1.5, 8, 0)]
    assert read_trace(tmp_path / "a.jsonl")[1].uncached_tokens == 76


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1\nx\n", 2),
        ('{"a": 1}\n', 1),
        ("{broken\n", 1),
        ("input_length\n-5\n", 2),
        ("TIMESTAMP,input_length\nnow,5\n", 2),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"trace:{line}: no request"):
        read_trace(path)


def test_an_empty_trace_and_one_that_is_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for data, says in ((b"", "no request in it"), (b"\xff\xfe", "not text")):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=says):
            read_trace(path)


def test_a_trace_sets_the_arrivals_of_a_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = (json.dumps({"timestamp": 500 * i, "input_length": 60_000 if i % 2 == 0 else 9_000}) for i in range(200))
    path.write_text("\n".join(rows))
    assert main(["simulate", "prefill", str(EXAMPLE), "--trace", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["set_ups"]["plan"]
    assert 9_000 <= found["threshold_tokens"] < 60_000, "planned for the trace"
    assert found["offloaded"] == 0.5
    assert main(["simulate", "prefill", str(EXAMPLE), "--trace", str(path), "--rate", "1"]) == 0
    assert "at 1.00 req/s" in capsys.readouterr().out
    (tmp_path / "lengths.txt").write_text("100\n200\n")
    assert main(["simulate", "prefill", str(EXAMPLE), "--trace", str(tmp_path / "lengths.txt")]) == 2
    assert "has no times" in capsys.readouterr().err
