"""Child processes that never outlive their parent's use of them, and the ports that they listen on.

Rules:
1. Every child leads a process group of its own, so that whatever it starts ends with it, and nothing else does.
2. A child is ended by its id: politely first (SIGINT to the leader), then by SIGKILL to its group.
3. A child's output goes to a file; when it dies early, the end of that file is in the error message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

HOST = "127.0.0.1"
"""Where everything that is started here listens."""

_PORTS = range(20_000, 32_000)
_POLL_S = 0.02
_LOG_TAIL_BYTES = 2000


class ProcessError(RuntimeError):
    """A child could not be started, died early, or did not become ready in time."""


class ChildProcess:
    """One child and its process group."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @classmethod
    def start(
        cls, name: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Start `argv` with its output appended to `log_path`; `env` is added to this process's environment.

        Raises ProcessError when the program cannot be executed.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            try:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise ProcessError(f"{name}: cannot start {argv[0]}: {error}") from error
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the child's group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the child has not ended."""
        return self._process.poll() is None

    async def wait_until(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Poll `ready` until it answers True; ProcessError when the child dies or `timeout_s` passes first."""
        deadline = time.monotonic() + timeout_s
        while not await ready():
            if not self.alive:
                raise ProcessError(f"{self.name} ended with code {self._process.returncode}: {self.log_tail()}")
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} was not ready within {timeout_s:.0f} s: {self.log_tail()}")
            await asyncio.sleep(_POLL_S)

    async def stop(self, grace_s: float = 10.0) -> None:
        """End the child: SIGINT, then SIGKILL to its group after `grace_s`; safe to call twice."""
        if self.alive:
            self._signal_leader(signal.SIGINT)
            deadline = time.monotonic() + grace_s
            try:
                while self.alive and time.monotonic() < deadline:
                    await asyncio.sleep(_POLL_S)
            finally:
                self.kill()  # also ends whatever the leader left behind in its group
        else:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, at once; safe to call twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self) -> str:
        """The last lines that the child wrote."""
        try:
            data = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:]
        except OSError:
            return "(no output)"
        return data.decode("utf-8", "replace").strip() or "(no output)"

    def _signal_leader(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def free_ports(count: int, kind: socket.SocketKind) -> list[int]:
    """Ports of 127.0.0.1 that are free now; all are held while looking, so they differ.

    They come from below the range that systems give to outgoing connections: a client's connection must not
    sit on a server's port while that is down between two runs.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
            if len(ports) == count:
                break
            probe = stack.enter_context(socket.socket(socket.AF_INET, kind))
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                ports.append(port)
        return ports
