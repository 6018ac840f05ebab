"""Attach SGLang (0.5.9 to 0.5.23): decode its KV-cache events, keep their order, follow its sockets, read its load.

`decode_batch`, `batch_of`, `Sequencer` and `ENGINE` need the core alone. `Follower`, `discover`, `LoadFollower` and
`LoadProbe` talk to an engine and need ``pip install 'prefixroute[sglang]'``; they are imported on first use.

    for source in await discover("http://127.0.0.1:30000"):
        follower = Follower(source, lambda batch: node.apply(endpoint, batch, now()))
        asyncio.create_task(follower.run())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixroute_streams import (
    Action,
    Engine,
    EventSource,
    FollowerStats,
    ReplayRequest,
    Sequencer,
    SequencerStats,
    on_first_use,
)

from .decode import ENGINE, batch_of, decode_batch
from .load_stats import LoadStat, decode_load

if TYPE_CHECKING:
    from .discovery import Published, describe, discover, discover_load
    from .follow import Follower, LoadFollower, LoadFollowerStats
    from .probe import LoadProbe

__all__ = [
    "ENGINE",
    "Action",
    "Engine",
    "EventSource",
    "Follower",
    "FollowerStats",
    "LoadFollower",
    "LoadFollowerStats",
    "LoadProbe",
    "LoadStat",
    "Published",
    "ReplayRequest",
    "Sequencer",
    "SequencerStats",
    "batch_of",
    "decode_batch",
    "decode_load",
    "describe",
    "discover",
    "discover_load",
]

_ON_FIRST_USE = {
    "Follower": "follow",
    "LoadFollower": "follow",
    "LoadFollowerStats": "follow",
    "LoadProbe": "probe",
    "Published": "discovery",
    "describe": "discovery",
    "discover": "discovery",
    "discover_load": "discovery",
}

__getattr__ = on_first_use(__name__, _ON_FIRST_USE, "sglang")
