"""The engine's half of the in-process attachment: what it drops, whom it serves, and that the engine never notices."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefixroute_inproc import Tap, TapFollower, path_of_rank, sources_of_tap
from prefixroute_inproc.frames import Batch, Head, Resume, Splitter, Welcome, decode, encode
from prefixroute_inproc.ring import MIN_ENTRIES, Ring
from prefixroute_inproc.tap_server import MAX_READERS, _user_of
from prefixroute_vllm import ENGINE
from publishing import Seen, run, running, told, until
from tapping import BlockStored, Reader, VllmBatch, folder, follower_of, following, removal, tap_at
from test_benchmarks import figures

from prefixroute.events import BlocksStored, EngineBatch

__all__ = ["folder"]


def frames(data: bytes) -> list[Any]:
    return [decode(body) for body in Splitter(1 << 20).feed(data)]


def turned(tap: Tap, turns: int = 3) -> None:
    """What the thread would do: accept, hear, answer."""
    for _ in range(turns):
        tap.turn()


# --- readers -----------------------------------------------------------------------------------------------


def test_every_batch_comes_in_order_and_as_zeromq_would_bring_it(folder: Path) -> None:
    async def test() -> None:
        got: list[EngineBatch] = []
        with tap_at(folder / "t", rank=0) as tap:
            stored = BlockStored([7, 8], None, list(range(64)), 32, extra_keys=[("salt",), None])
            for batch in (VllmBatch(1.5, [stored]), VllmBatch(2.5, [])):
                tap.publish(batch)
            follower = follower_of(folder / "t", got.append)
            async with running(follower):  # type: ignore[arg-type]
                await until(lambda: len(got) == 2)
        (event,) = got[0].events
        assert isinstance(event, BlocksStored)
        assert (event.handles, list(event.tokens), event.namespace.salt) == ((7, 8), list(range(64)), "salt")
        assert [batch.ts for batch in got] == [1.5, 2.5]

    run(test)


def test_a_full_queue_drops_and_the_drop_is_a_gap_that_heals(folder: Path) -> None:
    async def test() -> None:
        with tap_at(folder / "t", started=False, queue_batches=2) as tap:
            async with following(folder / "t") as (follower, seen):
                for number in range(5):
                    tap.publish(removal(number))
                await until(lambda: (tap.turn(), len(seen) == 3)[1])
                assert seen == ["0", "1", "G3"], "a drop at the end is told though nothing comes after it"
                for number in (5, 6, 7):
                    tap.publish(removal(number))
                await until(lambda: (tap.turn(), len(seen) == 6)[1])
                assert seen == ["0", "1", "G3", "5", "6", "G1"]
                tap.publish(removal(8))
                await until(lambda: (tap.turn(), len(seen) == 7)[1])
                assert (seen[-1], follower.stats().missing, tap.stats().dropped) == ("8", 4, 4)

    run(test)


def test_drops_are_told_in_the_log_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tap_at(None, started=False, queue_batches=1) as tap:
        for _ in range(3):
            tap.publish(removal(1))
            tap.publish(removal(2))
            tap.turn()
    assert (
        [record.message for record in caplog.records].count(
            "the tap of rank 0 is behind: batches were dropped, which readers see as gaps"
        )
        == len(caplog.records)
        == 1
    )


def test_publish_takes_whatever_it_gets_and_what_cannot_be_encoded_is_a_gap(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with tap_at(folder / "t") as tap:
            for batch in (None, VllmBatch(1.0, [object()]), removal(2), VllmBatch(3.0, [lambda: None])):
                tap.publish(batch)
            async with following(folder / "t") as (_, seen):
                await seen.until("G2", 2, "G1")
            assert (tap.stats().unusable, tap.stats().broken) == (3, False)
        assert len(caplog.records) == 1

    run(test)


def test_a_batch_that_is_too_large_is_a_gap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixroute_inproc.tap.MAX_PAYLOAD_BYTES", 100)

    async def test() -> None:
        with tap_at(folder / "t") as tap:
            tap.publish(removal(0))
            tap.publish(VllmBatch(1.0, [BlockStored([1], None, list(range(200)), 200)]))
            async with following(folder / "t") as (_, seen):
                await seen.until(0, "G1")

    run(test)


def test_a_late_reader_gets_what_is_kept_and_is_told_what_is_lost(folder: Path) -> None:
    async def test() -> None:
        with tap_at(folder / "t", ring_batches=0) as tap:
            total = MIN_ENTRIES + 10
            for number in range(total):
                tap.publish(removal(number))
            await until(lambda: tap.stats().queued == 0)
            async with following(folder / "t") as (follower, seen):
                await until(lambda: len(seen) == MIN_ENTRIES + 1)
                assert (seen[0], seen[1], seen[-1]) == ("G10", "10", str(total - 1))
                await until(lambda: not follower.stats().replaying)
                assert follower.stats().replayed == MIN_ENTRIES

    run(test)


def test_a_reader_that_comes_back_goes_on_where_it_was(folder: Path) -> None:
    async def test() -> None:
        with tap_at(folder / "t") as tap:
            seen = Seen()
            follower = follower_of(folder / "t", seen)
            async with running(follower):  # type: ignore[arg-type]
                tap.publish(removal(0))
                await seen.until(0)
            for number in (1, 2):
                tap.publish(removal(number))
            async with running(follower):  # type: ignore[arg-type]
                await seen.until(0, 1, 2)
                tap.publish(removal(3))
                await seen.until(0, 1, 2, 3)
            stats = follower.stats()
            assert (stats.connections, stats.gaps, stats.restarts, stats.duplicates) == (2, 0, 0, 0)

    run(test)


def test_an_engine_that_ends_is_forgotten_at_once_and_its_next_life_is_followed(folder: Path) -> None:
    async def test() -> None:
        async with following(folder / "t") as (follower, seen):
            with tap_at(folder / "t") as tap:
                tap.publish(removal(1))
                await seen.until(1)
            await seen.until(1, "X")
            with tap_at(folder / "t") as tap:
                tap.publish(removal(2))
                await seen.until(1, "X", 2)
            assert follower.stats().connections == 2

    run(test)


def test_a_restart_that_nobody_saw_is_told_by_the_life(folder: Path) -> None:
    async def test() -> None:
        seen = Seen()
        follower = follower_of(folder / "t", seen)
        with tap_at(folder / "t") as tap:
            tap.publish(removal(1))
            async with running(follower):  # type: ignore[arg-type]
                await seen.until(1)
        with tap_at(folder / "t") as tap:
            tap.publish(removal(2))  # the very number that was expected next would look right over ZeroMQ
            tap.publish(removal(3))
            async with running(follower):  # type: ignore[arg-type]
                await seen.until(1, "X", 2, 3)
        assert follower.stats().restarts == 1

    run(test)


def test_a_slow_reader_holds_up_nobody_and_comes_back_through_the_ring(folder: Path) -> None:
    async def test() -> None:
        with tap_at(folder / "t", ring_batches=0) as tap:
            slow = Reader(folder / "t")
            async with following(folder / "t") as (_, seen):
                total = 20 * MIN_ENTRIES
                for number in range(total):
                    tap.publish(removal(number))
                await until(lambda: len(seen) >= 1 and seen[-1] == str(total - 1))
            assert tap.stats().kept == MIN_ENTRIES, "what the slow one has not read is not kept for it"
            got: list[Any] = []
            splitter = Splitter(1 << 20)
            while not got or getattr(got[-1], "seq", 0) < total - 1:
                got += map(decode, splitter.feed(slow.socket.recv(1 << 16)))
            slow.close()
        assert isinstance(got[0], Welcome)
        seqs = [frame.seq for frame in got if isinstance(frame, Batch)]
        assert seqs == sorted(set(seqs))
        assert len(seqs) < total, "it was overtaken"
        assert seqs[-MIN_ENTRIES:] == list(range(total - MIN_ENTRIES, total))

    run(test)


def test_a_reader_with_nothing_to_come_is_told_so(folder: Path) -> None:
    with tap_at(folder / "t", started=False) as tap:
        reader = Reader(folder / "t")
        turned(tap)
        assert frames(reader.read()) == [Welcome(tap.life, 0, 0, "vllm"), Head(0)]
        reader.close()


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\x09", encode(Head(3)), encode(Resume(0, 0)) * 2, b"\xff" * 9],
)
def test_a_reader_that_talks_nonsense_is_cut_off(folder: Path, words: bytes) -> None:
    with tap_at(folder / "t", started=False) as tap, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(folder / "t"))
        peer.sendall(words)
        turned(tap)
        assert (tap.stats().readers, tap.stats().refused) == (0, 1)


def test_readers_that_go_are_forgotten_and_too_many_are_refused(folder: Path) -> None:
    with tap_at(folder / "t", started=False) as tap:
        readers = []
        for _ in range(MAX_READERS + 1):
            readers.append(Reader(folder / "t"))
            turned(tap, 2)
        assert (tap.stats().readers, tap.stats().refused) == (MAX_READERS, 1)
        for reader in readers:
            reader.close()
        turned(tap)
        assert tap.stats().readers == 0


def test_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tap_at(folder / "t", started=False) as tap:
        for user, counts in ((os.geteuid() + 1, (0, 1)), (os.geteuid(), (1, 1))):
            monkeypatch.setattr("prefixroute_inproc.tap_server._user_of", lambda connection, user=user: user)
            reader = Reader(folder / "t")
            turned(tap)
            assert (tap.stats().readers, tap.stats().refused) == counts
            reader.close()


def test_the_user_at_the_other_end_is_known() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert _user_of(ours) == os.geteuid()


def test_two_ranks_have_a_socket_and_a_stream_each(folder: Path) -> None:
    async def test() -> None:
        got: dict[int, list[EngineBatch]] = {0: [], 1: []}
        base = str(folder / "t")
        with tap_at(base, rank=0) as first, tap_at(path_of_rank(base, 1), rank=1) as second:
            sources = sources_of_tap(f"tap://{base}", 2)
            zero, one = (TapFollower(source, got[source.rank].append, ENGINE) for source in sources)
            async with running(zero), running(one):  # type: ignore[arg-type]
                first.publish(removal(1))
                second.publish(removal(2))
                second.publish(VllmBatch(3.0, [], 1))
                await until(lambda: (len(got[0]), len(got[1])) == (1, 2))
        assert [(batch.rank, told(batch)) for batch in got[0] + got[1][:1]] == [(0, "1"), (1, "2")]
        assert got[1][1].rank == 1

    run(test)


def test_a_reader_that_takes_nothing_is_cut_off_after_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tap_at(folder / "t", started=False) as tap:
        stuck, well = Reader(folder / "t"), Reader(folder / "t")
        turned(tap)
        for number in range(MIN_ENTRIES):
            tap.publish(VllmBatch(1.0, [BlockStored([number], None, [1000] * 512, 512)]))
            tap.turn()
            well.read()
        assert tap.stats().readers == 2, "it may be slow"
        monkeypatch.setattr("prefixroute_inproc.tap_server.STUCK_S", 0.0)
        turned(tap)
        assert (tap.stats().readers, tap.stats().refused) == (1, 1)
        stuck.close()
        well.close()


# --- the socket's file -------------------------------------------------------------------------------------


def test_the_socket_is_the_users_alone_and_goes_with_the_tap(folder: Path) -> None:
    with tap_at(folder / "t") as tap:
        assert stat.S_IMODE(os.stat(folder / "t").st_mode) == 0o600
        tap.close()
        assert not os.path.exists(folder / "t")


def test_the_socket_of_a_process_that_was_killed_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(folder / "t"))
    with tap_at(folder / "t", started=False) as tap:
        reader = Reader(folder / "t")
        turned(tap)
        assert tap.stats().readers == 1
        reader.close()


def test_what_is_not_this_taps_is_not_touched(folder: Path) -> None:
    (folder / "file").write_text("mine")
    with pytest.raises(OSError, match="is no socket"):
        Tap("vllm", path=str(folder / "file"))
    assert (folder / "file").read_text() == "mine"
    with pytest.raises(OSError, match="No such file"):
        Tap("vllm", path=str(folder / "none" / "t"))
    with pytest.raises(OSError, match="at most 107"):
        Tap("vllm", path=str(folder / ("x" * 108)))
    with tap_at(folder / "t", started=False):
        with pytest.raises(OSError, match="another process"):
            Tap("vllm", path=str(folder / "t"))
        os.rename(folder / "t", folder / "u")
        (folder / "t").write_text("somebody else's")
    assert (folder / "t").read_text() == "somebody else's"


def test_a_forked_process_does_not_keep_the_socket_alive(folder: Path) -> None:
    script = f"""
import os, socket, sys
from prefixroute_inproc import Tap
tap = Tap("vllm", path={str(folder / "t")!r})
if os.fork() == 0:
    print("ready", flush=True)
    sys.stdin.read()
os._exit(0)  # as by SIGKILL: nothing is cleaned up
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.wait(20)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer, pytest.raises(ConnectionRefusedError):
            peer.connect(str(folder / "t"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# --- the thread --------------------------------------------------------------------------------------------


def test_a_tap_that_breaks_ends_itself_and_the_engine_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with following(folder / "t") as (_, seen):
            with tap_at(folder / "t") as tap:
                tap.publish(removal(1))
                await seen.until(1)
                monkeypatch.setattr(Ring, "add", lambda *_: 1 // 0)
                tap.publish(removal(2))
                await until(lambda: tap.stats().broken)
                await seen.until(1, "X")
                tap.publish(removal(3))
                assert tap.stats().queued == 0

    with caplog.at_level(logging.ERROR):
        run(test)
    assert "the engine goes on without it" in caplog.text


def test_closing_hands_on_what_is_queued_and_may_be_done_twice(folder: Path) -> None:
    async def test() -> None:
        async with following(folder / "t") as (_, seen):
            with tap_at(folder / "t") as tap:
                tap.publish(removal(0))
                await seen.until(0)
                for number in range(1, 500):
                    tap.publish(removal(number))
                tap.close()
                tap.close()
                tap.publish(removal(999))
            await seen.until(*range(500), "X")

    run(test)


def test_the_ring_is_bounded_by_bytes_but_keeps_the_newest() -> None:
    ring = Ring(5000, 100)
    for seq in range(10):
        ring.add(seq, b"x" * 40)
    assert (ring.entries, ring.size, ring.next_seq) == (2, 80, 10)
    ring.add(12, b"x" * 400)
    assert (ring.entries, ring.size, ring.next_seq) == (1, 400, 13)
    ring.lose(11)
    assert ring.next_seq == 13
    assert ring.read(ring.seek(0), 10) == ([b"x" * 400], 11, 13)
    assert ring.read(ring.seek(13), 10) == ([], 11, -1)


def test_the_engine_loads_no_core_and_nothing_heavy() -> None:
    script = (
        "import sys, json; import prefixroute_inproc.vllm_plugin as v, prefixroute_inproc.sglang_plugin;"
        "v.register(); before = sorted(sys.modules); import prefixroute_inproc.tap;"
        "print(json.dumps([before, sorted(sys.modules)]))"
    )
    told = {name: value for name, value in environment().items() if not name.startswith("PREFIXROUTE_TAP")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=told)
    plugins, tap = (set(names) for names in json.loads(done.stdout))
    assert not plugins & {
        "vllm",
        "sglang",
        "numpy",
        "prefixroute",
        "msgspec",
        "asyncio",
        "zmq",
        "prefixroute_inproc.tap",
    }
    assert not tap & {"vllm", "sglang", "numpy", "prefixroute", "asyncio", "zmq", "prefixroute_zmq"}


def test_the_benchmark_measures_what_it_says() -> None:
    values = figures("tap.py", "--quick")
    assert set(values) == {
        "publish, median",
        "publish, 99th percentile",
        "queue.Queue.put, median",
        "thread, mean",
        "arrival at a follower, median",
    }
    assert all(value > 0 for value in values.values())
    assert values["publish, median"] <= values["publish, 99th percentile"]
