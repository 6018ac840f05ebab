"""One rank's event stream: which engine speaks on it, where it is, and what following it has brought.

Rules:
1. These are the same for every way to follow a stream: over ZeroMQ, from a tap, or one of your own.
2. What the engines share about a stream (live messages of three frames, a sequence from 0 in each process, replay with
   an end marker of all ones) is not described here: `Engine` holds only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from prefixroute.events import EngineBatch

from .sequence import BUFFER_STEPS

MAX_PAYLOAD_BYTES: Final = 32 << 20
"""A larger payload is refused unread. A step of 131,072 tokens with as many evictions needs about 2 MiB."""

DEFAULT_ENDPOINT: Final = "tcp://*:5557"
"""The default event endpoint of vLLM and SGLang."""


class Engine(NamedTuple):
    """What the entry-point group ``prefixroute.engines`` offers: a name, bytes to events, and small differences.

    `binding_hosts` are the texts in an event endpoint that make the engine bind it instead of connecting.
    """

    name: str
    decode: Callable[[bytes], EngineBatch]
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    binding_hosts: tuple[str, ...] = ("*", "::")


class EventSource(NamedTuple):
    """The event stream of one data-parallel rank, in the words of the engine's ``--kv-events-config``.

    `host` is where the engine runs, seen from here. `discovered` is False when the endpoints were computed from
    a base port because the engine could not tell. `bind` is whether the engine binds its event socket, None for
    what its endpoint implies.
    """

    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int = 0
    host: str = "127.0.0.1"
    buffer_steps: int = BUFFER_STEPS
    discovered: bool = False
    bind: bool | None = None


class FollowerStats(NamedTuple):
    """What one stream has brought since the follower was made.

    `decode_errors` counts undecodable messages by kind, `unknown_events` the events of readable ones that could not
    be used, `foreign` the messages of another rank on the same socket and `foreign_topics` those of another topic, by
    topic; they are dropped. `connected` is whether a publisher is at the other end now, `publishers` how many are, and
    `mixed` the restarts seen while there were several: two engines under one topic, which nothing tells apart. `silent`
    is True when long prompts were served and no message has come since the last one (`silence`).
    """

    messages: int
    replayed: int
    batches: int
    decode_errors: dict[str, int]
    unknown_events: int
    foreign: int
    connections: int
    gaps: int
    missing: int
    restarts: int
    replays: int
    replay_timeouts: int
    duplicates: int
    overflowed: int
    last_seq: int | None
    last_message_at: float
    replaying: bool
    silent: bool
    resyncs: int = 0
    connected: bool = True
    foreign_topics: Mapping[str, int] = MappingProxyType({})
    publishers: int = 1
    mixed: int = 0
