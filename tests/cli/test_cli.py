"""The command line: one clear line and exit code 2 for whatever a user gets wrong, before anything starts."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from prefixroute_lan4 import command, demo
from prefixroute_lan4.cluster import ClusterSettings
from prefixroute_lan4.demo_runs import DemoSettings, Kill
from prefixroute_lan4.workload import WorkloadSettings
from prefixroute_launch.launcher import LAUNCHERS
from prefixroute_serving.sidecar_config import POLICIES

from prefixroute import __version__, cli


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The single line of a refused command."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("prefixroute")
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--nodes", "four"], "argument --nodes: invalid int value: 'four'"),
        (["demo", "--nodes", "0"], "nodes must be at least 1"),
        (["demo", "--requests", "0"], "requests must be at least 1"),
        (["demo", "--rate", "-1"], "rate must be a positive number"),
        (["demo", "--rate", "nan"], "rate must be a positive number"),
        (["demo", "--zipf", "-0.1"], "exponent must be 0 or more"),
        (["demo", "--capacity-blocks", "10"], "capacity"),
        (["demo", "--engine", "steam"], "invalid choice: 'steam'"),
        (["demo", "--policy", "worst"], "invalid choice: 'worst'"),
        (["demo", "--kill", "node-2"], "NODE@FRACTION"),
        (["demo", "--kill", "node-2@1.5"], "NODE@FRACTION"),
        (["demo", "--kill", "node-2@.5.5"], "NODE@FRACTION"),
        (["demo", "--kill", "node-9@0.5"], "no node 'node-9'"),
        (["demo", "--kill", "node-1@0.5", "--nodes", "1"], "at least two nodes"),
        (["demo", "--mmlu", "/nowhere/at/all"], "holds no dev/*_dev.csv"),
        (["demo", "--out", "/dev/null/x"], "cannot write to /dev/null/x"),
        (["demo", "--json", "/dev/null/x/all.json"], "cannot write to /dev/null/x"),
        (["demo", "--frequency", "3"], "unrecognized arguments: --frequency"),
        (["simulate"], "required: subject"),
        (["simulate", "weather"], "invalid choice: 'weather'"),
        (["simulate", "replication", "--schedules", "0"], "schedules >= 1"),
        (["simulate", "replication", "--workers", "0"], "workers >= 1"),
        (["simulate", "replication", "--replay", "/nowhere/at/all"], "cannot read /nowhere/at/all"),
        (["simulate", "replication", "--json", "/dev/null/x"], "cannot write /dev/null/x"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, *arguments)


def test_vllm_without_an_environment_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFIXROUTE_VLLM_ENV", raising=False)
    assert "PREFIXROUTE_VLLM_ENV" in refused(capsys, "demo", "--engine", "vllm")


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefixroute_lan4.demo", None)
    assert "pip install 'prefixroute[demo]'" in refused(capsys, "demo")


def test_help_and_version_need_no_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('rich', 'httpx', 'starlette', 'uvicorn', 'matplotlib', 'zmq'):\n"
        "    sys.modules[name] = None\n"
        "from prefixroute.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for arguments in (["--help"], ["demo", "--help"], ["simulate", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "prefixroute" in done.stdout
    assert __version__ in done.stdout


# --- commands that installed packages bring ------------------------------------------------------------------


def misdeclared(parser: argparse.ArgumentParser) -> None:
    raise ValueError("no 100% good option")


NOT_A_COMMAND = "a string"
ANOTHER_NAME = cli.Command("something_else", "help", misdeclared, lambda options: 0)
MISDECLARED = cli.Command("fly", "help", misdeclared, lambda options: 0)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nowhere.at.all:FLY", "ModuleNotFoundError: No module named 'nowhere'"),
        (f"{__name__}:MISSING", "AttributeError"),
        (f"{__name__}:NOT_A_COMMAND", "is no prefixroute.cli.Command named 'fly'"),
        (f"{__name__}:ANOTHER_NAME", "is no prefixroute.cli.Command named 'fly'"),
        (f"{__name__}:MISDECLARED", "ValueError: no 100% good option"),
    ],
)
def test_a_command_that_cannot_be_had_says_why_and_breaks_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str, why: str
) -> None:
    found = [EntryPoint("fly", value, cli.GROUP), EntryPoint("replay", "nowhere.at.all:REPLAY", cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: found)
    for arguments in ([], ["--nodes", "3"], ["there", "--high", "-x", "--", "--json"], ["--help"]):
        said = refused(capsys, "fly", *arguments)
        assert said.startswith("prefixroute fly: ")
        assert why in said
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "fly not available: " in shown
    assert "replay apply a recorded engine event stream" in shown


def test_the_core_has_its_commands_without_any_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    assert cli.commands() == cli.COMMANDS


# --- the demo's options --------------------------------------------------------------------------------------


def parsed(*arguments: str) -> DemoSettings:
    options = cli.build_parser().parse_args(["demo", *arguments])
    return demo.settings_of(command.with_defaults(options))


def test_without_options_the_demo_is_what_its_settings_default_to() -> None:
    assert parsed() == DemoSettings()


def test_every_option_reaches_its_setting(tmp_path: Path) -> None:
    options = (
        "--nodes 3 --requests 50 --rate 2.5 --seed 9 --zipf 0.7 --capacity-blocks 300 --engine vllm "
        f"--policy longest --mmlu {tmp_path} --kill node-3@0.25 --out {tmp_path / 'out'}"
    )
    assert parsed(*options.split()) == DemoSettings(
        workload=WorkloadSettings(requests=50, nodes=3, rate=2.5, seed=9, zipf=0.7),
        cluster=ClusterSettings(nodes=3, capacity_blocks=300),
        policy="longest",
        engine="vllm",
        mmlu=tmp_path,
        kill=Kill("node-3", 0.25),
        out=tmp_path / "out",
    )


def test_real_engines_get_a_load_that_they_can_carry() -> None:
    slow, fast = parsed("--engine", "vllm").workload, parsed().workload
    assert slow.rate < fast.rate
    assert slow.requests < fast.requests


def test_the_words_of_the_options_are_those_of_the_example() -> None:
    assert command.DEMO_POLICIES == POLICIES
    assert set(command.ENGINE_DEFAULTS) == set(LAUNCHERS)


def test_a_reader_that_goes_away_is_no_error() -> None:
    stream = Path(__file__).parents[1] / "data" / "vllm_events"
    command = f"{shlex.quote(sys.executable)} -m prefixroute.cli replay {shlex.quote(str(stream))} | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "m", "")
