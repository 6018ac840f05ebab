"""What tells the kinds of engine apart: how each is found, followed and asked, how a request is aimed at one of its
ranks, and which calls empty its cache.

Rules:
1. KINDS is the only place that tells engines apart; the rest is the same for all.
2. A call that may or may not have emptied the cache is judged by what was asked and what was answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import prefixroute_sglang as sglang
import prefixroute_vllm as vllm
from prefixroute_inproc import TapFollower, is_tap
from prefixroute_sglang.discovery import HOW_TO_PUBLISH as SGLANG_PUBLISHES
from prefixroute_streams.probe import HttpProbe
from prefixroute_vllm.discovery import HOW_TO_PUBLISH as VLLM_PUBLISHES
from prefixroute_zmq import EventSource
from prefixroute_zmq.follow import StreamFollower

from prefixroute.events import EngineBatch

RANK_HEADER = "x-data-parallel-rank"
"""What vLLM takes for the rank that is meant."""
RANK_FIELD = "routed_dp_rank"
"""The same in the body of a request to SGLang."""

SESSION_HEADER = "x-session-id"
"""Where a request may name its session for vLLM."""

Headers = Sequence[tuple[str, str]]


def by_header(headers: Headers, body: bytes, rank: int) -> tuple[Headers, bytes]:
    """Aim a request at a rank as vLLM wants it."""
    return [*without_rank(headers), (RANK_HEADER, str(rank))], body


def by_field(headers: Headers, body: bytes, rank: int) -> tuple[Headers, bytes]:
    """Aim a request, whose body is a JSON object, at a rank as SGLang wants it. The other fields keep their bytes."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return headers, msgspec.json.encode({**fields, RANK_FIELD: rank})


def asking_for_report(headers: Headers, body: bytes, number: int) -> bytes | None:
    """A request's body, a JSON object, that makes vLLM tell the blocks it reuses; None for one with its own session."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    asked = fields.get("vllm_xargs")
    try:
        xargs = msgspec.json.decode(asked, type=dict[str, msgspec.Raw]) if asked and bytes(asked) != b"null" else {}
    except msgspec.ValidationError:
        return None  # the engine will say what is wrong with it
    if "session_id" in fields or "session_id" in xargs or SESSION_HEADER in {name for name, _ in headers}:
        return None
    session = f"{vllm.REPORT_SESSION}-{number}"
    xargs["kv_cache_report_mode"] = msgspec.Raw(b'"full"')
    return msgspec.json.encode({**fields, "session_id": session, "vllm_xargs": xargs})


def without_rank(headers: Headers) -> Headers:
    """The headers without one that names a rank: another engine's ranks are others."""
    return [(name, value) for name, value in headers if name != RANK_HEADER]


class AdminCall(NamedTuple):
    """A call that the engine answered with success: its query, what its body asked, and what the answer told.

    Both bodies are empty where they are no JSON object.
    """

    query: Mapping[str, str]
    asked: Mapping[str, Any]
    told: Mapping[str, Any]


Emptied: TypeAlias = Callable[[AdminCall], bool]
"""Whether a call has emptied the cache."""


def _always(call: AdminCall) -> bool:
    return True


def _not_refused(call: AdminCall) -> bool:
    """A reset while blocks are in use is answered with 200, and says that it did nothing; older engines do not say."""
    return call.told.get("success", True) is not False


def _deep_sleep(call: AdminCall) -> bool:
    """Level 0 only pauses, and keeps the cache."""
    return str(call.told.get("level", call.query.get("level", "1"))) != "0"


def _of_cache(call: AdminCall) -> bool:
    tags = call.asked.get("tags")
    return not isinstance(tags, list) or "kv_cache" in tags


def _unless_kept(call: AdminCall) -> bool:
    """New weights make the cache void, and SGLang flushes it unless it is told not to."""
    return call.asked.get("flush_cache", True) is not False and _not_refused(call)


# Waking up is not among them: what there was to empty was emptied at the fall, and a sleep of level 0 keeps it.
_VLLM_EMPTIES: Mapping[str, Emptied] = {
    "/reset_prefix_cache": _not_refused,
    "/sleep": _deep_sleep,
    "/release_kv_cache_memory": _always,
}
_SGLANG_EMPTIES: Mapping[str, Emptied] = {
    "/flush_cache": _always,
    "/release_memory_occupation": _of_cache,
    "/update_weights_from_disk": _unless_kept,
    "/update_weights_from_tensor": _unless_kept,
    "/update_weights_from_distributed": _unless_kept,
    "/update_weights_from_ipc": _unless_kept,
}


class LoadPush(NamedTuple):
    """How an engine that pushes its load is listened to."""

    discover: Callable[..., Awaitable[list[EventSource]]]
    follower: type[sglang.LoadFollower]


class Reports(NamedTuple):
    """How an engine is asked to tell again what a request reuses: whether it can, and the request's new body."""

    can: Callable[..., Awaitable[bool]]
    ask: Callable[[Headers, bytes, int], bytes | None]


class EngineKind(NamedTuple):
    """What an adapter offers, and how a request is aimed at one of the engine's ranks.

    `how_to_publish` is what to add to the command of an engine that publishes no events. `empties` are the paths of
    calls that empty the cache of every rank.
    """

    discover: Callable[..., Awaitable[list[EventSource]]]
    follower: type[StreamFollower]
    probe: type[HttpProbe]
    aim: Callable[[Headers, bytes, int], tuple[Headers, bytes]]
    how_to_publish: str
    empties: Mapping[str, Emptied]
    push: LoadPush | None = None
    reports: Reports | None = None


KINDS: Mapping[str, EngineKind] = {
    "vllm": EngineKind(
        vllm.discover,
        vllm.Follower,
        vllm.LoadProbe,
        by_header,
        VLLM_PUBLISHES,
        _VLLM_EMPTIES,
        reports=Reports(vllm.reports_on_request, asking_for_report),
    ),
    "sglang": EngineKind(
        sglang.discover,
        sglang.Follower,
        sglang.LoadProbe,
        by_field,
        SGLANG_PUBLISHES,
        _SGLANG_EMPTIES,
        LoadPush(sglang.discover_load, sglang.LoadFollower),
    ),
}
"""`EngineConfig.kind` -> its adapter."""

Follower: TypeAlias = StreamFollower | TapFollower


def follower_of(kind: EngineKind, source: EventSource, on_batch: Callable[[EngineBatch], None]) -> Follower:
    """What follows a source: by its endpoint, over ZeroMQ or in-process (``tap://``)."""
    if is_tap(source.endpoint):
        return TapFollower(source, on_batch, kind.follower.engine)
    return kind.follower(source, on_batch)
