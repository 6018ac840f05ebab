"""Start an engine of any kind in one way: the emulator here, vLLM and SGLang in modules of their own.

Rules:
1. A launcher owns one engine process (and its process group) for one life: start, wait, stop or kill.
2. `EngineSpec` says what is wanted; `RunningEngine` says what came of it, in the words that `EngineConfig` of
   `prefixroute_serving.attach` has.
3. A launcher module is imported only when its kind is asked for.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from .processes import HOST, ChildProcess

LAUNCHERS = {
    "emulated": ("prefixroute_launch.launcher", "EmulatedLauncher"),
    "vllm": ("prefixroute_launch.vllm_launcher", "VllmLauncher"),
    "sglang": ("prefixroute_launch.sglang_launcher", "SglangLauncher"),
}
"""Engine kind -> module and class of its launcher."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one engine should be.

    `events_endpoint` is where the engine publishes its cache events and `replay_endpoint` where it answers
    replays, both as ZeroMQ addresses to bind. `index` counts engines from 0 (to pin each to a core);
    `run_dir` takes logs and sockets. With several data-parallel `ranks` both addresses are tcp, and those of rank 0.
    """

    name: str
    port: int
    events_endpoint: str
    replay_endpoint: str
    topic: str
    block_size: int
    capacity_blocks: int
    index: int
    run_dir: Path
    ranks: int = 1

    @property
    def url(self) -> str:
        """Where the engine will answer."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that was started; endpoints as in its ``--kv-events-config``.

    `kind` is whose adapter reads its events and load, for the sidecar; an emulated engine speaks vLLM's wire.
    `model` is the name that requests must carry, `tokenizer` what tells its tokenizer from others.
    `prefill_tokens_per_s` is a first guess for the sidecar, 0 when nothing is known. `block_size` is the
    engine's own, in tokens. A POST to `reset_path` empties its cache.
    """

    url: str
    pid: int
    model: str
    events_endpoint: str
    replay_endpoint: str
    block_size: int
    prefill_tokens_per_s: float
    reset_path: str = "/reset_prefix_cache"
    kind: str = "vllm"
    tokenizer: str = ""


class Launcher(Protocol):
    """One engine process, from start to end."""

    async def start(self) -> RunningEngine:
        """Start the process and return at once; ProcessError when it cannot be started."""

    async def wait_ready(self) -> None:
        """Return when the engine answers requests; ProcessError when it dies or takes too long."""

    async def stop(self) -> None:
        """End the engine and everything it started; safe to call twice and before `start`."""

    def kill(self) -> None:
        """SIGKILL the engine and everything it started, as a crash would; safe to call twice."""


class LauncherFactory(Protocol):
    """How a launcher is made: the class itself."""

    def __call__(self, spec: EngineSpec) -> Launcher:
        """A launcher for `spec`; nothing is started yet. UsageError when this machine lacks what it needs."""


TOKENIZERS = {"emulated": "emulator", "vllm": "made-up", "sglang": "made-up"}
"""Engine kind -> its tokenizer, in a word: only kinds with the same one can be nodes of one fleet."""


def launcher_for(kind: str) -> LauncherFactory:
    """The launcher class of an engine kind, one of LAUNCHERS; KeyError for another word."""
    module, name = LAUNCHERS[kind]
    factory: LauncherFactory = getattr(importlib.import_module(module), name)
    return factory


def words_of(options: Mapping[str, object]) -> list[str]:
    """A command line's options and their values, word by word."""
    return [word for option, value in options.items() for word in (option, str(value))]


def kv_events_config(spec: EngineSpec) -> str:
    """The value of the engine's ``--kv-events-config``, the same for a real vLLM and the emulator."""
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": spec.events_endpoint,
            "replay_endpoint": spec.replay_endpoint,
            "topic": spec.topic,
        }
    )


async def answers_health(client: httpx.AsyncClient, url: str) -> bool:
    """True when ``GET url/health`` answers 200."""
    try:
        return (await client.get(f"{url}/health", timeout=2.0)).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass(frozen=True, slots=True)
class EmulatedTiming:
    """The emulated engine's service time: a request takes overhead + uncached / prefill + answer * decode."""

    prefill_tokens_per_s: float = 3000.0
    overhead_s: float = 0.01
    decode_s_per_token: float = 0.01


class EmulatedLauncher:
    """The emulated engine in a process of its own."""

    model = "emulated"
    ready_timeout_s = 30.0

    def __init__(self, spec: EngineSpec, timing: EmulatedTiming | None = None) -> None:
        self._spec = spec
        self._timing = timing or EmulatedTiming()
        self._process: ChildProcess | None = None

    async def start(self) -> RunningEngine:
        """Start the emulator on 127.0.0.1."""
        spec = self._spec
        self._process = ChildProcess.start(
            f"engine of {spec.name}", self._argv(), spec.run_dir / f"{spec.name}.engine.log"
        )
        return RunningEngine(
            url=spec.url,
            pid=self._process.pid,
            model=self.model,
            events_endpoint=spec.events_endpoint,
            replay_endpoint=spec.replay_endpoint,
            block_size=spec.block_size,
            prefill_tokens_per_s=self._timing.prefill_tokens_per_s,
            tokenizer=TOKENIZERS["emulated"],
        )

    async def wait_ready(self) -> None:
        """Poll ``/health`` until it answers."""
        assert self._process is not None, "start() first"
        async with httpx.AsyncClient(trust_env=False) as client:
            await self._process.wait_until(lambda: answers_health(client, self._spec.url), self.ready_timeout_s)

    async def stop(self) -> None:
        """End the emulator."""
        if self._process is not None:
            await self._process.stop()

    def kill(self) -> None:
        """Kill the emulator."""
        if self._process is not None:
            self._process.kill()

    def _argv(self) -> Sequence[str]:
        spec, timing = self._spec, self._timing
        options = {
            "--port": spec.port,
            "--model": self.model,
            "--block-size": spec.block_size,
            "--capacity-blocks": spec.capacity_blocks,
            "--prefill-tokens-per-s": timing.prefill_tokens_per_s,
            "--overhead-s": timing.overhead_s,
            "--decode-s-per-token": timing.decode_s_per_token,
            "--kv-events-config": kv_events_config(spec),
        }
        return [sys.executable, "-m", "prefixroute.emulator", *words_of(options)]
