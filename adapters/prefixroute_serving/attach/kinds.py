"""The kinds of engine: how each is found, followed and asked, and how a request is aimed at one of its ranks.

Rule: `KINDS` names every difference between the engines. The calls that empty a cache are in `resets`, vLLM's reports
on request are in `repairs`; all other code is the same for both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec
import prefixroute_sglang as sglang
import prefixroute_vllm as vllm
from prefixroute_inproc import TapFollower, is_tap
from prefixroute_sglang.discovery import HOW_TO_PUBLISH as SGLANG_PUBLISHES
from prefixroute_streams import EventSource
from prefixroute_streams.engine_http import HttpProbe
from prefixroute_vllm.discovery import HOW_TO_PUBLISH as VLLM_PUBLISHES
from prefixroute_zmq.follow import StreamFollower

from prefixroute.events import EngineBatch

from .repairs import VLLM_REPORTS, Headers, Reports
from .resets import SGLANG_EMPTIES, VLLM_EMPTIES, EmptyingCalls

RANK_HEADER = "x-data-parallel-rank"
"""The request header that names a rank to vLLM."""
RANK_FIELD = "routed_dp_rank"
"""The field of a request's body that names a rank to SGLang."""


def by_header(headers: Headers, body: bytes, rank: int) -> tuple[Headers, bytes]:
    """Aim a request at a rank as vLLM wants it."""
    return [*without_rank(headers), (RANK_HEADER, str(rank))], body


def by_field(headers: Headers, body: bytes, rank: int) -> tuple[Headers, bytes]:
    """Aim a request, whose body is a JSON object, at a rank as SGLang wants it. The other fields keep their bytes."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return headers, msgspec.json.encode({**fields, RANK_FIELD: rank})


def without_rank(headers: Headers) -> Headers:
    """Return the headers without one that names a rank: a rank number means nothing to another engine."""
    return [(name, value) for name, value in headers if name != RANK_HEADER]


class LoadPush(NamedTuple):
    """How to listen to an engine that pushes its load."""

    discover: Callable[..., Awaitable[list[EventSource]]]
    follower: type[sglang.LoadFollower]


class EngineKind(NamedTuple):
    """An adapter's functions for one kind of engine, and how a request is aimed at one of the engine's ranks.

    `how_to_publish` is the option to add to the command of an engine that publishes no events. `empties` are the calls
    that empty the cache of every rank. `push` is None for an engine that does not push its load, and `reports` is None
    for an engine that cannot report which blocks a request reuses.
    """

    discover: Callable[..., Awaitable[list[EventSource]]]
    follower: type[StreamFollower]
    probe: type[HttpProbe]
    aim: Callable[[Headers, bytes, int], tuple[Headers, bytes]]
    how_to_publish: str
    empties: EmptyingCalls
    push: LoadPush | None = None
    reports: Reports | None = None


KINDS: Mapping[str, EngineKind] = {
    "vllm": EngineKind(
        vllm.discover,
        vllm.Follower,
        vllm.LoadProbe,
        by_header,
        VLLM_PUBLISHES,
        VLLM_EMPTIES,
        reports=VLLM_REPORTS,
    ),
    "sglang": EngineKind(
        sglang.discover,
        sglang.Follower,
        sglang.LoadProbe,
        by_field,
        SGLANG_PUBLISHES,
        SGLANG_EMPTIES,
        LoadPush(sglang.discover_load, sglang.LoadFollower),
    ),
}
"""`EngineConfig.kind` -> its adapter."""

Follower: TypeAlias = StreamFollower | TapFollower


def follower_of(kind: EngineKind, source: EventSource, on_batch: Callable[[EngineBatch], None]) -> Follower:
    """Return a follower of a source: over ZeroMQ, or in-process for an endpoint of ``tap://``."""
    if is_tap(source.endpoint):
        return TapFollower(source, on_batch, kind.follower.engine)
    return kind.follower(source, on_batch)
