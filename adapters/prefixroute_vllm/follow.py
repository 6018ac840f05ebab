"""Follow one rank's event stream of vLLM over ZeroMQ."""

from __future__ import annotations

from prefixroute_zmq.follow import LONG_PROMPT_TOKENS, SILENT_AFTER, FollowerStats, StreamFollower

from .decode import ENGINE

__all__ = ["LONG_PROMPT_TOKENS", "SILENT_AFTER", "Follower", "FollowerStats"]


class Follower(StreamFollower):
    """`prefixroute_zmq.follow.StreamFollower` for vLLM 0.9 to 0.33."""

    engine = ENGINE
