"""Ask an SGLang engine for its load: ``GET /v1/loads``, and the metrics page where that is not known.

Rules, beside those of `prefixroute_streams.engine_http` and `load`:
1. The metrics page (``--enable-metrics``) tells neither the backlog in tokens nor the prefill rate.
2. Its gauges are of the last step: after the last request they go on saying what that one used.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from prefixroute_streams.engine_http import (
    HttpProbe,
    as_count,
    fetch_json,
    parse_samples,
    whole,
)

from prefixroute.load import LoadReport

from .load_stats import Reporter, stats_of_loads

_RUNNING: Final = "sglang:num_running_reqs"
_WAITING: Final = "sglang:num_queue_reqs"
_USED: Final = "sglang:kv_used_tokens"
_USAGE: Final = "sglang:token_usage"
_CAPACITY: Final = "sglang:max_total_num_tokens"
_WANTED: Final = frozenset({_RUNNING, _WAITING, _USED, _USAGE, _CAPACITY})


class LoadProbe(HttpProbe):
    """Asks one API server for the load of the SGLang engine behind it, one report a data-parallel rank.

    The prefill rate is that between two readings, so keep the probe.
    """

    @cached_property
    def _reporter(self) -> Reporter:
        return Reporter()

    async def _ask(self) -> dict[int, LoadReport]:
        answer = await fetch_json(f"{self._url}/v1/loads", self._timeout_s, self._client)
        reports = {stat.rank: self._reporter.report(stat) for stat in stats_of_loads(answer)}
        return reports or load_reports(await self._metrics())


def load_reports(page: str) -> dict[int, LoadReport]:
    """Return what an SGLang metrics page says about each rank. O(page)."""
    ranks: dict[int, dict[str, float]] = {}
    for sample in parse_samples(page, _WANTED):
        rank = whole(sample.labels.get("dp_rank", "0"))
        if rank is not None:
            ranks.setdefault(rank, {})[sample.name] = sample.value
    return {rank: _report(values) for rank, values in ranks.items()}


def _report(values: dict[str, float]) -> LoadReport:
    capacity = as_count(values.get(_CAPACITY, 0.0))
    used = values[_USED] / capacity if _USED in values and capacity else values.get(_USAGE, 0.0)
    return LoadReport(
        running=as_count(values.get(_RUNNING, 0.0)),
        waiting=as_count(values.get(_WAITING, 0.0)),
        kv_used=min(1.0, used),
        capacity_tokens=capacity,
    )
