"""The scripts for a look at real engines: the recorder of event streams, and the check of estimates."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import zmq

LIVE = Path(__file__).parents[2] / "live_tests"
DEADLINE_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        await asyncio.sleep(0.02)


# --- the recorder


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    found = importlib.util.spec_from_file_location("record_events", LIVE / "record_events.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_recorder_reads_live_and_replayed_messages_of_every_version(recorder: ModuleType) -> None:
    seq = (7).to_bytes(8, "big")
    assert recorder.parse([b"kv@n", seq, b"p"])[:3] == ("kv@n", 7, b"p")
    assert recorder.parse([b"", b"kv@n", seq, b"p"])[:3] == ("kv@n", 7, b"p")
    assert recorder.parse([b"", seq, b"p"])[:3] == ("", 7, b"p")
    assert recorder.parse([b"", b"", b"\xff" * 8, b""]) is None
    assert recorder.parse([b"", b"\xff" * 8, b""]) is None
    with pytest.raises(ValueError, match="not an event message"):
        recorder.parse([b"kv", b"short", b"p"])


def test_recording_keeps_each_message_once_and_ends_with_the_life(recorder: ModuleType, tmp_path: Path) -> None:
    recording = recorder.Recording(tmp_path / "out")

    def message(seq: int, payload: bytes) -> object:
        return recorder.RecordedMessage("t", seq, payload, 3)

    assert recording.take(message(0, b"\xc0"), 1.0)
    assert recording.take(message(0, b"\xc0"), 1.1)  # replayed and live
    assert recording.take(message(3, b"\xff\xff"), 2.0)
    assert not recording.take(message(0, b"\xc2"), 3.0)
    rows = [json.loads(line) for line in (tmp_path / "out" / "index.jsonl").read_text().splitlines()]
    assert [row["seq"] for row in rows] == [0, 3]
    assert recording.gaps == 2
    assert (tmp_path / "out" / "00003.msgpack").read_bytes() == b"\xff\xff"
    with pytest.raises(FileExistsError, match="empty folder"):
        recorder.Recording(tmp_path / "out")


def test_recorder_joins_replay_and_live(tmp_path: Path) -> None:
    out, live_at = tmp_path / "out", f"ipc://{tmp_path}/live"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.XPUB) as live:
        for endpoint in (router, live):
            endpoint.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        live.bind(live_at)
        argv = [LIVE / "record_events.py", out, "--events", live_at, "--replay", f"tcp://127.0.0.1:{port}"]
        process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, text=True)
        try:
            assert live.poll(DEADLINE_S * 1000), "no subscription"
            assert router.poll(DEADLINE_S * 1000), "no replay request"
            client, *asked = router.recv_multipart()
            assert asked == [b"", bytes(8)]
            for seq in (0, 1):
                router.send_multipart([client, b"", b"t", seq.to_bytes(8, "big"), b"\xc0"])
            router.send_multipart([client, b"", b"", b"\xff" * 8, b""])
            live.send_multipart([b"t", (1).to_bytes(8, "big"), b"\xc0"])
            live.send_multipart([b"t", (2).to_bytes(8, "big"), b"\xc4\x02\x00\xff"])
            asyncio.run(until((out / "00002.msgpack").exists))
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, said) == (0, f"{out}: 3 messages, 0 missing; stopped\n")
    rows = [json.loads(line) for line in (out / "index.jsonl").read_text().splitlines()]
    assert [(row["seq"], row["nframes"], row["msg"]) for row in rows] == [(0, 4, None), (1, 4, None), (2, 3, "00ff")]


# --- the check of estimates


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def run_check(*options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, LIVE / "check_estimates.py", *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=env, timeout=60)


def test_estimates_of_an_emulated_engine_are_exact(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
    }
    # The cache holds two of the longest prompts, so that it evicts; its blocks are larger than the node's.
    options = f"--port {port} --block-size 32 --capacity-blocks 80 --prefill-tokens-per-s 1e9 --decode-s-per-token 0"
    argv = [sys.executable, "-m", "prefixroute.emulator", *options.split(), "--kv-events-config", json.dumps(events)]
    engine = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until(lambda: answers(url)))
        done = run_check("--url", url, "--model", "m", "--requests", "12")
    finally:
        engine.kill()
        engine.wait()
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[1] == "estimates: 12 exact, 0 too high, 0 too low"
    assert ", 0 of them cached" not in said[0]
    assert " 0 removed" not in said[2]


def test_check_without_an_engine_says_how_to_make_one() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PREFIXROUTE_VLLM_ENV"}
    done = run_check(env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "setup_vllm.sh" in done.stderr
    assert len(done.stderr.splitlines()) == 1
