"""The vLLM launcher of the example, against a stand-in for the `vllm` program: what is started, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from launching import SERVER, EndsContract, free_port, make_room, read_note, write_program
from prefixroute_launch import build_model
from prefixroute_launch.launcher import EngineSpec, launcher_for
from prefixroute_launch.processes import ProcessError
from prefixroute_launch.real_engine import ensure_model, shared_memory_of, with_ipc_events
from prefixroute_launch.vllm_launcher import VllmLauncher, VllmSettings, fitted, serve_environment

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
ENV_VARIABLE, PRESET_VARIABLE, ARGS_VARIABLE = map(VllmSettings.variable, ("ENV", "PRESET", "ARGS"))

# Stands for the environment's interpreter, whose only task is to build the model.
PYTHON = """
import json, os, sys
from pathlib import Path
if os.environ.get("STAND_IN_MODE") == "no-transformers":
    sys.exit("build_model: No module named 'transformers'")
out = Path(sys.argv[2])
(out / "config.json").write_text(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmSettings:
    """An environment with a stand-in for vLLM; its temporary files go below `tmp_path`."""
    env = make_room(tmp_path, monkeypatch)
    write_program(env / "bin" / "vllm", SERVER)
    write_program(env / "bin" / "python", PYTHON)
    return VllmSettings(env, "small")


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec(
        name="n1",
        port=free_port(),
        events_endpoint="tcp://127.0.0.1:5557",
        replay_endpoint="tcp://127.0.0.1:5558",
        topic="kv@n1@m",
        block_size=16,
        capacity_blocks=240,
        index=1,
        run_dir=tmp_path / "run",
    )


# --- what is asked of vLLM


def test_blocks_are_rounded_to_what_a_cpu_takes_and_hold_the_same_tokens(spec: EngineSpec) -> None:
    assert [
        (f.block_size, f.capacity_blocks) for f in (fitted(replace(spec, block_size=b)) for b in (1, 16, 32, 48, 64))
    ] == [(32, 7), (32, 120), (32, 240), (64, 180), (64, 240)]


@pytest.mark.parametrize("wanted", ["tcp://127.0.0.1:5557", "tcp://*:5557"])
def test_events_never_use_tcp(spec: EngineSpec, wanted: str) -> None:
    endpoint = with_ipc_events(replace(spec, events_endpoint=wanted)).events_endpoint
    assert endpoint == f"ipc://{spec.run_dir}/n1.kv.ipc"


def test_a_relative_ipc_address_becomes_absolute(spec: EngineSpec) -> None:
    endpoint = with_ipc_events(replace(spec, events_endpoint="ipc://run/kv.ipc")).events_endpoint
    assert endpoint == f"ipc://{Path.cwd()}/run/kv.ipc"


def test_a_run_folder_too_deep_for_a_socket_is_refused(spec: EngineSpec, settings: VllmSettings) -> None:
    with pytest.raises(ValueError, match="shorter run folder"):
        VllmLauncher(replace(spec, run_dir=spec.run_dir / ("x" * 100)), settings)


def test_engines_share_the_cores_in_turn(spec: EngineSpec, settings: VllmSettings) -> None:
    cores = sorted(os.sched_getaffinity(0))
    bound = [
        serve_environment(replace(spec, index=i), settings, spec.run_dir)["VLLM_CPU_OMP_THREADS_BIND"]
        for i in range(2 * len(cores))
    ]
    assert bound == [str(core) for core in cores] * 2


def test_start_passes_one_engine_as_specified(spec: EngineSpec, settings: VllmSettings, tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = VllmLauncher(spec, replace(settings, extra_args=("--max-num-queued-reqs", "4")))
        engine = await launcher.start()
        try:
            await launcher.wait_ready()
            note = read_note(tmp_path, "started")
            argv, environ = note["argv"], note["environ"]
            assert isinstance(argv, list)
            assert isinstance(environ, dict)
            assert argv[:2] == ["serve", str(settings.model_dir)]
            value = dict(itertools.pairwise(argv))
            assert value["--port"] == str(spec.port)
            assert value["--host"] == "127.0.0.1"
            assert value["--served-model-name"] == engine.model
            assert (value["--block-size"], value["--num-gpu-blocks-override"]) == ("32", "121")
            assert value["--max-model-len"] == "3840"  # 120 blocks; the model could do 4096
            assert value["--max-num-queued-reqs"] == "4"
            assert json.loads(value["--kv-events-config"]) == {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": engine.events_endpoint,
                "replay_endpoint": engine.replay_endpoint,
                "topic": "kv@n1@m",
            }
            assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enforce-eager"} <= set(argv)
            assert environ["VLLM_HOST_IP"] == "127.0.0.1"
            assert environ["PYTHONPATH"] == ""
            assert environ["PATH"].startswith(f"{settings.env}/bin{os.pathsep}")
            assert engine.url == f"http://127.0.0.1:{spec.port}"
            assert (engine.pid, engine.block_size) == (note["pid"], 32)
            assert engine.prefill_tokens_per_s > 0
        finally:
            launcher.kill()

    asyncio.run(scenario())


def test_warm_up_is_shorter_than_a_block(spec: EngineSpec, settings: VllmSettings, tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = VllmLauncher(spec, settings)
        engine = await launcher.start()
        try:
            await launcher.wait_ready()
        finally:
            launcher.kill()
        asked = read_note(tmp_path, "asked")
        assert isinstance(asked, list)
        assert [a["model"] for a in asked] == [engine.model]
        assert len(asked[0]["prompt"]) + asked[0]["max_tokens"] < 32

    asyncio.run(scenario())


# --- how it ends


class TestVllmEnds(EndsContract):
    def make(self, spec: EngineSpec, settings: VllmSettings) -> VllmLauncher:
        return VllmLauncher(spec, settings)


def test_shared_memory_is_found_by_process_group() -> None:
    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert Path("/dev/shm", segment.name) in shared_memory_of(os.getpgid(0), VllmLauncher.shared_memory)
        assert shared_memory_of(2**22 + 1, VllmLauncher.shared_memory) == set()
    finally:
        segment.close()
        segment.unlink()


# --- what goes wrong, in words


def test_a_missing_environment_says_how_to_make_one(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"setup_vllm\.sh DIR") as caught:
        launcher_for("vllm")(spec)
    assert ENV_VARIABLE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_environment_without_vllm_is_named(
    spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match=r"setup_vllm\.sh DIR") as caught:
        launcher_for("vllm")(spec)
    assert str(tmp_path) in str(caught.value)


def test_variables_choose_model_and_arguments(tmp_path: Path) -> None:
    given = {ENV_VARIABLE: f"{tmp_path}/a/../b", PRESET_VARIABLE: "tiny", ARGS_VARIABLE: "--seed 3 --x 'a b'"}
    assert VllmSettings.from_environment(given) == VllmSettings(tmp_path / "b", "tiny", ("--seed", "3", "--x", "a b"))
    with pytest.raises(ValueError, match="small, tiny, not huge"):
        VllmSettings.from_environment({**given, PRESET_VARIABLE: "huge"})


def test_an_engine_that_dies_is_reported_with_its_last_words(
    spec: EngineSpec, settings: VllmSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_MODE", "dies")

    async def scenario() -> None:
        launcher = VllmLauncher(spec, settings)
        await launcher.start()
        try:
            with pytest.raises(ProcessError, match="this machine has no CPU engine"):
                await launcher.wait_ready()
        finally:
            await launcher.stop()

    asyncio.run(scenario())


def test_an_engine_that_is_up_but_fails_is_reported(
    spec: EngineSpec, settings: VllmSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_MODE", "broken")

    async def scenario() -> None:
        launcher = VllmLauncher(spec, settings)
        await launcher.start()
        try:
            with pytest.raises(ProcessError, match="n1 is up but does not answer"):
                await launcher.wait_ready()
        finally:
            launcher.kill()

    asyncio.run(scenario())


# --- the model


def test_the_model_is_built_once_even_when_launchers_race(settings: VllmSettings) -> None:
    async def scenario() -> list[Path]:
        return await asyncio.gather(*(ensure_model(settings) for _ in range(3)))

    assert asyncio.run(scenario()) == [settings.model_dir] * 3
    config = settings.model_dir / "config.json"
    assert json.loads(config.read_text())[2:] == ["--preset", "small"]
    assert [path.name for path in settings.model_dir.parent.iterdir()] == ["small"]
    (settings.env / "bin" / "python").unlink()
    assert asyncio.run(ensure_model(settings)) == settings.model_dir


def test_a_builder_that_fails_is_quoted(settings: VllmSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_MODE", "no-transformers")
    with pytest.raises(ProcessError, match="No module named 'transformers'"):
        asyncio.run(ensure_model(settings))
    assert list(settings.model_dir.parent.iterdir()) == []


def test_presets_give_consistent_configs() -> None:
    small = build_model.config(build_model.PRESETS["small"])
    assert (small["head_dim"], small["num_key_value_heads"], small["max_position_embeddings"]) == (64, 4, 4096)
    with pytest.raises(ValueError, match="multiple of heads"):
        build_model.config(build_model.ModelShape(100, 1, 3, 1, 64, 128))


def test_six_numbers_or_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_model.parse(["d", "64", "1", "4", "2", "96", "512"])[1] == build_model.ModelShape(64, 1, 4, 2, 96, 512)
    assert build_model.parse(["d", "--preset", "tiny"])[1] == build_model.PRESETS["tiny"]
    for wrong in (["d"], ["d", "64", "1"], ["d", "64", "1", "4", "2", "96", "512", "--preset", "tiny"]):
        with pytest.raises(SystemExit):
            build_model.parse(wrong)
    assert "hidden layers heads kv_heads intermediate max_len" in capsys.readouterr().err


def test_setup_refuses_to_guess_and_leaves_a_ready_environment_alone(tmp_path: Path) -> None:
    script = LAUNCH / "setup_vllm.sh"
    without = subprocess.run([script], capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "usage" in without.stderr
    version = script.read_text().partition(" version=")[2].split()[0]
    (tmp_path / f".vllm-{version}-ready").touch()
    write_program(tmp_path / "v", "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "v").rename(tmp_path / "bin" / "vllm")
    ready = subprocess.run([script, tmp_path], capture_output=True, text=True, check=False)
    assert (ready.returncode, ready.stderr) == (0, "")
    assert "already" in ready.stdout
