"""Attach vLLM (0.9 to 0.33): decode its KV-cache events, keep their order, follow its sockets, read its load.

`decode_batch`, `Sequencer` and `ENGINE` need the core alone. `Follower`, `discover` and `LoadProbe` talk to an engine
and need ``pip install 'prefixroute[vllm]'``; they are imported on first use.

    source, = await discover("http://127.0.0.1:8000", endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    follower = Follower(source, lambda batch: node.apply(endpoint, batch, now()))
    await follower.run()
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

from .decode import ENGINE, REPORT_SESSION, batch_of, decode_batch

if TYPE_CHECKING:
    from .discovery import discover, reports_on_request
    from .follow import Follower
    from .probe import LoadProbe

__all__ = [
    "ENGINE",
    "REPORT_SESSION",
    "Action",
    "Engine",
    "EventSource",
    "Follower",
    "FollowerStats",
    "LoadProbe",
    "ReplayRequest",
    "Sequencer",
    "SequencerStats",
    "batch_of",
    "decode_batch",
    "discover",
    "reports_on_request",
]

_ON_FIRST_USE = {
    "Follower": "follow",
    "LoadProbe": "probe",
    "discover": "discovery",
    "reports_on_request": "discovery",
}

__getattr__ = on_first_use(__name__, _ON_FIRST_USE, "vllm")
