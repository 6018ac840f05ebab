"""Attach vLLM and SGLang inside their own processes: no ZeroMQ between the engine and the node.

Two halves, in two processes or in one:
- the *tap* is in the engine: the entry points `vllm_plugin` and `sglang_plugin` put it where the publisher was. It
  needs this package and ``msgspec``, which both engines have; not the core, not numpy.
- the *follower* is beside the node: `TapFollower` reads the tap's Unix socket and gives `EngineBatch`es, as the
  followers over ZeroMQ do.

    PREFIXROUTE_TAP=/run/engine.sock vllm serve MODEL --kv-events-config '{"enable_kv_cache_events":true}'

    follower = TapFollower(EventSource("tap:///run/engine.sock"), on_batch, prefixroute_vllm.ENGINE)
    await follower.run()

Rule: everything here is imported on first use. Every process of an engine loads the entry points, most need none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .follow import TapFollower
    from .registry import add_sink, remove_sink
    from .tap import Tap, TapStats
    from .tap_address import is_tap, path_of_rank, sources_of_tap

__all__ = [
    "Tap",
    "TapFollower",
    "TapStats",
    "add_sink",
    "is_tap",
    "path_of_rank",
    "remove_sink",
    "sources_of_tap",
]

_ON_FIRST_USE = {
    "Tap": "tap",
    "TapFollower": "follow",
    "TapStats": "tap",
    "add_sink": "registry",
    "is_tap": "tap_address",
    "path_of_rank": "tap_address",
    "remove_sink": "registry",
    "sources_of_tap": "tap_address",
}


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
