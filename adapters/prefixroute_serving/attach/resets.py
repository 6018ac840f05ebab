"""Calls that empty an engine's cache: which calls they are, and what happens at once when one succeeds.

The engine's own event for it comes late: vLLM queues its AllBlocksCleared and sends it with the next step, which an
idle engine makes only when a request comes. Until then peers would send it prompts for blocks that it no longer holds.
So a call that this node passes on and that empties the cache counts at once. Rules:
1. If the path alone does not tell whether a call emptied the cache, the request and the answer are examined.
2. The engine's stream is in order. Events before the engine's own clear were made before the reset, and are void: they
   are applied, and cleared again. Stores after the reset come behind the engine's clear, and are never touched.
3. If the engine's clear came while the call was under way, there is nothing left to do.
4. Rule 2 holds for `UNDER_WAY_S` seconds, longer than a message is under way: an engine that announces no clear, or
   whose clear was lost (a gap), must not be kept empty for ever. A late replay after that may bring back void blocks;
   the first request that they mislead corrects that, since its step brings the engine's clear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from prefixroute import BlocksCleared, EngineBatch, Node, StreamGap, StreamRestarted
from prefixroute.events import GPU

UNDER_WAY_S = 1.0


class AdminCall(NamedTuple):
    """A call that the engine answered with success: its query, its body (`asked`), and the body of the answer (`told`).

    A body is empty where it is no JSON object.
    """

    query: Mapping[str, str]
    asked: Mapping[str, Any]
    told: Mapping[str, Any]


Emptied: TypeAlias = Callable[[AdminCall], bool]
"""A test whether a call has emptied the cache."""

EmptyingCalls: TypeAlias = Mapping[str, Emptied]
"""Path -> the test whether a call of this path has emptied the cache of every rank."""


def _always(call: AdminCall) -> bool:
    return True


def _not_refused(call: AdminCall) -> bool:
    """Return False if a 200 says that nothing was reset, as while blocks are in use; older engines do not say so."""
    return call.told.get("success", True) is not False


def _deep_sleep(call: AdminCall) -> bool:
    """Return whether a sleep empties the cache: level 0 only pauses the engine, and keeps the cache."""
    return str(call.told.get("level", call.query.get("level", "1"))) != "0"


def _of_cache(call: AdminCall) -> bool:
    tags = call.asked.get("tags")
    return not isinstance(tags, list) or "kv_cache" in tags


def _unless_kept(call: AdminCall) -> bool:
    """Return whether new weights emptied the cache: SGLang flushes it unless the request says not to."""
    return call.asked.get("flush_cache", True) is not False and _not_refused(call)


# Waking up is not among them: the cache was emptied when the engine fell asleep, and a sleep of level 0 keeps it.
VLLM_EMPTIES: EmptyingCalls = {
    "/reset_prefix_cache": _not_refused,
    "/sleep": _deep_sleep,
    "/release_kv_cache_memory": _always,
}
SGLANG_EMPTIES: EmptyingCalls = {
    "/flush_cache": _always,
    "/release_memory_occupation": _of_cache,
    "/update_weights_from_disk": _unless_kept,
    "/update_weights_from_tensor": _unless_kept,
    "/update_weights_from_distributed": _unless_kept,
    "/update_weights_from_ipc": _unless_kept,
}


class OwnResets:
    """The endpoints that a call through this node emptied, and whose engine's own clear has not come yet."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._until: dict[str, float] = {}

    def clears(self, endpoints: Iterable[str]) -> dict[str, int]:
        """Return how often each endpoint was cleared so far; take this before the call."""
        return {endpoint: self._node.residency(endpoint).counts.clears for endpoint in endpoints}

    def emptied(self, endpoints: Mapping[str, int], before: Mapping[str, int], now: float) -> None:
        """Note that a call emptied the caches of `endpoints`, given with their ranks; `before` is from `clears`."""
        for endpoint, rank in endpoints.items():
            if self._node.residency(endpoint).counts.clears == before.get(endpoint):
                self._node.apply(endpoint, EngineBatch((BlocksCleared(GPU),), rank), now)
                self._until[endpoint] = now + UNDER_WAY_S

    def passed(self, endpoint: str, batch: EngineBatch, now: float) -> EngineBatch:
        """Return a batch as it is to be applied: with a clear behind it while the engine's own has not come."""
        if endpoint not in self._until:
            return batch
        marks = (BlocksCleared, StreamGap, StreamRestarted)
        if now >= self._until[endpoint] or any(isinstance(event, marks) for event in batch.events):
            del self._until[endpoint]
            return batch
        return replace(batch, events=(*batch.events, BlocksCleared(GPU)))
