"""Calls that empty an engine's cache: which they are, and what is done at once when one succeeds.

An engine's own word for it comes only with its next output: vLLM queues its AllBlocksCleared and sends it with the next
step, which an idle engine makes when a request comes. Until then peers would send it prompts for what it no longer
holds. So a call that this node passes on and that empties the cache counts at once. Rules:
1. A call that may or may not have emptied the cache is judged by what was asked and what was answered.
2. The engine's stream is in order. What comes before its own clear was made before the reset, and is void: it is
   applied, and cleared again. What was stored after the reset comes behind the engine's clear, and is never touched.
3. If the engine's clear came while the call was under way, there is nothing left to do.
4. Rule 2 holds for `UNDER_WAY_S`, longer than a message is under way: an engine that announces no clear, or whose clear
   was lost (a gap), must not be kept empty for ever. What a late replay brings back after that is wrong no longer than
   until the first request that it misleads, whose step brings the engine's clear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from prefixroute import BlocksCleared, EngineBatch, Node, StreamGap, StreamRestarted
from prefixroute.events import GPU

UNDER_WAY_S = 1.0


class AdminCall(NamedTuple):
    """A call that the engine answered with success: its query, what its body asked, and what the answer told.

    Both bodies are empty where they are no JSON object.
    """

    query: Mapping[str, str]
    asked: Mapping[str, Any]
    told: Mapping[str, Any]


Emptied: TypeAlias = Callable[[AdminCall], bool]
"""Whether a call has emptied the cache."""

EmptyingCalls: TypeAlias = Mapping[str, Emptied]
"""Path -> whether a call of it has emptied the cache of every rank."""


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
    """Which endpoints were emptied by a call of this node's, and await their engine's own word for it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._until: dict[str, float] = {}

    def clears(self, endpoints: Iterable[str]) -> dict[str, int]:
        """How often each endpoint was cleared so far: take it before the call."""
        return {endpoint: self._node.residency(endpoint).counts.clears for endpoint in endpoints}

    def emptied(self, endpoints: Mapping[str, int], before: Mapping[str, int], now: float) -> None:
        """The call emptied the caches of `endpoints`, given with their ranks, cleared so often `before` it."""
        for endpoint, rank in endpoints.items():
            if self._node.residency(endpoint).counts.clears == before.get(endpoint):
                self._node.apply(endpoint, EngineBatch((BlocksCleared(GPU),), rank), now)
                self._until[endpoint] = now + UNDER_WAY_S

    def passed(self, endpoint: str, batch: EngineBatch, now: float) -> EngineBatch:
        """A batch as it is to be applied."""
        if endpoint not in self._until:
            return batch
        marks = (BlocksCleared, StreamGap, StreamRestarted)
        if now >= self._until[endpoint] or any(isinstance(event, marks) for event in batch.events):
            del self._until[endpoint]
            return batch
        return replace(batch, events=(*batch.events, BlocksCleared(GPU)))
