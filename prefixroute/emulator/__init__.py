"""An engine stand-in: vLLM's prefix cache, service times, HTTP API and event wire, without a model.

For testing an integration, and for the four-node example. The cache, the service model and the scheduler
are plain state machines that need nothing beyond the core's requirements; `EmulatedEngine` and the program
``python -m prefixroute.emulator`` need the extra ``demo``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixroute.emulator.answer import Answer
from prefixroute.emulator.block_cache import BlockCache, CacheScope, CacheStats, Lease
from prefixroute.emulator.emulator_config import EngineConfig, KvEventsConfig
from prefixroute.emulator.scheduler import Busy, Limits, Load, Output, RunningSequence, Scheduler, StepEvents
from prefixroute.emulator.service_times import ServiceModel
from prefixroute.emulator.tokenizer import ChatMessage, encode, render_chat
from prefixroute.emulator.vllm_wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, CacheEvent

if TYPE_CHECKING:
    from prefixroute.emulator.emulated_engine import EmulatedEngine

__all__ = [
    "AllBlocksCleared",
    "Answer",
    "Batch",
    "BlockCache",
    "BlockRemoved",
    "BlockStored",
    "Busy",
    "CacheEvent",
    "CacheScope",
    "CacheStats",
    "ChatMessage",
    "EmulatedEngine",
    "EngineConfig",
    "KvEventsConfig",
    "Lease",
    "Limits",
    "Load",
    "Output",
    "RunningSequence",
    "Scheduler",
    "ServiceModel",
    "StepEvents",
    "encode",
    "render_chat",
]


def __getattr__(name: str) -> object:
    if name != "EmulatedEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from prefixroute.emulator.emulated_engine import EmulatedEngine
    except ModuleNotFoundError as error:
        raise ImportError(
            f"EmulatedEngine needs {error.name}: pip install 'prefixroute[demo]'", name=error.name
        ) from error
    return EmulatedEngine
