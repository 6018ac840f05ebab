"""What the launchers of real engines share: an environment of their own, a made-up model, and a life as a process.

Rules:
1. An engine is never imported here: it is a program that is started, asked over HTTP and ended.
2. An engine leaves nothing behind, however it ends: its sockets and other temporary files are in a folder of its
   own, and its shared memory is unlinked (a killed engine leaves some in /dev/shm).
3. Nothing here knows which engine it is; `vllm_launcher` and `sglang_launcher` say what differs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import httpx

from prefixroute.errors import UsageError

from . import build_model
from .launcher import EngineSpec, RunningEngine, answers_health
from .processes import ChildProcess, ProcessError

# Four vLLM engines that start together on 2 cores were healthy after 74 to 103 s, one SGLang after 26 to 28 s.
_READY_TIMEOUT_S = 300.0
_HEALTH_PAUSE_S = 0.25
# All of an engine's processes were gone within 6 s of SIGINT on an idle machine.
_STOP_GRACE_S = 20.0
# sun_path holds 108 bytes with its final zero.
_IPC_PATH_LIMIT = 107

_Home = TypeVar("_Home", bound="EngineHome")


@dataclass(frozen=True, slots=True)
class EngineHome(ABC):
    """Which environment holds the engine, which made-up model it serves, and what else to pass to its server."""

    env: Path
    preset: str = "small"
    extra_args: tuple[str, ...] = ()

    label: ClassVar[str]
    """The engine's name as its users write it."""
    word: ClassVar[str]
    """Its kind, as in `launcher.LAUNCHERS`; the variables and the set-up script are named after it."""

    @classmethod
    def variable(cls, what: str) -> str:
        """Return the name of the variable for ``ENV``, ``PRESET`` or ``ARGS``."""
        return f"PREFIXROUTE_{cls.word.upper()}_{what}"

    @classmethod
    def how_to(cls) -> str:
        """Return what to do when the engine is missing."""
        return f"run `examples/launch/setup_{cls.word}.sh DIR` once, then set {cls.variable('ENV')}=DIR"

    @classmethod
    def from_environment(cls: type[_Home], environ: Mapping[str, str] = os.environ) -> _Home:
        """Read the three variables; UsageError when the environment is not named or a word is not known."""
        named = environ.get(cls.variable("ENV"))
        if not named:
            raise UsageError(f"no {cls.label} environment: {cls.how_to()}")
        preset = environ.get(cls.variable("PRESET")) or "small"
        if preset not in build_model.PRESETS:
            known = ", ".join(sorted(build_model.PRESETS))
            raise UsageError(f"{cls.variable('PRESET')} must be one of {known}, not {preset}")
        # absolute, but not resolved: an environment's `bin/python` is a link that must keep its place
        env = Path(os.path.abspath(os.path.expanduser(named)))
        return cls(env, preset, tuple(shlex.split(environ.get(cls.variable("ARGS"), ""))))

    @property
    def python(self) -> Path:
        """The interpreter that has `tokenizers` and `transformers`."""
        return self.env / "bin" / "python"

    @property
    @abstractmethod
    def installed(self) -> bool:
        """Whether the engine is there."""

    @property
    def model_dir(self) -> Path:
        """Where the made-up model is kept: inside the environment, so that one folder holds it all."""
        return self.env / "prefixroute-models" / self.preset


class RealLauncher(ABC, Generic[_Home]):
    """One engine's server, in a session of its own.

    `spec` is what the engine can do of what was asked. UsageError at once when the engine is missing.
    """

    model: ClassVar[str] = "made-up"
    reset_path: ClassVar[str]
    prefill_tokens_per_s: ClassVar[Mapping[str, float]]
    """First guesses by preset, one core of a noisy 2-core machine."""
    shared_memory: ClassVar[str]
    """Names in /dev/shm of what an engine's processes share, as a regular expression."""

    def __init__(self, spec: EngineSpec, settings: _Home) -> None:
        if not settings.installed:
            raise UsageError(f"no {settings.label} in {settings.env}: {settings.how_to()}")
        self._settings = settings
        self._spec = spec
        self._process: ChildProcess | None = None
        self._scratch: Path | None = None
        self._segments: set[Path] = set()

    @abstractmethod
    def argv(self) -> list[str]:
        """Return the command line."""

    @abstractmethod
    def environment(self, scratch: Path) -> dict[str, str]:
        """Return what is added to the environment; `scratch` takes temporary files."""

    @abstractmethod
    def warm_up(self) -> dict[str, object]:
        """Return a short completion request that leaves nothing in anybody's way."""

    async def start(self) -> RunningEngine:
        """Make the model if this is the first time (about 2 s), start the engine and return at once."""
        settings, spec = self._settings, self._spec
        await ensure_model(settings)
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix=f"engine-{settings.word}-"))
        log = spec.run_dir / f"{spec.name}.engine.log"
        environment = self.environment(self._scratch)
        self._process = ChildProcess.start(f"engine of {spec.name}", self.argv(), log, environment)
        return RunningEngine(
            url=spec.url,
            pid=self._process.pid,
            model=self.model,
            events_endpoint=spec.events_endpoint,
            replay_endpoint=spec.replay_endpoint,
            block_size=spec.block_size,
            prefill_tokens_per_s=self.prefill_tokens_per_s[settings.preset],
            reset_path=self.reset_path,
            kind=settings.word,
            tokenizer=tokenizer_of(settings),
        )

    async def wait_ready(self) -> None:
        """Wait for ``/health``, then for one short answer: the first forward pass is slower than the rest."""
        assert self._process is not None, "start() first"
        url = self._spec.url
        async with httpx.AsyncClient(trust_env=False) as client:

            async def healthy() -> bool:
                # one that dies while it starts can no longer be asked what it leaves behind
                self._note_shared_memory()
                if await answers_health(client, url):
                    return True
                await asyncio.sleep(_HEALTH_PAUSE_S)
                return False

            await self._process.wait_until(healthy, _READY_TIMEOUT_S)
            await self._warm_up(client, url)

    async def stop(self) -> None:
        """SIGINT to the server, then SIGKILL to the group for whatever is left after 20 s."""
        if self._process is not None:
            self._note_shared_memory()
            try:
                await self._process.stop(_STOP_GRACE_S)
            finally:
                self._clean_up()

    def kill(self) -> None:
        """SIGKILL to the server and all its processes."""
        if self._process is not None:
            self._note_shared_memory()
            self._process.kill()
            self._clean_up()

    async def _warm_up(self, client: httpx.AsyncClient, url: str) -> None:
        try:
            body = {"model": self.model, **self.warm_up()}
            reply = await client.post(f"{url}/v1/completions", json=body, timeout=60.0)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise ProcessError(f"engine of {self._spec.name} is up but does not answer: {error!r}") from error

    def _note_shared_memory(self) -> None:
        assert self._process is not None
        self._segments |= shared_memory_of(self._process.pid, self.shared_memory)

    def _clean_up(self) -> None:
        for segment in self._segments:
            segment.unlink(missing_ok=True)
        self._segments.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


def with_ipc_events(spec: EngineSpec) -> EngineSpec:
    """Return `spec` with its live events on an absolute ipc address; UsageError when the path is too long.

    The address depends on `spec` alone, so that a follower finds the engine's next life where the last one was.
    """
    if spec.events_endpoint.startswith("ipc://"):
        path = os.path.abspath(spec.events_endpoint.removeprefix("ipc://"))
    else:
        path = os.path.abspath(spec.run_dir / f"{spec.name}.kv.ipc")
    if len(os.fsencode(path)) > _IPC_PATH_LIMIT:
        raise UsageError(f"a socket's path has at most {_IPC_PATH_LIMIT} bytes, choose a shorter run folder: {path}")
    return replace(spec, events_endpoint=f"ipc://{path}")


def core_of(spec: EngineSpec) -> int:
    """Return the core that an engine computes on, by its number: left alone, all engines take the same one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[spec.index % len(cores)]


def common_environment(home: EngineHome, scratch: Path) -> dict[str, str]:
    """Return what every engine has around it: no downloads, its own programs first, `scratch` for temporary files."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": "",  # this process's packages are not the engine's
        "TMPDIR": str(scratch),
        "PATH": f"{home.env / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }


async def ensure_model(settings: EngineHome) -> Path:
    """Return the made-up model's folder, built on first use; ProcessError with the builder's last words.

    Safe when several launchers come at once: each builds aside, the first to finish puts its folder in place.
    """
    return await _built(settings, settings.preset, "config.json")


async def _built(settings: EngineHome, name: str, last: str, options: tuple[str, ...] = ()) -> Path:
    """Return a folder beside the model's, whole when it has the file `last`; built when it has not."""
    final = settings.model_dir.parent / name
    if (final / last).exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=final.parent))
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(settings.python), build_model.__file__, str(aside), "--preset", settings.preset, *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ""},
        )
        _, said = await process.communicate()
        if process.returncode:
            raise ProcessError(f"cannot build {name}: {said.decode('utf-8', 'replace').strip()[-500:]}")
        if not (final / last).exists():
            os.replace(aside, final)
    except OSError as error:
        if not (final / last).exists():
            raise ProcessError(f"cannot build {final}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


async def ensure_lora(settings: EngineHome) -> Path:
    """Return the folder of a LoRA adapter for the made-up model, built on first use; ProcessError as `ensure_model`."""
    return await _built(settings, f"{settings.preset}-lora", "adapter_config.json", ("--lora",))


def tokenizer_of(settings: EngineHome) -> str:
    """Return what tells the made-up model's tokenizer from one that another Python made; "" when it has none."""
    try:
        return hashlib.sha256((settings.model_dir / "tokenizer.json").read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def shared_memory_of(group: int, names: str) -> set[Path]:
    """Return the named shared memory that the processes of a group have mapped; empty where there is no /proc.

    `names` is a regular expression of the names to look for.
    """
    inodes: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) != group:
                continue
            maps = (entry / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # ended meanwhile, or not ours
        # by number: a semaphore is mapped under a first name, then linked to the one that stays
        inodes.update(int(number) for number in re.findall(r" (\d+) +/dev/shm/", maps))
    if not inodes:
        return set()
    return {Path(e.path) for e in os.scandir("/dev/shm") if e.inode() in inodes and re.fullmatch(names, e.name)}
