"""What the adapters of engines with ZeroMQ event streams share: order, sockets, addresses, careful decoding.

An adapter brings a decoder and the small differences, as an `Engine`; see `prefixroute_vllm` and `prefixroute_sglang`.
What is imported here needs the core alone; `follow` needs ``pyzmq``, `http` and `probe` need ``httpx``.
"""

from __future__ import annotations

from prefixroute_streams.batch import EventForm, Forms, decode_objects, decode_payload
from prefixroute_streams.engine_form import MAX_PAYLOAD_BYTES, Engine
from prefixroute_streams.sequence import Action, ReplayRequest, Sequencer, SequencerStats

from .address import Address, EventSource, endpoint_of_rank, live_address, replay_address

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
