#!/usr/bin/env python3
"""Record an engine's cache events as it published them: a fixture for an adapter, or a stream to look into.

    python live_tests/record_events.py --events ipc:///run/n1.kv.ipc --replay tcp://127.0.0.1:5558 OUT

Rules:
1. What is kept is the payload's bytes, untouched; the decoded form beside it is for reading only.
2. It begins with a replay from 0, so that nothing that the engine still remembers is missed.
3. One recording holds one life of one publisher: it ends when the sequence starts again.

| in OUT | is |
|---|---|
| `NNNNN.msgpack` | the payload of message NNNNN |
| `index.jsonl` | a line a message: seq, topic, nframes, recv (wall clock), bytes, msg (decoded, bytes as hex) |
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

END_OF_REPLAY = b"\xff" * 8
REPLAY_TIMEOUT_MS = 5000
POLL_MS = 200


class RecordedMessage(NamedTuple):
    """One published batch. `nframes` is 3 for a live message, 4 (3 before vLLM 0.26) for a replayed one."""

    topic: str
    seq: int
    payload: bytes
    nframes: int


def parse(frames: list[bytes]) -> RecordedMessage | None:
    """Read the frames of a live or replayed message, from the end; None for the end marker of a replay."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise ValueError(f"not an event message: {[len(frame) for frame in frames]}")
    if frames[-2] == END_OF_REPLAY:
        return None
    topic = frames[-3].decode("utf-8", "replace") if len(frames) > 2 else ""
    return RecordedMessage(topic, int.from_bytes(frames[-2], "big"), frames[-1], len(frames))


def readable(value: object) -> object:
    """Return decoded MessagePack as something JSON can hold; bytes become hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(readable(key)): readable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [readable(item) for item in value]
    return value


class Recording:
    """A folder that takes messages in sequence order, each once."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._index = out / "index.jsonl"
        if self._index.exists():
            raise FileExistsError(f"{self._index} exists already: choose an empty folder")
        self.last = -1
        self.gaps = 0

    def take(self, message: RecordedMessage, received: float) -> bool:
        """Keep one message; False when it starts another life, which this recording does not take."""
        if message.seq <= self.last:
            kept = self._payload_path(message.seq)
            return kept.exists() and kept.read_bytes() == message.payload
        self.gaps += message.seq - self.last - 1
        self.last = message.seq
        self._payload_path(message.seq).write_bytes(message.payload)
        try:
            decoded = readable(msgspec.msgpack.decode(message.payload))
        except msgspec.DecodeError:
            decoded = None
        row = {
            "seq": message.seq,
            "topic": message.topic,
            "nframes": message.nframes,
            "recv": received,
            "bytes": len(message.payload),
            "msg": decoded,
        }
        with self._index.open("a", encoding="utf-8") as index:
            index.write(json.dumps(row) + "\n")
        return True

    def _payload_path(self, seq: int) -> Path:
        return self._out / f"{seq:05d}.msgpack"


def replayed(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Iterator[RecordedMessage]:
    """Ask for everything from 0; TimeoutError when the engine falls silent before the end marker."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while socket.poll(REPLAY_TIMEOUT_MS):
            message = parse(socket.recv_multipart())
            if message is None:
                return
            yield message
    raise TimeoutError(f"no answer from {endpoint} within {REPLAY_TIMEOUT_MS / 1000:.0f} s")


def record(events: str, replay: str | None, recording: Recording, seconds: float | None) -> str:
    """Record until `seconds` have passed, SIGINT or SIGTERM comes, or the engine starts again; returns why."""
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    deadline = None if seconds is None else time.monotonic() + seconds
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.LINGER, 0)
        live.setsockopt(zmq.RCVHWM, 0)  # nothing may be dropped while the replay is written
        live.subscribe(b"")
        live.connect(events)
        for message in replayed(context, replay) if replay else ():
            recording.take(message, time.time())
        while not stopping:
            if deadline is not None and time.monotonic() >= deadline:
                return "time is up"
            if not live.poll(POLL_MS):
                continue
            arrived = parse(live.recv_multipart())
            if arrived is not None and not recording.take(arrived, time.time()):
                return f"the engine began a new life (sequence {arrived.seq} again)"
    return "stopped"


def main(argv: list[str] | None = None) -> int:
    """Run the recorder; the exit status is 0, or 1 with a one-line message."""
    parser = argparse.ArgumentParser(description="Record an engine's cache events.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--events", required=True, help="where the engine publishes, such as ipc:///run/kv.ipc")
    parser.add_argument("--replay", help="its replay endpoint, such as tcp://127.0.0.1:5558")
    parser.add_argument("--seconds", type=float, help="stop after so long; else at Ctrl-C")
    args = parser.parse_args(argv)
    try:
        recording = Recording(args.out)
        why = record(args.events, args.replay, recording, args.seconds)
    except (OSError, ValueError, zmq.ZMQError) as error:
        print(f"record_events: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {recording.last + 1 - recording.gaps} messages, {recording.gaps} missing; {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
