"""Follow event streams over ZeroMQ: the sockets, their addresses, and who binds them.

`prefixroute_zmq.follow.StreamFollower` does it for any engine that publishes as vLLM and SGLang do: a subclass names
its `Engine`, see `prefixroute_vllm.follow`. Needs ``pyzmq``; what is imported here needs the core alone.

| file | is |
|---|---|
| `address.py` | a consumer's end of an engine's endpoints: of each rank, and who binds |
| `follow.py` | `StreamFollower`: one rank's sockets, read into a `Sequencer` |

What needs no ZeroMQ is in `prefixroute_streams`; its names for adapters can be had here too.
"""

from __future__ import annotations

from prefixroute_streams import (
    MAX_PAYLOAD_BYTES,
    Action,
    Engine,
    EventForm,
    EventSource,
    Forms,
    ReplayRequest,
    Sequencer,
    SequencerStats,
    decode_objects,
    decode_payload,
)

from .address import Address, endpoint_of_rank, live_address, replay_address

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "Action",
    "Address",
    "Engine",
    "EventForm",
    "EventSource",
    "Forms",
    "ReplayRequest",
    "Sequencer",
    "SequencerStats",
    "decode_objects",
    "decode_payload",
    "endpoint_of_rank",
    "live_address",
    "replay_address",
]
