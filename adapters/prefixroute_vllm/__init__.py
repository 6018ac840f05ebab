"""Attach vLLM (0.9 to 0.33): decode its KV-cache events, keep their order, follow its sockets, read its load.

`decode_batch`, `Sequencer` and `ENGINE` need the core alone. `Follower`, `discover` and `LoadProbe` talk to an engine
and need ``pip install 'prefixroute[vllm]'``; they are imported on first use.

    source, = await discover("http://127.0.0.1:8000", endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    follower = Follower(source, lambda batch: node.apply(endpoint, batch, now()))
    await follower.run()
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from prefixroute.events import EngineBatch

from .decode import decode_batch
from .sequence import Action, ReplayRequest, Sequencer, SequencerStats

if TYPE_CHECKING:
    from .discovery import EventSource, discover
    from .follow import Follower, FollowerStats
    from .probe import LoadProbe

__all__ = [
    "ENGINE",
    "Action",
    "Engine",
    "EventSource",
    "Follower",
    "FollowerStats",
    "LoadProbe",
    "ReplayRequest",
    "Sequencer",
    "SequencerStats",
    "decode_batch",
    "discover",
]

_ON_FIRST_USE = {
    "EventSource": "discovery",
    "Follower": "follow",
    "FollowerStats": "follow",
    "LoadProbe": "probe",
    "discover": "discovery",
}


class Engine(NamedTuple):
    """What the entry-point group ``prefixroute.engines`` offers: a name, and bytes to events."""

    name: str
    decode: Callable[[bytes], EngineBatch]


ENGINE = Engine("vllm", decode_batch)
"""Found by its name through the entry-point group."""


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("zmq", "httpx"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {error.name}: pip install 'prefixroute[vllm]'", name=error.name
        ) from error
