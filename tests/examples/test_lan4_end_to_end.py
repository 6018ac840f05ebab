"""The demonstration as users run it, small: processes, gossip, a kill, the report, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefixroute_lan4 import demo
from prefixroute_lan4.cluster import ClusterSettings
from prefixroute_lan4.demo_plots import write_plots
from prefixroute_lan4.demo_report import SUMMARY_KEYS, full_report, remarks, summary
from prefixroute_lan4.demo_runs import DemoResult, DemoSettings, Kill, NoProgress, run_demo, trace_of
from prefixroute_lan4.workload import WorkloadSettings
from prefixroute_launch.launcher import EmulatedLauncher, EmulatedTiming, EngineSpec
from prefixroute_launch.processes import ChildProcess, ProcessError

DEADLINE_S = 30.0


def children_of(pid: int) -> set[int]:
    """Processes whose parent is `pid`."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid:
            found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    """True while the process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def fast_engine(spec: EngineSpec) -> EmulatedLauncher:
    return EmulatedLauncher(
        spec, EmulatedTiming(prefill_tokens_per_s=20_000, overhead_s=0.001, decode_s_per_token=0.001)
    )


class Recorder(NoProgress):
    """Notes the processes that were running while requests were answered."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.pids: set[int] = set()
        self._others = children_of(os.getpid())

    def begin(self, run: str, requests: int) -> None:
        self.runs.append(run)
        self.pids |= children_of(os.getpid()) - self._others


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, Recorder]:
    """Two nodes, one of which dies in the middle of each run."""
    settings = DemoSettings(
        workload=WorkloadSettings(requests=24, nodes=2, rate=12.0, prefix_median_tokens=300),
        cluster=ClusterSettings(nodes=2, capacity_blocks=400),
        kill=Kill("node-2", 0.5),
        out=tmp_path_factory.mktemp("demo"),
    )
    recorder = Recorder()
    return asyncio.run(run_demo(settings, trace_of(settings), recorder, fast_engine)), recorder


def test_no_request_fails_when_a_node_is_killed(killed: tuple[DemoResult, Recorder]) -> None:
    result, recorder = killed
    assert recorder.runs == ["none", "routed"]
    for name, run in result.runs.items():
        assert run.figures.errors == 0, remarks(result)
        assert len(run.samples) == 24
        assert all(sample.prompt_tokens > 200 and sample.text for sample in run.samples), name
    assert result.runs["routed"].figures.mismatches == 0


def test_the_dead_node_serves_nothing_after_its_death(killed: tuple[DemoResult, Recorder]) -> None:
    result, _ = killed
    for run in result.runs.values():
        assert run.killed_at_s is not None
        late = [sample for sample in run.samples if sample.at_s > run.killed_at_s]
        assert {sample.served_by for sample in late} <= {"node-1"}
        asked_of_it = [r for r in result.trace.requests if r.at_s > run.killed_at_s and r.origin == 1]
        assert run.figures.resends >= len(asked_of_it)
        assert {sample.served_by for sample in run.samples} == {"node-1", "node-2"}


def test_unrouted_requests_stay_and_routed_ones_are_forwarded(killed: tuple[DemoResult, Recorder]) -> None:
    result, _ = killed
    assert result.runs["none"].figures.forwards == 0
    assert result.runs["routed"].figures.gossip_bytes_per_s > 0
    assert result.runs["routed"].figures.decision_us_p99 >= result.runs["routed"].figures.decision_us_p50 > 0


def test_every_process_is_gone_afterwards(killed: tuple[DemoResult, Recorder]) -> None:
    _, recorder = killed
    # two engines, of which one was started twice, and two sidecars a run
    assert len(recorder.pids) == 7
    assert not [pid for pid in recorder.pids if alive(pid)]


def test_the_report_has_its_documented_keys_and_plots(killed: tuple[DemoResult, Recorder], tmp_path: Path) -> None:
    result, _ = killed
    short = summary(result)
    assert {key: short[key] for key in ("nodes", "requests", "seed")} == {"nodes": 2, "requests": 24, "seed": 1}
    assert list(short["runs"]) == ["none", "routed"]
    assert all(tuple(figures) == SUMMARY_KEYS for figures in short["runs"].values())
    long = json.loads(json.dumps(full_report(result), default=str))
    assert len(long["runs"]["routed"]["requests"]) == 24
    for path in write_plots(result, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_result_is_shown_written_and_scored(
    killed: tuple[DemoResult, Recorder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = killed
    monkeypatch.setattr(demo, "run_to_end", lambda settings, trace, progress: result)
    out = result.settings.out
    assert demo.run(result.settings, str(out / "deep" / "short.json")) == 0
    shown = capsys.readouterr().out
    for word in ("requests", "errors", "hit rate", "TTFT p99", "hottest node", "forwards", "gossip", "decision p99"):
        assert word in shown
    assert json.loads((out / "deep" / "short.json").read_text()) == summary(result)
    assert {path.name for path in out.glob("*.png")} == {"ttft_cdf.png", "hit_rate.png", "node_share.png"}
    assert demo.run(result.settings, "-") == 0
    assert json.loads(capsys.readouterr().out) == summary(result)
    run = result.runs["routed"]
    lost = run._replace(samples=[run.samples[0]._replace(error="gone")])
    failed = result._replace(runs={**result.runs, "routed": lost._replace(figures=_with_error(result))})
    monkeypatch.setattr(demo, "run_to_end", lambda settings, trace, progress: failed)
    assert demo.run(result.settings) == 1
    assert "request 0 failed: gone" in capsys.readouterr().err


def _with_error(result: DemoResult) -> object:
    from dataclasses import replace

    return replace(result.runs["routed"].figures, errors=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "prefixroute.cli", "demo", "--nodes", "2", "--out", str(out)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (children := children_of(process.pid)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not [pid for pid in children if alive(pid)]


def test_a_process_that_dies_early_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        code = "import sys; print('the reason'); sys.exit(3)"
        child = ChildProcess.start("probe", [sys.executable, "-c", code], tmp_path / "log")

        async def never() -> bool:
            return False

        with pytest.raises(ProcessError, match=r"probe ended with code 3: the reason"):
            await child.wait_until(never, DEADLINE_S)
        await child.stop()
        child.kill()

    asyncio.run(main())


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot start /nowhere/engine"):
        ChildProcess.start("probe", ["/nowhere/engine"], tmp_path / "log")


def test_a_child_that_ignores_the_polite_signal_is_killed_with_its_own_children(tmp_path: Path) -> None:
    async def main() -> None:
        code = (
            "import signal, subprocess, sys, time\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        child = ChildProcess.start("probe", [sys.executable, "-c", code], tmp_path / "log")

        async def spoke() -> bool:
            return child.log_path.read_bytes().endswith(b"\n")

        await child.wait_until(spoke, DEADLINE_S)
        grandchild = int(child.log_path.read_text())
        assert alive(grandchild)
        await child.stop(grace_s=0.1)
        assert not child.alive
        deadline = time.monotonic() + DEADLINE_S
        while alive(grandchild):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    asyncio.run(main())
