"""A real SGLang on the CPU, as an engine to try things with.

Rules:
1. SGLang lives in an environment of its own, which `setup_sglang.sh` makes.
2. HTTP, events and replay are where `EngineSpec` says: on 127.0.0.1 or over ipc. SGLang binds its event socket
   only for ipc or for a wildcard (else it *connects*), so a concrete tcp address is passed with ``bind``.
3. SGLang pushes its load only from a wildcard: it is switched on where the events use one, else ask ``/v1/loads``.
4. SGLang tells where it publishes (``/server_info``) only when events go over tcp.
5. Engine i computes on core i, modulo the cores of this process.

| variable | means |
|---|---|
| `PREFIXROUTE_SGLANG_ENV` | the virtual environment that holds SGLang; required |
| `PREFIXROUTE_SGLANG_PRESET` | the made-up model: `small` (default) or `tiny`, the same ones as vLLM's |
| `PREFIXROUTE_SGLANG_ARGS` | more arguments for SGLang's server, quoted as in a shell |

Checked with SGLang 0.5.23.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .launcher import EngineSpec, words_of
from .real_engine import EngineHome, RealLauncher, common_environment, core_of, with_ipc_events

WARM_UP_TOKENS = 2
WARM_UP_SALT = "warm-up"

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # else every /health of an idle engine generates a token, which at page size 1 is cached and published
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True)
class SglangSettings(EngineHome):
    """Which SGLang, which made-up model, and what else to pass to its server."""

    label = "SGLang"
    word = "sglang"

    @property
    def installed(self) -> bool:
        """True when `setup_sglang.sh` came to its end in this environment."""
        return self.python.exists() and any(self.env.glob(".sglang-*-ready"))


class SglangLauncher(RealLauncher[SglangSettings]):
    """One SGLang server with its scheduler and detokenizer."""

    reset_path = "/flush_cache"
    prefill_tokens_per_s = {"tiny": 3000.0, "small": 450.0, "hyb": 1500.0}  # noqa: RUF012 - declared a ClassVar above
    # Every SGLang leaves its load table, a killed one its semaphores too.
    shared_memory = r"sem\.mp-\w+|sglang_\w+\.shm|psm_\w+"

    def __init__(self, spec: EngineSpec, settings: SglangSettings | None = None) -> None:
        fitted = with_ipc_events(spec) if spec.events_endpoint.startswith("ipc://") else spec
        super().__init__(fitted, settings or SglangSettings.from_environment())

    def argv(self) -> list[str]:
        """Return the command line."""
        return serve_argv(self._spec, self._settings, self.model)

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return what is added to the environment; `scratch` takes temporary files."""
        return serve_environment(self._spec, self._settings, scratch)

    def warm_up(self) -> dict[str, object]:
        """Return a salted request: at page size 1 every token is cached and published."""
        prompt = list(range(100, 100 + WARM_UP_TOKENS))
        return {"prompt": prompt, "max_tokens": 2, "cache_salt": WARM_UP_SALT}


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
    return [*argv, *words_of(options), *flags, *settings.extra_args]


def serve_environment(spec: EngineSpec, settings: SglangSettings, scratch: Path) -> dict[str, str]:
    """Return what is added to the environment of one engine; `scratch` takes its temporary files."""
    return {
        **common_environment(settings, scratch),
        **_ENVIRONMENT,
        "SGLANG_CPU_OMP_THREADS_BIND": str(core_of(spec)),
        # what some options make SGLang compile; the options here do not
        "TORCH_EXTENSIONS_DIR": str(settings.env / "prefixroute-cache"),
    }
