"""What a stream has brought, and when it counts as silent: the same for every way to follow one. Needs no ZeroMQ."""

from __future__ import annotations

from typing import Final, NamedTuple

LONG_PROMPT_TOKENS: Final = 1024
"""A prompt of this length fills a block of any engine, so the first such request must bring an event."""

SILENT_AFTER: Final = 8
"""Long requests without a first event after which a stream counts as silent (dynamo#11984, smg#1652)."""


class FollowerStats(NamedTuple):
    """What one stream has brought since the follower was made.

    `decode_errors` counts undecodable messages by kind, `unknown_events` the events of readable ones that could not
    be used, `foreign` the messages of another rank on the same socket, which are dropped. `connected` is whether a
    publisher is at the other end now. `silent` is True when long requests finished and no message has ever come: the
    engine does not publish, or both sides connect.
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
