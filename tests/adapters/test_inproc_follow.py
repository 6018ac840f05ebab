"""The node's half of the in-process attachment, against a tap that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import prefixroute_sglang
import prefixroute_vllm
import pytest
from prefixroute_inproc import TapFollower, is_tap, path_of_rank, sources_of_tap
from prefixroute_inproc.frames import Batch, FrameError, Head, Resume, Splitter, Welcome, decode, encode
from publishing import Seen, payload, run, running, until
from tapping import folder, follower_of, following, removal, source, tap_at

from prefixroute.errors import UsageError

__all__ = ["folder"]

LIFE = 77
WELCOME = Welcome(LIFE, 0, 0, "vllm")


class BadTap:
    """Says what a test has it say: one list of frames, or of bytes, a connection; and notes what it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[Resume] = []
        self.says: list[bytes] = []
        self.hold = asyncio.Event()

    def say(self, *frames: Welcome | Batch | Head | Resume | bytes) -> None:
        """What the next connection hears, before it is ended (unless it is the last one)."""
        self.says.append(b"".join(frame if isinstance(frame, bytes) else encode(frame) for frame in frames))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies: list[bytes] = []
        splitter = Splitter(100)
        with contextlib.suppress(ConnectionError):
            while not bodies:
                data = await reader.read(100)
                if not data:
                    break
                bodies = splitter.feed(data)
            for body in bodies:
                frame = decode(body)
                assert isinstance(frame, Resume)
                self.asked.append(frame)
            if self.says:
                writer.write(self.says.pop(0))
                await writer.drain()
            if not self.says:
                await reader.read()
        writer.close()


@contextlib.asynccontextmanager
async def bad_tap(path: Path) -> AsyncIterator[BadTap]:
    tap = BadTap(path)
    server = await asyncio.start_unix_server(tap.serve, str(path))
    try:
        yield tap
    finally:
        server.close()


def batch(seq: int, life: int = 0) -> Batch:
    return Batch(seq, payload(life, seq))


def test_order_gaps_duplicates_and_heads(folder: Path) -> None:
    async def test() -> None:
        async with bad_tap(folder / "t") as tap:
            tap.say(WELCOME, batch(0), batch(1), batch(1), batch(0), batch(4), Head(5), Head(3), Head(7), batch(7))
            async with following(folder / "t") as (follower, seen):
                await seen.until(0, 1, "G2", 4, "G2", 7)
                stats = follower.stats()
        assert (stats.messages, stats.duplicates, stats.gaps, stats.missing, stats.last_seq) == (6, 2, 2, 4, 7)

    run(test)


def test_a_stream_that_proved_wrong_is_read_anew(folder: Path) -> None:
    async def test() -> None:
        async with bad_tap(folder / "t") as tap:
            tap.say(WELCOME, batch(0), batch(1))
            async with following(folder / "t") as (follower, seen):
                await seen.until(0, 1)
                assert follower.stats().connected
                tap.say(WELCOME, batch(1), batch(2))
                follower.resync()
                await seen.until(0, 1, "X", "G1", 1, 2)
                stats = follower.stats()
            assert [(asked.life, asked.next_seq) for asked in tap.asked] == [(0, 0), (0, 0)]
        assert (stats.resyncs, stats.restarts, stats.gaps) == (1, 0, 1)

    run(test)


def test_what_cannot_be_decoded_is_a_gap_of_one(folder: Path) -> None:
    async def test() -> None:
        async with bad_tap(folder / "t") as tap:
            tap.say(
                WELCOME, batch(0), Batch(1, b"\xc1"), Batch(2, msgspec.msgpack.encode([1.0, [["What"]], 0])), batch(3)
            )
            seen: list[object] = []
            follower = follower_of(folder / "t", seen.append)
            async with running(follower):  # type: ignore[arg-type]
                await until(lambda: len(seen) == 4)
            stats = follower.stats()
        assert (stats.decode_errors, stats.unknown_events, stats.missing) == ({"malformed": 1}, 1, 1)

    run(test)


NONSENSE = {
    "no frame": (b"\0\0\0\1\x09", "malformed"),
    "too long": (b"\xff\xff\xff\xff", "too_large"),
    "another program": (b"HTTP/1.1 200 OK\r\n", "too_large"),
    "another version": (encode(WELCOME).replace(b"PRtp\x01", b"PRtp\x02"), "version"),
    "no greeting": (encode(batch(0)), "malformed"),
    "two greetings": (encode(WELCOME) * 2, "malformed"),
    "a reader": (encode(WELCOME) + encode(Resume(1, 2)), "malformed"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_counted_and_the_connection_made_anew(folder: Path, name: str) -> None:
    said, kind = NONSENSE[name]

    async def test() -> None:
        async with bad_tap(folder / "t") as tap:
            tap.say(WELCOME, batch(0), batch(1))
            tap.say(said)
            tap.say(said)
            tap.say(WELCOME, batch(2))
            async with following(folder / "t") as (follower, seen):
                await seen.until(0, 1, 2)
                assert follower.stats().decode_errors == {kind: 2}
        assert tap.asked == [Resume(0, 0), *[Resume(LIFE, 2)] * 3]

    run(test)


def test_a_connection_that_breaks_inside_a_frame_is_made_anew(folder: Path) -> None:
    async def test() -> None:
        async with bad_tap(folder / "t") as tap:
            tap.say(WELCOME, batch(0), encode(batch(1))[:-1])
            tap.say(WELCOME, batch(1))
            async with following(folder / "t") as (follower, seen):
                await seen.until(0, 1)
                assert follower.stats().decode_errors == {}

    run(test)


def test_a_tap_that_says_nothing_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixroute_inproc.follow.WELCOME_S", 0.01)

    async def test() -> None:
        async with bad_tap(folder / "t") as tap, following(folder / "t") as (_, seen):
            await until(lambda: len(tap.asked) > 2)
            tap.say(WELCOME, batch(0))
            await seen.until(0)

    run(test)


@pytest.mark.parametrize("welcome", [WELCOME._replace(engine="sglang"), WELCOME._replace(rank=1)])
def test_another_engine_or_rank_is_the_users_mistake(folder: Path, welcome: Welcome) -> None:
    async def test() -> None:
        async with bad_tap(folder / "t") as tap:
            tap.say(welcome)
            with pytest.raises(UsageError, match=r"vllm, rank 0 was to be followed"):
                await follower_of(folder / "t", Seen()).run()

    run(test)


def test_a_path_that_is_no_socket_or_not_ours_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        (folder / "file").write_text("")
        with pytest.raises(UsageError, match="is no socket"):
            await follower_of(folder / "file", Seen()).run()
        async with bad_tap(folder / "t"):
            owner = os.stat(folder / "t").st_uid
            monkeypatch.setattr("prefixroute_inproc.follow.may_follow", lambda user: user != owner)
            with pytest.raises(UsageError, match="another user's"):
                await follower_of(folder / "t", Seen()).run()

    run(test)


def test_it_waits_for_an_engine_that_is_not_there_yet(folder: Path) -> None:
    async def test() -> None:
        async with following(folder / "t") as (follower, seen):
            with tap_at(folder / "t") as tap:
                tap.publish(removal(1))
                await seen.until(1)
            assert follower.stats().connections == 1

    run(test)


def test_it_runs_once_at_a_time(folder: Path) -> None:
    async def test() -> None:
        async with following(folder / "t") as (follower, _):
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="runs already"):
                await follower.run()

    run(test)


def test_what_a_callback_raises_ends_it(folder: Path) -> None:
    async def test() -> None:
        def refuse(batch: object) -> None:
            raise RuntimeError("mine")

        with tap_at(folder / "t") as tap:
            tap.publish(removal(1))
            with pytest.raises(RuntimeError, match="mine"):
                await follower_of(folder / "t", refuse).run()

    run(test)


def test_long_requests_without_any_event_make_a_stream_silent(folder: Path) -> None:
    async def test() -> None:
        with tap_at(folder / "t") as tap:
            async with following(folder / "t") as (follower, seen):
                for tokens in (1023, 1024, 2048):
                    follower.note_finished(tokens)
                assert not follower.stats().silent
                for _ in range(6):
                    follower.note_finished(4000)
                assert follower.stats().silent
                tap.publish(removal(1))
                await seen.until(1)
                assert not follower.stats().silent

    run(test)


def test_addresses() -> None:
    assert [is_tap(endpoint) for endpoint in ("tap:///x", "tcp://*:1", "ipc://x", "")] == [True, False, False, False]
    assert sources_of_tap("tap:///run/x", 2) == [source("/run/x"), source("/run/x.1", 1)]
    assert path_of_rank("/run/x", 3) == "/run/x.3"
    for bad in ("tap://run/x", "tap://", "/run/x", "tap:///a\0b"):
        with pytest.raises(UsageError, match="absolute path"):
            sources_of_tap(bad)
    with pytest.raises(UsageError, match="at most 107"):
        sources_of_tap("tap:///" + "x" * 106, 2)
    for engine in (prefixroute_vllm.ENGINE, prefixroute_sglang.ENGINE):
        TapFollower(source("/run/x"), Seen(), engine)


def test_a_frame_error_is_a_value_error_with_a_kind() -> None:
    error = FrameError("malformed", "why")
    assert (isinstance(error, ValueError), error.kind, str(error)) == (True, "malformed", "why")
