"""What every adapter of an engine needs, whatever its events come over: decoding, order, and questions over HTTP.

An adapter brings a decoder from bytes to `EngineBatch`, as an `Engine`, and gets the rest from here. No name here needs
ZeroMQ, and only `HttpProbe`, `fetch` and `fetch_json` need ``httpx``: they are imported on first use. How to follow
sockets with it is in `prefixroute_zmq`, how to follow a tap in `prefixroute_inproc`.

| file | is |
|---|---|
| `source.py` | `Engine`, `EventSource`, `FollowerStats`: one rank's stream, and what came of it |
| `topics.py` | which messages of a socket are this stream's |
| `silence.py` | whether something should have come by now |
| `trouble.py` | what is wrong with a stream, in words |
| `sequence.py` | `Sequencer`: messages and replay answers into batches in the engine's order; gaps and restarts |
| `batch.py` | one published batch, as bytes or objects, into events, where one bad event costs itself alone |
| `fields.py` | the fields of vLLM's and SGLang's events, read with suspicion |
| `layout.py` | the maps that both send today, read fast |
| `engine_http.py` | one answer, a metrics page, the load of an engine with an HTTP server |
| `lazy.py` | names that need an extra |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .batch import EventForm, Forms, decode_objects, decode_payload
from .lazy import on_first_use
from .sequence import Action, ReplayRequest, Sequencer, SequencerStats
from .source import MAX_PAYLOAD_BYTES, Engine, EventSource, FollowerStats

if TYPE_CHECKING:
    from .engine_http import HttpProbe, fetch, fetch_json

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "Action",
    "Engine",
    "EventForm",
    "EventSource",
    "FollowerStats",
    "Forms",
    "HttpProbe",
    "ReplayRequest",
    "Sequencer",
    "SequencerStats",
    "decode_objects",
    "decode_payload",
    "fetch",
    "fetch_json",
    "on_first_use",
]

_ON_FIRST_USE = {"HttpProbe": "engine_http", "fetch": "engine_http", "fetch_json": "engine_http"}

__getattr__ = on_first_use(__name__, _ON_FIRST_USE, "vllm")
