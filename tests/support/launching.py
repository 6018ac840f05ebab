"""What the tests of real engines' launchers share: stand-ins for an engine's programs, and how every launcher ends.

A stand-in answers /health and completions, starts a child, leaves a temporary file, and notes below `tmp_path` what it
was given and how it ended. `STAND_IN_MODE` says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefixroute_launch.launcher import EngineSpec, Launcher

DEADLINE_S = 60.0

SERVER = """
import http.server, json, mmap, os, signal, subprocess, sys, tempfile
from pathlib import Path
notes = Path(os.environ["STAND_IN_NOTES"])
mode = os.environ.get("STAND_IN_MODE", "")
if mode == "dies":
    sys.exit("this machine has no CPU engine")
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(os.path.join(tempfile.gettempdir(), "left-behind"), "w").close()

def end(number, frame):
    (notes / "signal").write_text(signal.Signals(number).name)
    if mode != "stubborn":
        os._exit(0)

signal.signal(signal.SIGINT, end)
asked = []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404)
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        (notes / "asked").write_text(json.dumps(asked))
        self.answer(503 if mode == "broken" else 200)
    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
(notes / "started").write_text(
    json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ), "child": child.pid, "pid": os.getpid()})
)
server.serve_forever()
"""


def write_program(path: Path, body: str) -> None:
    """Make an executable that runs `body` with this interpreter, whatever the length of its path."""
    script = path.with_suffix(".source.py")
    script.write_text(textwrap.dedent(body))
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    path.chmod(0o755)


def make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty environment, and folders for notes and temporary files."""
    env = tmp_path / "venv"
    (env / "bin").mkdir(parents=True)
    for name in ("notes", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("STAND_IN_NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return env


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_note(tmp_path: Path, name: str) -> Any:
    return json.loads((tmp_path / "notes" / name).read_text())


def running(pid: int) -> bool:
    """True while the process exists and is not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        await asyncio.sleep(0.02)


class EndsContract:
    """How every launcher of a real engine ends. A subclass makes one, from the fixtures `spec` and `settings`."""

    def make(self, spec: EngineSpec, settings: Any) -> Launcher:
        """A launcher of the stand-in."""
        raise AssertionError("a subclass makes the launcher")

    def segments(self, pid: int) -> list[Path]:
        """The shared memory that the stand-in made."""
        return []

    async def started(self, spec: EngineSpec, settings: Any, tmp_path: Path) -> tuple[Launcher, int, int]:
        launcher = self.make(spec, settings)
        engine = await launcher.start()
        await launcher.wait_ready()
        child = read_note(tmp_path, "started")["child"]
        assert running(engine.pid)
        assert running(child)
        assert all(segment.exists() for segment in self.segments(engine.pid))
        assert list((tmp_path / "tmp").rglob("left-behind"))
        return launcher, engine.pid, child

    def assert_nothing_is_left(self, tmp_path: Path, pid: int) -> None:
        assert not any(segment.exists() for segment in self.segments(pid))
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_stop_interrupts_the_leader_and_leaves_nothing(
        self, spec: EngineSpec, settings: Any, tmp_path: Path
    ) -> None:
        async def scenario() -> None:
            launcher, pid, child = await self.started(spec, settings, tmp_path)
            await launcher.stop()
            assert (tmp_path / "notes" / "signal").read_text() == "SIGINT"
            await until(lambda: not running(pid) and not running(child))
            self.assert_nothing_is_left(tmp_path, pid)
            await launcher.stop()
            launcher.kill()

        asyncio.run(scenario())

    def test_stop_kills_an_engine_that_ignores_the_interrupt(
        self, spec: EngineSpec, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAND_IN_MODE", "stubborn")
        monkeypatch.setattr("prefixroute_launch.real_engine._STOP_GRACE_S", 0.2)

        async def scenario() -> None:
            launcher, pid, child = await self.started(spec, settings, tmp_path)
            await launcher.stop()
            assert (tmp_path / "notes" / "signal").read_text() == "SIGINT"
            await until(lambda: not running(pid) and not running(child))
            self.assert_nothing_is_left(tmp_path, pid)

        asyncio.run(scenario())

    def test_kill_is_a_crash_without_a_signal_to_handle(self, spec: EngineSpec, settings: Any, tmp_path: Path) -> None:
        async def scenario() -> None:
            launcher, pid, child = await self.started(spec, settings, tmp_path)
            launcher.kill()
            await until(lambda: not running(pid) and not running(child))
            assert not (tmp_path / "notes" / "signal").exists()
            self.assert_nothing_is_left(tmp_path, pid)

        asyncio.run(scenario())

    def test_stop_and_kill_before_start_do_nothing(self, spec: EngineSpec, settings: Any) -> None:
        launcher = self.make(spec, settings)
        asyncio.run(launcher.stop())
        launcher.kill()
