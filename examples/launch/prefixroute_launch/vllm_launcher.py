"""A real vLLM on the CPU, as an engine to try things with.

Rules:
1. vLLM lives in an environment of its own, which `setup_vllm.sh` makes.
2. Nothing is reachable from outside this machine: HTTP and replay on 127.0.0.1, live events over ipc. vLLM
   binds its event socket only for ipc or for a wildcard (else it *connects*): a tcp wish becomes an ipc address.
   Ranks cannot share one, so several data-parallel ones keep their tcp addresses, and the sidecar binds.
3. What the engine cannot do as asked is rounded, and `RunningEngine` says what came out: block sizes are
   multiples of 32 on a CPU, one block more than the usable ones is asked for (vLLM keeps a null block).
4. Engine i computes on core i, modulo the cores of this process: left alone, all engines take the same core. So
   does each rank on its own.

| variable | means |
|---|---|
| `PREFIXROUTE_VLLM_ENV` | the virtual environment that holds vLLM; required |
| `PREFIXROUTE_VLLM_PRESET` | the made-up model: `small` (default), `tiny`, or the hybrid `hyb` |
| `PREFIXROUTE_VLLM_ARGS` | more arguments for `vllm serve`, quoted as in a shell |

Checked with vLLM 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from . import build_model
from .launcher import EngineSpec, kv_events_config, words_of
from .real_engine import EngineHome, RealLauncher, common_environment, core_of, with_ipc_events

BLOCK_UNIT = 32
"""vLLM's CPU attention takes blocks of 32 tokens and multiples; 16 fails at start."""

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the number of blocks is given separately
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class VllmSettings(EngineHome):
    """Which vLLM, which made-up model, and what else to pass to ``vllm serve``."""

    label = "vLLM"
    word = "vllm"

    @property
    def program(self) -> Path:
        """The ``vllm`` command."""
        return self.env / "bin" / "vllm"

    @property
    def installed(self) -> bool:
        """True when the environment has the command."""
        return self.program.exists()


class VllmLauncher(RealLauncher[VllmSettings]):
    """One ``vllm serve``."""

    reset_path = "/reset_prefix_cache"
    # 1024 uncached tokens took 1.2 s with `small`.
    prefill_tokens_per_s = {"tiny": 10000.0, "small": 850.0, "hyb": 5000.0}  # noqa: RUF012 - declared a ClassVar above
    # A killed vLLM leaves two segments.
    shared_memory = r"psm_\w+"

    def __init__(self, spec: EngineSpec, settings: VllmSettings | None = None) -> None:
        wanted = fitted(spec)
        if wanted.ranks == 1:
            wanted = with_ipc_events(wanted)
        super().__init__(wanted, settings or VllmSettings.from_environment())

    def argv(self) -> list[str]:
        """Return the command line."""
        return serve_argv(self._spec, self._settings, self.model)

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return what is added to the environment; `scratch` takes temporary files."""
        return serve_environment(self._spec, self._settings, scratch)

    def warm_up(self) -> dict[str, object]:
        """Return a request shorter than a block: it caches nothing and publishes nothing."""
        return {"prompt": list(range(100, 100 + BLOCK_UNIT // 2)), "max_tokens": 2}


def fitted(spec: EngineSpec) -> EngineSpec:
    """Return `spec` with a block size that vLLM takes, and blocks for the same number of tokens."""
    block_size = -(-spec.block_size // BLOCK_UNIT) * BLOCK_UNIT
    tokens = spec.block_size * spec.capacity_blocks
    return replace(spec, block_size=block_size, capacity_blocks=max(1, tokens // block_size))


def serve_argv(spec: EngineSpec, settings: VllmSettings, served_name: str) -> list[str]:
    """Return the command line of one engine; `spec` is fitted, and its events go over ipc unless it has ranks."""
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
    if spec.ranks > 1:
        options["--data-parallel-size"] = spec.ranks
    argv = [str(settings.program), "serve", str(settings.model_dir)]
    return [*argv, *words_of(options), *flags, *settings.extra_args]


def serve_environment(spec: EngineSpec, settings: VllmSettings, scratch: Path) -> dict[str, str]:
    """Return what is added to the environment of one engine; `scratch` takes its temporary files."""
    return {
        **common_environment(settings, scratch),
        **_ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(
            str(core_of(replace(spec, index=spec.index + rank))) for rank in range(spec.ranks)
        ),
        "VLLM_CACHE_ROOT": str(settings.env / "prefixroute-cache"),
    }
