"""Fleets of several kinds of engine: the demo's options, and what each node is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefixroute_lan4 import cluster, command, demo
from prefixroute_lan4 import demo_report as report
from prefixroute_lan4.cluster import Cluster, ClusterSettings
from prefixroute_lan4.demo_runs import DemoSettings
from prefixroute_lan4.workload import WorkloadSettings
from prefixroute_launch.launcher import EmulatedLauncher, EngineSpec, RunningEngine
from prefixroute_launch.vllm_launcher import fitted
from prefixroute_serving.sidecar_config import load_config

from prefixroute import cli
from prefixroute.errors import UsageError

MIXED = ("vllm", "vllm", "sglang", "sglang")


def parsed(*arguments: str) -> DemoSettings:
    options = cli.build_parser().parse_args(["demo", *arguments])
    return demo.settings_of(command.with_defaults(options))


def test_a_list_of_engines_makes_as_many_nodes() -> None:
    mixed = parsed("--engines", ",".join(MIXED))
    assert mixed.kinds == mixed.engines == MIXED
    three = parsed("--engines", "sglang,vllm,vllm", "--nodes", "3")
    assert (three.kinds, three.cluster.nodes, three.workload.nodes) == (("sglang", "vllm", "vllm"), 3, 3)
    assert parsed("--engine", "sglang").kinds == ("sglang",) * 4
    assert parsed("--nodes", "2").kinds == ("emulated",) * 2


def test_a_mixed_fleet_gets_what_its_slowest_engine_can_carry() -> None:
    assert command.demo_defaults("emulated", MIXED) == command.ENGINE_DEFAULTS["sglang"]
    assert command.demo_defaults("vllm") == command.ENGINE_DEFAULTS["vllm"]
    assert parsed("--engines", "vllm,sglang").workload.rate == command.ENGINE_DEFAULTS["sglang"].rate


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engines", "vllm,steam"], "invalid choice: 'steam'"),
        (["--engines", ""], "invalid choice: ''"),
        (["--engines", "vllm,vllm", "--engine", "vllm"], "not allowed with argument"),
        (["--engines", "vllm,vllm", "--nodes", "3"], "--engines lists 2 engines, --nodes says 3"),
        (["--engines", "vllm,emulated"], "tokenizer of their own"),
        (["--engines", "vllm", "--kill", "node-1@0.5"], "at least two nodes"),
    ],
)
def test_a_fleet_that_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="4 nodes need as many engines, not 2"):
        DemoSettings(engines=("vllm", "vllm"))
    with pytest.raises(UsageError, match="must be one of"):
        DemoSettings(engines=("steam",) * 4)


def test_the_title_counts_each_kind() -> None:
    fleet: Any = type("Result", (), {})()
    fleet.settings = DemoSettings(engines=MIXED, workload=WorkloadSettings())
    fleet.trace = type("DemoTrace", (), {"subjects": 5, "duration_s": 7.0})()
    assert report.title(fleet).startswith("2 vllm, 2 sglang nodes, ")


class Dummy:
    """A launcher of no process: an engine as its kind would have it."""

    kind = "vllm"
    tokenizer = "t"
    reset_path = "/reset_prefix_cache"

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    async def start(self) -> RunningEngine:
        spec = self.spec
        return RunningEngine(
            url=f"http://127.0.0.1:{spec.port}",
            pid=0,
            model="lan4",
            events_endpoint=spec.events_endpoint,
            replay_endpoint=spec.replay_endpoint,
            block_size=spec.block_size,
            prefill_tokens_per_s=1.0,
            reset_path=self.reset_path,
            kind=self.kind,
            tokenizer=self.tokenizer,
        )

    async def wait_ready(self) -> None:
        """Nothing to wait for."""

    async def stop(self) -> None:
        """Nothing to stop."""

    def kill(self) -> None:
        """Nothing to kill."""


class DummyVllm(Dummy):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(fitted(spec))


class DummySglang(Dummy):
    kind = "sglang"
    reset_path = "/flush_cache"


class OtherTokenizer(DummySglang):
    tokenizer = "u"


def test_each_sidecar_is_told_its_engines_kind_and_all_the_same_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(cluster.ChildProcess, "start", lambda name, *_: started.append(name))

    async def acquainted(self: Cluster, site: object) -> None:
        """Nobody is there."""

    monkeypatch.setattr(Cluster, "_wait_acquainted", acquainted)

    async def main() -> list[RunningEngine]:
        launchers = [DummyVllm, DummyVllm, DummySglang, DummySglang]
        async with Cluster.open(ClusterSettings(), launchers, tmp_path) as fleet:
            await fleet.prepare("default")
            engines = [site.engine for site in fleet.sites if site.engine is not None]
            for site in fleet.sites:
                site.sidecar = None
            return engines

    engines = asyncio.run(main())
    assert [engine.block_size for engine in engines] == [32, 32, 16, 16]
    assert len(started) == 4
    configs = [load_config(tmp_path / f"node-{number}.json") for number in range(1, 5)]
    assert tuple(config.engine.kind for config in configs) == MIXED
    assert {(config.domain.model, config.domain.tokenizer, config.domain.block_size) for config in configs} == {
        ("lan4", "t", 16)
    }
    assert len({config.prefix_domain for config in configs}) == 1


def test_engines_of_different_tokenizers_are_told_before_the_sidecars_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.open(ClusterSettings(nodes=2), [DummyVllm, OtherTokenizer], tmp_path) as fleet:
            await fleet.prepare("default")

    with pytest.raises(UsageError, match="lan4 with t, lan4 with u: make both environments with the same Python"):
        asyncio.run(main())
    assert not list(tmp_path.glob("*.json"))


def test_a_fleet_takes_a_launcher_for_each_node(tmp_path: Path) -> None:
    async def main() -> None:
        async with Cluster.open(ClusterSettings(nodes=3), [Dummy, Dummy], tmp_path):
            raise AssertionError("not reached")

    with pytest.raises(UsageError, match="3 nodes need as many launchers, not 2"):
        asyncio.run(main())


class EmulatedBesideSglangsAdapter(EmulatedLauncher):
    """An emulated engine that is followed and asked as if it were SGLang: its events are maps, as there."""

    async def start(self) -> RunningEngine:
        return replace(await super().start(), kind="sglang")


def test_a_mixed_fleet_becomes_acquainted_and_serves(tmp_path: Path) -> None:
    async def main() -> None:
        launchers = [EmulatedLauncher, EmulatedBesideSglangsAdapter]
        prompt = " ".join(f"word{n}" for n in range(300))
        async with Cluster.open(ClusterSettings(nodes=2), launchers, tmp_path) as fleet, httpx.AsyncClient() as client:
            await fleet.prepare("default")
            body = {"model": fleet.model, "prompt": prompt, "max_tokens": 4}
            for address in fleet.addresses:
                reply = await client.post(f"{address.url}/v1/completions", json=body, timeout=20.0)
                assert reply.status_code == 200
            stats = [await fleet._stats(site) for site in fleet.sites]
            assert all(one["engine_events"]["0"]["decode_errors"] == {} for one in stats)
            assert all(one["engine_events"]["0"]["unknown_events"] == 0 for one in stats)

    asyncio.run(main())
