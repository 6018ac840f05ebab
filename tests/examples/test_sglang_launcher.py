"""The SGLang launcher of the example, against a stand-in for its interpreter: what is started, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import SERVER, EndsContract, free_port, make_room, read_note, write_program
from prefixroute_launch.launcher import EngineSpec, launcher_for
from prefixroute_launch.processes import ProcessError
from prefixroute_launch.real_engine import shared_memory_of
from prefixroute_launch.sglang_launcher import (
    SglangLauncher,
    SglangSettings,
    events_config,
    serve_argv,
    serve_environment,
)

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
ENV_VARIABLE, PRESET_VARIABLE, ARGS_VARIABLE = map(SglangSettings.variable, ("ENV", "PRESET", "ARGS"))

# Stands for the environment's interpreter: runs the server, with a load table in shared memory, or builds the model.
PYTHON = """
import json, sys
from pathlib import Path
if sys.argv[1] != "-m":
    Path(sys.argv[2], "config.json").write_text(json.dumps(sys.argv[1:]))
    sys.exit()
""" + SERVER.replace(
    "asked = []",
    """
table = open(f"/dev/shm/sglang_loads_{os.getpid()}.shm", "w+b")
table.truncate(4096)
shared = mmap.mmap(table.fileno(), 4096)
asked = []
""",
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SglangSettings:
    """An environment with a stand-in for SGLang; its temporary files go below `tmp_path`."""
    env = make_room(tmp_path, monkeypatch)
    write_program(env / "bin" / "python", PYTHON)
    (env / ".sglang-0-ready").touch()
    return SglangSettings(env, "small")


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec(
        name="n1",
        port=free_port(),
        events_endpoint=f"ipc://{tmp_path}/e",
        replay_endpoint=f"ipc://{tmp_path}/r",
        topic="kv@n1",
        block_size=16,
        capacity_blocks=240,
        index=1,
        run_dir=tmp_path / "run",
    )


def argument(argv: list[str], option: str) -> str:
    """The value of an option that is given exactly once."""
    assert argv.count(option) == 1
    return argv[argv.index(option) + 1]


# --- what is asked of SGLang


def test_start_passes_one_engine_as_specified(spec: EngineSpec, settings: SglangSettings, tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = SglangLauncher(spec, replace(settings, extra_args=("--max-queued-requests", "4")))
        engine = await launcher.start()
        try:
            await launcher.wait_ready()
            note = read_note(tmp_path, "started")
        finally:
            launcher.kill()
        argv, environ = note["argv"], note["environ"]
        assert argv[:2] == ["-m", "sglang.launch_server"]
        value = dict(itertools.pairwise(argv))
        assert value["--model-path"] == str(settings.model_dir)
        assert (value["--host"], value["--port"]) == ("127.0.0.1", str(spec.port))
        assert value["--served-model-name"] == engine.model
        assert (value["--page-size"], value["--max-total-tokens"]) == ("16", "3840")
        assert value["--max-queued-requests"] == "4"
        assert json.loads(value["--kv-events-config"]) == {
            "publisher": "zmq",
            "endpoint": engine.events_endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "topic": "kv@n1",
        }
        assert {"--enable-cache-report", "--skip-server-warmup", "--sleep-on-idle"} <= set(argv)
        assert (environ["SGLANG_USE_CPU_ENGINE"], environ["CUDA_VISIBLE_DEVICES"], environ["PYTHONPATH"]) == (
            "1",
            "",
            "",
        )
        assert environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
        assert environ["PATH"].startswith(f"{settings.env}/bin{os.pathsep}")
        assert engine.url == f"http://127.0.0.1:{spec.port}"
        assert (engine.pid, engine.block_size, engine.reset_path) == (note["pid"], 16, "/flush_cache")
        assert engine.prefill_tokens_per_s > 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "bind", "pushes_load"),
    [
        ("tcp://127.0.0.1:5557", True, False),
        ("tcp://[::1]:5557", True, False),
        ("tcp://*:5557", None, True),
        ("tcp://0.0.0.0:5557", None, True),
        ("tcp://[::]:5557", None, True),
        ("ipc:///run/*", None, False),
    ],
)
def test_sglang_always_binds_and_pushes_load_where_it_can(
    spec: EngineSpec, settings: SglangSettings, endpoint: str, bind: bool | None, pushes_load: bool
) -> None:
    wanted = replace(spec, events_endpoint=endpoint)
    assert json.loads(events_config(wanted)).get("bind") is bind
    argv = serve_argv(wanted, settings, "m")
    assert ("--load-publish-endpoint" in argv) is pushes_load
    if pushes_load:
        assert argument(argv, "--load-publish-endpoint") == "auto"


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_any_page_size_holds_the_tokens_asked_for(spec: EngineSpec, settings: SglangSettings, page_size: int) -> None:
    argv = serve_argv(replace(spec, block_size=page_size, capacity_blocks=100), settings, "m")
    assert argument(argv, "--page-size") == str(page_size)
    assert argument(argv, "--max-total-tokens") == str(100 * page_size)


def test_extra_arguments_come_last_so_that_they_win(spec: EngineSpec, settings: SglangSettings) -> None:
    extra = ("--kv-events-config", "{}")
    assert tuple(serve_argv(spec, replace(settings, extra_args=extra), "m")[-2:]) == extra


def test_a_relative_ipc_address_becomes_absolute(spec: EngineSpec, settings: SglangSettings, tmp_path: Path) -> None:
    async def scenario() -> str:
        launcher = SglangLauncher(replace(spec, events_endpoint="ipc://run/e"), settings)
        engine = await launcher.start()
        launcher.kill()
        return engine.events_endpoint

    assert asyncio.run(scenario()) == f"ipc://{Path.cwd()}/run/e"


def test_an_ipc_address_too_long_for_a_socket_is_refused(spec: EngineSpec, settings: SglangSettings) -> None:
    with pytest.raises(ValueError, match="shorter run folder"):
        SglangLauncher(replace(spec, events_endpoint=f"ipc:///{'x' * 120}"), settings)


def test_engines_share_the_cores_in_turn(spec: EngineSpec, settings: SglangSettings) -> None:
    cores = sorted(os.sched_getaffinity(0))
    bound = [
        serve_environment(replace(spec, index=i), settings, spec.run_dir)["SGLANG_CPU_OMP_THREADS_BIND"]
        for i in range(2 * len(cores))
    ]
    assert bound == [str(core) for core in cores] * 2


def test_warm_up_stays_out_of_the_way_of_requests(spec: EngineSpec, settings: SglangSettings, tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = SglangLauncher(spec, settings)
        engine = await launcher.start()
        try:
            await launcher.wait_ready()
        finally:
            launcher.kill()
        (asked,) = read_note(tmp_path, "asked")
        assert asked["model"] == engine.model
        assert asked["cache_salt"]
        assert len(asked["prompt"]) + asked["max_tokens"] < spec.block_size

    asyncio.run(scenario())


# --- how it ends


class TestSglangEnds(EndsContract):
    def make(self, spec: EngineSpec, settings: SglangSettings) -> SglangLauncher:
        return SglangLauncher(spec, settings)

    def segments(self, pid: int) -> list[Path]:
        return [Path(f"/dev/shm/sglang_loads_{pid}.shm")]


def test_semaphores_are_shared_memory_of_the_group_too() -> None:
    hold = "import multiprocessing as m; s = m.get_context('spawn').Lock(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        found = shared_memory_of(process.pid, SglangLauncher.shared_memory)
        assert [path.name.startswith("sem.mp-") for path in found] == [True]
        process.stdin.write(b"\n")


# --- what goes wrong, in words


def test_a_missing_environment_says_how_to_make_one(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"setup_sglang\.sh DIR") as caught:
        launcher_for("sglang")(spec)
    assert ENV_VARIABLE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_half_made_environment_is_named(
    spec: EngineSpec, settings: SglangSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settings.env / ".sglang-0-ready").unlink()
    monkeypatch.setenv(ENV_VARIABLE, str(settings.env))
    with pytest.raises(ValueError, match=r"setup_sglang\.sh DIR") as caught:
        launcher_for("sglang")(spec)
    assert str(settings.env) in str(caught.value)


def test_variables_choose_model_and_arguments(tmp_path: Path) -> None:
    given = {ENV_VARIABLE: f"{tmp_path}/a/../b", PRESET_VARIABLE: "tiny", ARGS_VARIABLE: "--seed 3 --x 'a b'"}
    assert SglangSettings.from_environment(given) == SglangSettings(
        tmp_path / "b", "tiny", ("--seed", "3", "--x", "a b")
    )
    with pytest.raises(ValueError, match="small, tiny, not huge"):
        SglangSettings.from_environment({**given, PRESET_VARIABLE: "huge"})


@pytest.mark.parametrize(
    ("mode", "words"), [("dies", "this machine has no CPU engine"), ("broken", "n1 is up but does not answer")]
)
def test_an_engine_that_fails_is_reported(
    spec: EngineSpec, settings: SglangSettings, monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    monkeypatch.setenv("STAND_IN_MODE", mode)

    async def scenario() -> None:
        launcher = SglangLauncher(spec, settings)
        await launcher.start()
        try:
            with pytest.raises(ProcessError, match=words):
                await launcher.wait_ready()
        finally:
            launcher.kill()

    asyncio.run(scenario())


# --- the environment


def test_the_model_is_built_inside_the_environment(spec: EngineSpec, settings: SglangSettings) -> None:
    async def scenario() -> None:
        launcher = SglangLauncher(spec, settings)
        await launcher.start()
        launcher.kill()

    asyncio.run(scenario())
    built_with = json.loads((settings.env / "prefixroute-models" / "small" / "config.json").read_text())
    assert built_with[2:] == ["--preset", "small"]


def test_setup_refuses_to_guess_and_leaves_a_ready_environment_alone(tmp_path: Path) -> None:
    script = LAUNCH / "setup_sglang.sh"
    without = subprocess.run([script], capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "usage" in without.stderr
    version = script.read_text().partition(" version=")[2].split()[0]
    (tmp_path / f".sglang-{version}-ready").touch()
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "python", "raise SystemExit('must not run')")
    ready = subprocess.run([script, tmp_path], capture_output=True, text=True, check=False)
    assert (ready.returncode, ready.stderr) == (0, "")
    assert "already holds" in ready.stdout


def stand_ins() -> str:
    """The module that `setup_sglang.sh` writes into the environment."""
    return (LAUNCH / "setup_sglang.sh").read_text().partition("<<'PYTHON_END'\n")[2].partition("\nPYTHON_END\n")[0]


STAND_IN_CHECKS = """
import importlib.util
import prefixroute_stand_ins
prefixroute_stand_ins.install()
import torchvision.transforms
from sgl_kernel import anything, decorate
from sgl_kernel.deep.down import Base
assert importlib.util.find_spec("torchvision") is None
assert importlib.util.find_spec("sgl_kernel") is None
assert importlib.util.find_spec("json") is not None

@decorate
def plain():
    return 7

class Own(Base):
    size = 3

assert plain() == 7
assert Own().size == 3
assert isinstance(None, (anything | int, type(None)))
assert anything(1, 2).more.and_more() is anything
assert not hasattr(anything, "__iter__")
try:
    import torchvisions
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("torchvisions was found")
"""


def test_stand_ins_can_be_imported_and_say_that_they_are_absent(tmp_path: Path) -> None:
    (tmp_path / "prefixroute_stand_ins.py").write_text(stand_ins())
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN_CHECKS],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_installed_package_wins_over_its_stand_in(tmp_path: Path) -> None:
    (tmp_path / "prefixroute_stand_ins.py").write_text(stand_ins())
    (tmp_path / "torchvision.py").write_text("real = True\n")
    check = (
        "import importlib.util, prefixroute_stand_ins; prefixroute_stand_ins.install(); import torchvision; "
        "assert torchvision.real is True; assert importlib.util.find_spec('torchvision').origin"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
