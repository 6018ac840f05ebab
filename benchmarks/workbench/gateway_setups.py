"""The processes that `gateways.py` measures: stub workers, two sidecars, and the rivals that are installed.

Rules:
1. Every process here is a child of the benchmark, in a group of its own, and is ended by `Process.stop`.
2. A rival that is not installed, or does not serve, is told as such, and stops nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from prefixroute_serving.attach import EngineConfig
from prefixroute_serving.sidecar_config import (
    DomainConfig,
    HostPort,
    PeerConfig,
    SidecarConfig,
    dump_config,
)

from workbench.stub_worker import MODEL

HERE = Path(__file__).parent
POLICY = "longest"
"""Ours sends a prompt where its prefix is, whatever it costs, so that what is forwarded is known beforehand."""

Command = Callable[[str, int, int, Sequence[str]], list[str]]


def _sglang(bin_: str, port: int, metrics: int, urls: Sequence[str]) -> list[str]:
    program = [f"{bin_}/python", "-m", "sglang_router.launch_router", "--log-level", "warn", "--disable-health-check"]
    return [*program, *_shared(port, metrics, urls)]


def _vllm(bin_: str, port: int, metrics: int, urls: Sequence[str]) -> list[str]:
    return [f"{bin_}/vllm-router", "--log-level", "warning", *_shared(port, metrics, urls)]


def _smg(bin_: str, port: int, metrics: int, urls: Sequence[str]) -> list[str]:
    return [f"{bin_}/smg", "launch", "--log-level", "warn", *_shared(port, metrics, urls)]


def _shared(port: int, metrics: int, urls: Sequence[str]) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    return [*where, "--policy", "cache_aware", "--worker-urls", *urls]


RIVALS: dict[str, tuple[str, Command]] = {
    "sglang-router": ("sglang_router", _sglang),
    "vllm-router": ("vllm_router", _vllm),
    "smg": ("smg", _smg),
}
"""Name -> its distribution's folder, and the command that starts it with `cache_aware`."""


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port that nobody uses now."""
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A child in a process group of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        environment = {**os.environ, "RUST_LOG": "warn", "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as out:
            self._child = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._child.poll() is None

    @property
    def cpu_s(self) -> float:
        """User and system time of the process's threads so far, in seconds."""
        total = 0
        for task in Path(f"/proc/{self._child.pid}/task").iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def stop(self) -> None:
        """End the group, politely first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5)
                return


class Gateway(NamedTuple):
    """What requests are sent to. `processes` are those whose time counts; `why_not` says why it cannot be measured."""

    name: str
    port: int
    processes: tuple[Process, ...] = ()
    why_not: str = ""


def events_of(port: int, folder: Path) -> tuple[str, str]:
    """Where a worker publishes its events, and answers replays."""
    return f"ipc://{folder}/{port}e", f"ipc://{folder}/{port}r"


@contextlib.contextmanager
def workers(count: int, folder: Path) -> Iterator[list[int]]:
    """Stub workers; yields their ports."""
    ports = [free_port() for _ in range(count)]
    command = [sys.executable, str(HERE / "stub_worker.py")]
    running = [
        Process([*command, str(port), *events_of(port, folder)], folder / f"worker-{port}.log") for port in ports
    ]
    try:
        yield ports
    finally:
        for process in running:
            process.stop()


@contextlib.contextmanager
def sidecars(worker_ports: Sequence[int], folder: Path, python: str = sys.executable) -> Iterator[list[Gateway]]:
    """A sidecar in front of each worker, each other's peers."""
    gossip = [free_port(socket.SOCK_DGRAM) for _ in worker_ports]
    peers = [PeerConfig(node=f"n{i}", gossip=HostPort(port=port)) for i, port in enumerate(gossip)]
    running = []
    try:
        for i, worker in enumerate(worker_ports):
            events, replay = events_of(worker, folder)
            config = SidecarConfig(
                node=f"n{i}",
                http=HostPort(port=free_port()),
                gossip=HostPort(port=gossip[i]),
                engine=EngineConfig(url=f"http://127.0.0.1:{worker}", events=events, replay=replay),
                domain=DomainConfig(model=MODEL, tokenizer="words", secret="benchmark"),
                peers=tuple(peer for j, peer in enumerate(peers) if j != i),
                policy=POLICY,
            )
            file = folder / f"n{i}.json"
            dump_config(config, file)
            command = [python, "-m", "prefixroute.cli", "serve", str(file)]
            running.append(Gateway(f"n{i}", config.http.port, (Process(command, folder / f"n{i}.log"),)))
        yield running
    finally:
        for gateway in running:
            for process in gateway.processes:
                process.stop()


@contextlib.contextmanager
def rivals(
    names: Sequence[str], environments: Sequence[Path], ports: Sequence[int], folder: Path
) -> Iterator[list[Gateway]]:
    """The rivals, started where one of the environments has them."""
    running = []
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for name in names:
            package, command = RIVALS[name]
            home = next(
                (env for env in environments if any(env.glob(f"lib/python*/site-packages/{package}-*.dist-info"))), None
            )
            if home is None:
                running.append(Gateway(name, 0, (), "not installed"))
                continue
            port = free_port()
            process = Process(command(f"{home}/bin", port, free_port(), urls), folder / f"{name}.log")
            running.append(Gateway(name, port, (process,)))
        yield running
    finally:
        for gateway in running:
            for process in gateway.processes:
                process.stop()
