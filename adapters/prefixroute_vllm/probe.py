"""Read a vLLM engine's load and capacity from its metrics page.

Rules, beside those of `prefixroute_streams.engine_http`:
1. The gauges lag: two prompts in prefill can still read as idle (0.32.0).
2. `kv_used` is what live requests use; cached blocks are free in vLLM's eyes.
3. An engine that is not awake takes no work. Sleep of level 1 and 2, which the page names, discards the KV cache;
   level 0, of which it only says that the engine is not awake, keeps it (0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prefixroute_streams import engine_http
from prefixroute_streams.engine_http import HttpProbe, Sample, as_count, whole

from prefixroute.load import LoadReport

# Up to 0.11 some metrics had the prefix vllm:gpu_, from 0.12 only the second name is left.
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_KV_USED: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CONFIG: Final = "vllm:cache_config_info"
_SLEEP: Final = "vllm:engine_sleep_state"
_WANTED: Final = frozenset({_RUNNING, _WAITING, *_KV_USED, _CONFIG, _SLEEP})


class LoadProbe(HttpProbe):
    """Asks one API server for the load of the vLLM engines behind it, one a data-parallel rank.

    `block_size` and the number of blocks come from the metrics page as well, so that capacity is that of this very
    process.
    """

    async def _ask(self) -> dict[int, LoadReport]:
        return load_reports(await self._metrics())


def load_reports(page: str) -> dict[int, LoadReport]:
    """Return what a vLLM metrics page says about each rank. O(page)."""
    ranks: dict[int, dict[str, float]] = {}
    capacity: dict[int, int] = {}
    blocks: dict[int, int] = {}
    resting: dict[int, str] = {}
    asleep: set[int] = set()
    for sample in parse_samples(page):
        rank = whole(sample.labels.get("engine", "0"))
        if rank is None:
            continue
        if sample.name == _CONFIG:
            capacity[rank] = _capacity_tokens(sample.labels)
            blocks[rank] = whole(sample.labels.get("block_size", "")) or 0
        elif sample.name == _SLEEP:
            state = sample.labels.get("sleep_state", "")
            if state == "awake":
                if not sample.value:
                    resting.setdefault(rank, "asleep (paused)")
            elif sample.value:
                resting[rank] = f"asleep ({state})"
                asleep.add(rank)
        else:
            ranks.setdefault(rank, {})[sample.name] = sample.value
    return {
        rank: LoadReport(
            running=as_count(values.get(_RUNNING, 0.0)),
            waiting=as_count(values.get(_WAITING, 0.0)),
            kv_used=min(1.0, next((values[name] for name in _KV_USED if name in values), 0.0)),
            capacity_tokens=capacity.get(rank, 0),
            refusing=rank in resting,
            reason=resting.get(rank, ""),
            asleep=rank in asleep,
            block_tokens=blocks.get(rank, 0),
        )
        for rank, values in ranks.items()
    }


def parse_samples(page: str) -> Iterator[Sample]:
    """Yield the samples of a vLLM page that matter here."""
    return engine_http.parse_samples(page, _WANTED)


def _capacity_tokens(labels: dict[str, str]) -> int:
    # One block is the null block, which holds nothing.
    blocks, size = whole(labels.get("num_gpu_blocks", "")), whole(labels.get("block_size", ""))
    return max(0, blocks - 1) * size if blocks and size else 0
