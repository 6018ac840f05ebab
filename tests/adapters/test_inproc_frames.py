"""The wire between a tap and its followers: any frame survives it, in whatever pieces, and any bytes are survived."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import prefixroute_zmq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixroute_inproc.frames import (
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_REQUEST_BYTES,
    MAX_SEQ,
    Batch,
    Frame,
    FrameError,
    Head,
    Resume,
    Splitter,
    Welcome,
    decode,
    encode,
)

NUMBERS = st.integers(0, MAX_SEQ)
FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Resume, NUMBERS, NUMBERS),
    st.builds(Welcome, st.integers(1, MAX_SEQ), st.integers(0, (1 << 32) - 1), NUMBERS, st.sampled_from(["", "vllm"])),
    st.builds(Batch, NUMBERS, st.binary(max_size=50)),
    st.builds(Head, NUMBERS),
)


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(0, 500), max_size=20))
def test_frames_survive_in_whatever_pieces_they_come(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encode, frames))
    splitter = Splitter(MAX_FRAME_BYTES)
    bodies: list[bytes] = []
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for begin, end in pairwise(edges):
        bodies += splitter.feed(stream[begin:end])
    assert [decode(body) for body in bodies] == frames


@given(
    st.one_of(
        st.binary(max_size=80), st.builds(lambda kind, rest: bytes([kind]) + rest, st.integers(0, 5), st.binary())
    )
)
def test_any_body_is_a_frame_or_an_error(body: bytes) -> None:
    try:
        frame = decode(body)
    except FrameError as error:
        assert error.kind in ("malformed", "version")
    else:
        assert encode(frame)[4:] == body or isinstance(frame, Welcome)  # whose name may be no text


@given(st.binary(max_size=200))
def test_any_bytes_are_split_or_refused(data: bytes) -> None:
    splitter = Splitter(100)
    try:
        bodies = splitter.feed(data)
    except FrameError as error:
        assert error.kind == "too_large"
    else:
        assert sum(len(body) + 4 for body in bodies) <= len(data)
        assert all(len(body) <= 100 for body in bodies)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "malformed"),
        (b"\x09", "malformed"),
        (encode(Head(1))[4:-1], "malformed"),
        (encode(Head(1))[4:] + b"\0", "malformed"),
        (encode(Batch(1, b""))[4:-1], "malformed"),
        (encode(Resume(1, 2))[4:] + b"\0", "malformed"),
        (encode(Resume(1, 2))[4:].replace(b"PRtp", b"PRxx"), "malformed"),
        (encode(Resume(1, 2))[4:].replace(b"PRtp\x01", b"PRtp\x02"), "version"),
        (encode(Welcome(1, 2, 3, "x"))[4:].replace(b"PRtp\x01", b"PRtp\x02"), "version"),
        (encode(Welcome(0, 2, 3, "x"))[4:], "malformed"),
        (encode(Welcome(1, 2, 3, "x"))[4:] + b"y" * 64, "malformed"),
    ],
)
def test_what_is_no_frame_has_a_kind(body: bytes, kind: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode(body)
    assert caught.value.kind == kind


def test_a_length_alone_allocates_nothing() -> None:
    splitter = Splitter(MAX_FRAME_BYTES)
    tracemalloc.start()
    try:
        assert splitter.feed(MAX_FRAME_BYTES.to_bytes(4, "big") + b"x") == []
        with pytest.raises(FrameError, match="at most"):
            Splitter(MAX_FRAME_BYTES).feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bounds_fit_what_they_bound() -> None:
    assert MAX_PAYLOAD_BYTES == prefixroute_zmq.MAX_PAYLOAD_BYTES
    assert len(encode(Batch(MAX_SEQ, b"x"))) - 4 == MAX_FRAME_BYTES - MAX_PAYLOAD_BYTES + 1
    assert len(encode(Resume(MAX_SEQ, MAX_SEQ))) <= MAX_REQUEST_BYTES
