"""A real vLLM on the CPU as the example's engine.

Rules:
1. vLLM lives in an environment of its own (`setup_vllm.sh` makes it) and is never imported here: it is a
   program that is started, asked over HTTP and ended.
2. Nothing is reachable from outside this machine: HTTP and replay on 127.0.0.1, live events over ipc. vLLM
   binds its event socket only for ipc or for a wildcard (else it *connects*): a tcp wish becomes an ipc address.
3. What the engine cannot do as asked is rounded, and `RunningEngine` says what came out: block sizes are
   multiples of 32 on a CPU, one block more than the usable ones is asked for (vLLM keeps a null block).
4. An engine leaves nothing behind, however it ends: its sockets and other temporary files are in a folder of its
   own, and its shared memory is unlinked (a killed vLLM leaves two segments in /dev/shm).
5. Engine i computes on core i, modulo the cores of this process: left alone, all engines take the same core.

| variable | means |
|---|---|
| `PREFIXROUTE_VLLM_ENV` | the virtual environment that holds vLLM; required |
| `PREFIXROUTE_VLLM_PRESET` | the made-up model: `small` (default) or `tiny` |
| `PREFIXROUTE_VLLM_ARGS` | more arguments for `vllm serve`, quoted as in a shell |

Checked with vLLM 0.32.0.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import httpx

from prefixroute.errors import UsageError

from . import build_model
from .engines import EngineSpec, RunningEngine, answers_health, kv_events_config
from .processes import ChildProcess, ProcessError

ENV_VARIABLE = "PREFIXROUTE_VLLM_ENV"
PRESET_VARIABLE = "PREFIXROUTE_VLLM_PRESET"
ARGS_VARIABLE = "PREFIXROUTE_VLLM_ARGS"

HOW_TO = f"run `examples/lan4/setup_vllm.sh DIR` once, then set {ENV_VARIABLE}=DIR"

BLOCK_UNIT = 32
"""vLLM's CPU attention takes blocks of 32 tokens and multiples; 16 fails at start."""

PREFILL_TOKENS_PER_S = {"tiny": 10000.0, "small": 850.0}
"""First guesses, one core of a noisy 2-core machine: 1024 uncached tokens took 1.2 s with `small`."""

# 4 engines that start together on 2 cores were healthy after 74 to 103 s.
_READY_TIMEOUT_S = 300.0
_HEALTH_PAUSE_S = 0.25
# All of an engine's processes were gone within 6 s of SIGINT on an idle machine.
_STOP_GRACE_S = 20.0
# sun_path holds 108 bytes with its final zero.
_IPC_PATH_LIMIT = 107

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the number of blocks is given separately
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONPATH": "",  # this process's packages are not vLLM's
}


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Which vLLM, which made-up model, and what else to pass to ``vllm serve``."""

    env: Path
    preset: str = "small"
    extra_args: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> VllmSettings:
        """Read the three variables; UsageError when the environment is not named or a word is not known."""
        if not environ.get(ENV_VARIABLE):
            raise UsageError(f"no vLLM environment: {HOW_TO}")
        preset = environ.get(PRESET_VARIABLE) or "small"
        if preset not in build_model.PRESETS:
            raise UsageError(f"{PRESET_VARIABLE} must be one of {', '.join(sorted(build_model.PRESETS))}, not {preset}")
        # absolute, but not resolved: an environment's `bin/python` is a link that must keep its place
        env = Path(os.path.abspath(os.path.expanduser(environ[ENV_VARIABLE])))
        return cls(env, preset, tuple(shlex.split(environ.get(ARGS_VARIABLE, ""))))

    @property
    def program(self) -> Path:
        """The ``vllm`` command."""
        return self.env / "bin" / "vllm"

    @property
    def python(self) -> Path:
        """The interpreter that has `tokenizers` and `transformers`."""
        return self.env / "bin" / "python"

    @property
    def model_dir(self) -> Path:
        """Where the made-up model is kept: inside the environment, so that one folder holds it all."""
        return self.env / "prefixroute-models" / self.preset


class VllmLauncher:
    """One ``vllm serve``, in a session of its own.

    UsageError at once when the environment, or vLLM in it, is missing.
    """

    model = "lan4"

    def __init__(self, spec: EngineSpec, settings: VllmSettings | None = None) -> None:
        self._settings = settings or VllmSettings.from_environment()
        if not self._settings.program.exists():
            raise UsageError(f"no vLLM in {self._settings.env}: {HOW_TO}")
        self._spec = with_ipc_events(fitted(spec))
        self._process: ChildProcess | None = None
        self._scratch: Path | None = None

    async def start(self) -> RunningEngine:
        """Make the model if this is the first time (about 2 s), start the engine and return at once."""
        settings, spec = self._settings, self._spec
        await ensure_model(settings)
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="lan4-vllm-"))
        self._process = ChildProcess.start(
            f"engine of {spec.name}",
            serve_argv(spec, settings, self.model),
            spec.run_dir / f"{spec.name}.engine.log",
            serve_environment(spec, settings, self._scratch),
        )
        return RunningEngine(
            url=f"http://127.0.0.1:{spec.port}",
            pid=self._process.pid,
            model=self.model,
            events_endpoint=spec.events_endpoint,
            replay_endpoint=spec.replay_endpoint,
            block_size=spec.block_size,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S[settings.preset],
            tokenizer=tokenizer_of(settings),
        )

    async def wait_ready(self) -> None:
        """Wait for ``/health``, then for one short answer: the first forward pass is slower than the rest."""
        assert self._process is not None, "start() first"
        url = f"http://127.0.0.1:{self._spec.port}"
        async with httpx.AsyncClient(trust_env=False) as client:

            async def healthy() -> bool:
                if await answers_health(client, url):
                    return True
                await asyncio.sleep(_HEALTH_PAUSE_S)
                return False

            await self._process.wait_until(healthy, _READY_TIMEOUT_S)
            await self._warm_up(client, url)

    async def stop(self) -> None:
        """SIGINT to the server, then SIGKILL to the group for whatever is left after 20 s."""
        if self._process is not None:
            segments = shared_memory_of(self._process.pid)
            try:
                await self._process.stop(_STOP_GRACE_S)
            finally:
                self._clean_up(segments)

    def kill(self) -> None:
        """SIGKILL to server, engine core and worker."""
        if self._process is not None:
            segments = shared_memory_of(self._process.pid)
            self._process.kill()
            self._clean_up(segments)

    async def _warm_up(self, client: httpx.AsyncClient, url: str) -> None:
        # Shorter than a block: it caches nothing and publishes nothing.
        body = {"model": self.model, "prompt": list(range(100, 100 + BLOCK_UNIT // 2)), "max_tokens": 2}
        try:
            reply = await client.post(f"{url}/v1/completions", json=body, timeout=60.0)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            raise ProcessError(f"engine of {self._spec.name} is up but does not answer: {error!r}") from error

    def _clean_up(self, segments: Iterable[Path]) -> None:
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


def fitted(spec: EngineSpec) -> EngineSpec:
    """Return `spec` with a block size that vLLM takes, and blocks for the same number of tokens."""
    block_size = -(-spec.block_size // BLOCK_UNIT) * BLOCK_UNIT
    tokens = spec.block_size * spec.capacity_blocks
    return replace(spec, block_size=block_size, capacity_blocks=max(1, tokens // block_size))


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


def serve_argv(spec: EngineSpec, settings: VllmSettings, served_name: str) -> list[str]:
    """Return the command line of one engine; `spec` is fitted and its events go over ipc."""
    longest = build_model.PRESETS[settings.preset].max_len
    options: dict[str, object] = {
        "--served-model-name": served_name,
        "--host": "127.0.0.1",
        "--port": spec.port,
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        # the usable blocks must hold one request of the longest kind, or vLLM refuses to start
        "--max-model-len": min(longest, spec.capacity_blocks * spec.block_size),
        "--max-num-seqs": 8,
        "--block-size": spec.block_size,
        "--num-gpu-blocks-override": spec.capacity_blocks + 1,
        "--kv-events-config": kv_events_config(spec),
    }
    flags = (
        "--enable-prefix-caching",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--enable-server-load-tracking",
    )
    argv = [str(settings.program), "serve", str(settings.model_dir)]
    for option, value in options.items():
        argv += [option, str(value)]
    return [*argv, *flags, *settings.extra_args]


def serve_environment(spec: EngineSpec, settings: VllmSettings, scratch: Path) -> dict[str, str]:
    """Return what is added to the environment of one engine; `scratch` takes its temporary files."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        **_ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[spec.index % len(cores)]),
        "VLLM_CACHE_ROOT": str(settings.env / "prefixroute-cache"),
        "TMPDIR": str(scratch),
        "PATH": f"{settings.env / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }


class ModelHome(Protocol):
    """Where a made-up model belongs, and the interpreter that can build it."""

    @property
    def preset(self) -> str:
        """The model's name in `build_model.PRESETS`."""

    @property
    def python(self) -> Path:
        """The interpreter that has `tokenizers` and `transformers`."""

    @property
    def model_dir(self) -> Path:
        """The folder to make."""


async def ensure_model(settings: ModelHome) -> Path:
    """Return the made-up model's folder, built on first use; ProcessError with the builder's last words.

    Safe when several launchers come at once: each builds aside, the first to finish puts its folder in place.
    """
    final = settings.model_dir
    if (final / "config.json").exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{settings.preset}-", dir=final.parent))
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(settings.python), build_model.__file__, str(aside), "--preset", settings.preset),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ""},
        )
        _, said = await process.communicate()
        if process.returncode:
            raise ProcessError(f"cannot build the model: {said.decode('utf-8', 'replace').strip()[-500:]}")
        if not (final / "config.json").exists():
            os.replace(aside, final)
    except OSError as error:
        if not (final / "config.json").exists():
            raise ProcessError(f"cannot build the model in {final}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def tokenizer_of(settings: ModelHome) -> str:
    """Return what tells the made-up model's tokenizer from one that another Python made; "" when it has none."""
    try:
        return hashlib.sha256((settings.model_dir / "tokenizer.json").read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def shared_memory_of(group: int, names: str = r"psm_\w+") -> set[Path]:
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
