"""Follow one rank's event stream of vLLM over ZeroMQ."""

from __future__ import annotations

from prefixroute_zmq.follow import StreamFollower

from .decode import ENGINE


class Follower(StreamFollower):
    """`prefixroute_zmq.follow.StreamFollower` for vLLM 0.9 to 0.33."""

    engine = ENGINE
