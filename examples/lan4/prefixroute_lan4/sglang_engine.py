"""A real SGLang on the CPU as the example's engine.

Rules:
1. SGLang lives in an environment of its own (`setup_sglang.sh` makes it) and is never imported here: it is a
   program that is started, asked over HTTP and ended.
2. HTTP, events and replay are where `EngineSpec` says: on 127.0.0.1 or over ipc. SGLang binds its event socket
   only for ipc or for a wildcard (else it *connects*), so a concrete tcp address is passed with ``bind``.
3. SGLang pushes its load only from a wildcard: it is switched on where the events use one, else ask ``/v1/loads``.
4. SGLang tells where it publishes (``/server_info``) only when events go over tcp.
5. An engine leaves nothing behind, however it ends: its sockets and other temporary files are in a folder of its
   own, and its shared memory is unlinked (a killed SGLang leaves semaphores and a load table in /dev/shm).
6. Engine i computes on core i, modulo the cores of this process.

| variable | means |
|---|---|
| `PREFIXROUTE_SGLANG_ENV` | the virtual environment that holds SGLang; required |
| `PREFIXROUTE_SGLANG_PRESET` | the made-up model: `small` (default) or `tiny`, the same ones as vLLM's |
| `PREFIXROUTE_SGLANG_ARGS` | more arguments for SGLang's server, quoted as in a shell |

Checked with SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from prefixroute.errors import UsageError

from . import build_model
from .engines import EngineSpec, RunningEngine, answers_health
from .processes import ChildProcess, ProcessError
from .vllm_engine import ensure_model, shared_memory_of, tokenizer_of, with_ipc_events

ENV_VARIABLE = "PREFIXROUTE_SGLANG_ENV"
PRESET_VARIABLE = "PREFIXROUTE_SGLANG_PRESET"
ARGS_VARIABLE = "PREFIXROUTE_SGLANG_ARGS"

HOW_TO = f"run `examples/lan4/setup_sglang.sh DIR` once, then set {ENV_VARIABLE}=DIR"

PREFILL_TOKENS_PER_S = {"tiny": 3000.0, "small": 450.0}
"""First guesses, one core of a noisy 2-core machine."""

WARM_UP_TOKENS = 2
WARM_UP_SALT = "warm-up"

SHARED_MEMORY = r"sem\.mp-\w+|sglang_\w+\.shm|psm_\w+"
"""Names in /dev/shm of what an engine's processes share."""

# One engine was healthy after 26 to 28 s on a busy 2-core machine.
_READY_TIMEOUT_S = 300.0
_HEALTH_PAUSE_S = 0.25
# All of an engine's processes were gone within 4 s of SIGINT on a busy machine.
_STOP_GRACE_S = 20.0

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # else every /health of an idle engine generates a token, which at page size 1 is cached and published
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONPATH": "",  # this process's packages are not SGLang's
}


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """Which SGLang, which made-up model, and what else to pass to its server."""

    env: Path
    preset: str = "small"
    extra_args: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> SglangSettings:
        """Read the three variables; UsageError when the environment is not named or a word is not known."""
        if not environ.get(ENV_VARIABLE):
            raise UsageError(f"no SGLang environment: {HOW_TO}")
        preset = environ.get(PRESET_VARIABLE) or "small"
        if preset not in build_model.PRESETS:
            raise UsageError(f"{PRESET_VARIABLE} must be one of {', '.join(sorted(build_model.PRESETS))}, not {preset}")
        # absolute, but not resolved: an environment's `bin/python` is a link that must keep its place
        env = Path(os.path.abspath(os.path.expanduser(environ[ENV_VARIABLE])))
        return cls(env, preset, tuple(shlex.split(environ.get(ARGS_VARIABLE, ""))))

    @property
    def python(self) -> Path:
        """The interpreter that has `sglang`, `tokenizers` and `transformers`."""
        return self.env / "bin" / "python"

    @property
    def installed(self) -> bool:
        """True when `setup_sglang.sh` came to its end in this environment."""
        return self.python.exists() and any(self.env.glob(".sglang-*-ready"))

    @property
    def model_dir(self) -> Path:
        """Where the made-up model is kept: inside the environment, so that one folder holds it all."""
        return self.env / "prefixroute-models" / self.preset


class SglangLauncher:
    """One SGLang server, in a session of its own.

    UsageError at once when the environment, or SGLang in it, is missing.
    """

    model = "lan4"

    def __init__(self, spec: EngineSpec, settings: SglangSettings | None = None) -> None:
        self._settings = settings or SglangSettings.from_environment()
        if not self._settings.installed:
            raise UsageError(f"no SGLang in {self._settings.env}: {HOW_TO}")
        self._spec = with_ipc_events(spec) if spec.events_endpoint.startswith("ipc://") else spec
        self._process: ChildProcess | None = None
        self._scratch: Path | None = None

    async def start(self) -> RunningEngine:
        """Make the model if this is the first time (about 2 s), start the engine and return at once."""
        settings, spec = self._settings, self._spec
        await ensure_model(settings)
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="lan4-sglang-"))
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
            reset_path="/flush_cache",
            kind="sglang",
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
            segments = shared_memory_of(self._process.pid, SHARED_MEMORY)
            try:
                await self._process.stop(_STOP_GRACE_S)
            finally:
                self._clean_up(segments)

    def kill(self) -> None:
        """SIGKILL to server, scheduler and detokenizer."""
        if self._process is not None:
            segments = shared_memory_of(self._process.pid, SHARED_MEMORY)
            self._process.kill()
            self._clean_up(segments)

    async def _warm_up(self, client: httpx.AsyncClient, url: str) -> None:
        # At page size 1 every token is cached and published: the salt keeps these out of everybody's way.
        body = {
            "model": self.model,
            "prompt": list(range(100, 100 + WARM_UP_TOKENS)),
            "max_tokens": 2,
            "cache_salt": WARM_UP_SALT,
        }
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


def wildcard(endpoint: str) -> bool:
    """True for a tcp address that listens on every interface: SGLang binds it and, beside it, its load socket."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return endpoint.startswith("tcp://") and host in ("*", "0.0.0.0", "[::]")


def events_config(spec: EngineSpec) -> str:
    """Return the value of ``--kv-events-config``; a concrete tcp address is bound by word (0.5.22 and later)."""
    config: dict[str, object] = {
        "publisher": "zmq",
        "endpoint": spec.events_endpoint,
        "replay_endpoint": spec.replay_endpoint,
        "topic": spec.topic,
    }
    if spec.events_endpoint.startswith("tcp://") and not wildcard(spec.events_endpoint):
        config["bind"] = True
    return json.dumps(config)


def serve_argv(spec: EngineSpec, settings: SglangSettings, served_name: str) -> list[str]:
    """Return the command line of one engine."""
    options: dict[str, object] = {
        "--model-path": settings.model_dir,
        "--served-model-name": served_name,
        "--host": "127.0.0.1",
        "--port": spec.port,
        "--device": "cpu",
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        "--random-seed": 1,
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
        "--max-running-requests": 8,
        "--page-size": spec.block_size,
        "--max-total-tokens": spec.capacity_blocks * spec.block_size,
        # the share of memory is only an upper bound here: the line above decides
        "--mem-fraction-static": 0.1,
        "--kv-events-config": events_config(spec),
    }
    if wildcard(spec.events_endpoint):
        options["--load-publish-endpoint"] = "auto"
    flags = (
        "--disable-overlap-schedule",
        # else an idle engine keeps its core busy, which two engines may share
        "--sleep-on-idle",
        # its own warm-up would fill the cache with a made-up prompt
        "--skip-server-warmup",
        "--enable-cache-report",
        "--enable-metrics",
    )
    argv = [str(settings.python), "-m", "sglang.launch_server"]
    for option, value in options.items():
        argv += [option, str(value)]
    return [*argv, *flags, *settings.extra_args]


def serve_environment(spec: EngineSpec, settings: SglangSettings, scratch: Path) -> dict[str, str]:
    """Return what is added to the environment of one engine; `scratch` takes its temporary files."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        **_ENVIRONMENT,
        "SGLANG_CPU_OMP_THREADS_BIND": str(cores[spec.index % len(cores)]),
        # what some options make SGLang compile; the options here do not
        "TORCH_EXTENSIONS_DIR": str(settings.env / "prefixroute-cache"),
        "TMPDIR": str(scratch),
        "PATH": f"{settings.env / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }
