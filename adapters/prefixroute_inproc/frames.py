"""What goes over a tap's Unix socket: frames, each a length and a body. Both ends are this package, on one host.

| frame     | from   | body after its kind                         | means                                        |
|-----------|--------|---------------------------------------------|----------------------------------------------|
| `Resume`  | reader | magic, version, life u64, next u64          | "of this life I have all below `next`"       |
| `Welcome` | tap    | magic, version, life, rank u32, next, name  | who this is, and which number it gives next  |
| `Batch`   | tap    | seq u64, payload                            | one batch, as the engine would publish it    |
| `Head`    | tap    | next u64                                    | all below `next` has been sent, or is lost   |

Rules:
1. Any bytes give frames or `FrameError`, and nothing is allocated because a length claims it. After an error the
   connection is of no use: where the next frame begins is not known.
2. A life is a random number of the tap's process, never 0; 0 in `Resume` means that nothing was seen.
3. Numbers are big-endian. Nothing but the standard library is imported here: engines load it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeAlias

MAX_PAYLOAD_BYTES: Final = 32 << 20
"""A larger batch is dropped by the tap and refused by the reader; as `prefixroute_zmq.MAX_PAYLOAD_BYTES`."""

MAX_REQUEST_BYTES: Final = 64
"""No frame of a reader is longer."""

MAX_FRAME_BYTES: Final = MAX_PAYLOAD_BYTES + 9
"""No frame of a tap is longer: kind and sequence come before a payload."""

MAX_SEQ: Final = (1 << 64) - 1

_MAGIC: Final = b"PRtp"
_VERSION: Final = 1
_NAME_BYTES: Final = 64
_LENGTH: Final = struct.Struct(">I")
_RESUME: Final = struct.Struct(">B4sBQQ")
_WELCOME: Final = struct.Struct(">B4sBQIQ")
_BATCH: Final = struct.Struct(">BQ")
_HEAD: Final = struct.Struct(">BQ")
_RESUME_KIND, _WELCOME_KIND, _BATCH_KIND, _HEAD_KIND = 1, 2, 3, 4


class FrameError(ValueError):
    """Bytes that are no frame; `kind` is a counter's word: ``too_large``, ``malformed`` or ``version``.

    `prefixroute.DecodeError` in all but name: that one would load the core into the engine.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Resume(NamedTuple):
    """A reader's first and only word."""

    life: int
    next_seq: int


class Welcome(NamedTuple):
    """A tap's first word: its life, its rank, the number of its next batch, and the engine's adapter by name."""

    life: int
    rank: int
    next_seq: int
    engine: str


class Batch(NamedTuple):
    """One batch."""

    seq: int
    payload: bytes


class Head(NamedTuple):
    """Nothing below `next_seq` will come on this connection any more."""

    next_seq: int


Frame: TypeAlias = Resume | Welcome | Batch | Head


def encode(frame: Frame) -> bytes:
    """Return a frame with its length in front. O(payload)."""
    if isinstance(frame, Batch):
        body = _BATCH.pack(_BATCH_KIND, frame.seq) + frame.payload
    elif isinstance(frame, Head):
        body = _HEAD.pack(_HEAD_KIND, frame.next_seq)
    elif isinstance(frame, Resume):
        body = _RESUME.pack(_RESUME_KIND, _MAGIC, _VERSION, frame.life, frame.next_seq)
    else:
        head = _WELCOME.pack(_WELCOME_KIND, _MAGIC, _VERSION, frame.life, frame.rank, frame.next_seq)
        body = head + frame.engine.encode()[:_NAME_BYTES]
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """Read the body of one frame. Raises `FrameError`. O(body)."""
    kind = body[0] if body else 0
    if kind == _BATCH_KIND and len(body) >= _BATCH.size:
        return Batch(_BATCH.unpack_from(body)[1], body[_BATCH.size :])
    if kind == _HEAD_KIND and len(body) == _HEAD.size:
        return Head(_HEAD.unpack(body)[1])
    if kind == _RESUME_KIND and len(body) == _RESUME.size:
        _, magic, version, *fields = _RESUME.unpack(body)
        _check(magic, version)
        return Resume(*fields)
    if kind == _WELCOME_KIND and 0 <= len(body) - _WELCOME.size <= _NAME_BYTES:
        _, magic, version, life, rank, next_seq = _WELCOME.unpack_from(body)
        _check(magic, version)
        if life == 0:
            raise FrameError("malformed", "a life is not 0")
        return Welcome(life, rank, next_seq, body[_WELCOME.size :].decode("utf-8", "replace"))
    raise FrameError("malformed", f"{len(body)} bytes of kind {kind} are no frame")


class Splitter:
    """Cuts a stream of bytes into the bodies of frames of at most `limit` bytes. Memory: one frame and one `feed`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that `data` completes, in order.

        Raises `FrameError`, when the bodies before the bad frame are lost with it: use it no more. O(data).
        """
        held = self._held
        held += data
        at, bodies = 0, []
        while len(held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, at)
            if length > self._limit:
                raise FrameError("too_large", f"a frame of {length} bytes, at most {self._limit} are read")
            end = at + _LENGTH.size + length
            if len(held) < end:
                break
            bodies.append(bytes(held[at + _LENGTH.size : end]))
            at = end
        del held[:at]
        return bodies


def _check(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise FrameError("malformed", "this is no tap")
    if version != _VERSION:
        raise FrameError("version", f"version {version} of the tap's wire, this is {_VERSION}: use one prefixroute")
