"""Real engines for the live suite: one at a time or a pair, on loopback, kept as long as tests ask for the same ones.

Rules:
1. An engine is started, asked, killed and ended through `prefixroute_launch`; everything here is synchronous.
2. What an engine has published is asked of its own replay socket: a test waits for that number, never for a time.
3. An `EngineBench` holds one group at a time. Who asks for another group, or finds an engine dead, has it started.
   Leaving the bench ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import zmq
from prefixroute_launch.launcher import EngineSpec, Launcher, RunningEngine
from prefixroute_launch.processes import free_ports
from prefixroute_launch.real_engine import EngineHome, ensure_lora
from prefixroute_launch.sglang_launcher import SglangLauncher, SglangSettings
from prefixroute_launch.vllm_launcher import VllmLauncher, VllmSettings
from prefixroute_zmq.address import endpoint_of_rank

DEADLINE_S = 120.0
REPLAY_S = 10.0
"""How long anything may take that should take seconds: the machine may be busy with other things."""

ADAPTER = "lo"
"""The name of the LoRA adapter, where a shape has one."""

_SETTINGS: dict[str, type[EngineHome]] = {"vllm": VllmSettings, "sglang": SglangSettings}
_END = b"\xff" * 8
_STEADY = 3
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine as a test wants it: its block (SGLang: page) in tokens, how many its cache has, and the rest.

    `lora` adds an adapter, to vLLM only.
    """

    kind: str
    block: int
    blocks: int
    preset: str = "tiny"
    ranks: int = 1
    lora: bool = False
    extra: tuple[str, ...] = ()

    @property
    def capacity_tokens(self) -> int:
        """What the cache of one rank holds."""
        return self.block * self.blocks

    @property
    def label(self) -> str:
        """A short name for reports."""
        return f"{self.kind}{self.block}{'' if self.preset == 'tiny' else '-' + self.preset}"


class EngineReply(NamedTuple):
    """An engine's or a sidecar's answer, as far as the suite looks at it. `cached` is -1 when it was not told."""

    status: int
    cached: int
    headers: httpx.Headers
    body: dict[str, Any]


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds; AssertionError that names `what` when it does not."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"this did not come true: {what}"
        time.sleep(_PAUSE_S)


def read_reply(answer: httpx.Response) -> EngineReply:
    """Read what the suite needs of a completion or chat answer."""
    try:
        body = answer.json()
    except ValueError:
        body = {}
    details = ((body.get("usage") or {}).get("prompt_tokens_details") or {}) if isinstance(body, dict) else {}
    cached = details.get("cached_tokens")
    return EngineReply(answer.status_code, -1 if cached is None else int(cached), answer.headers, body)


class LiveEngine:
    """One engine process and what a test does to it."""

    def __init__(self, shape: EngineShape, index: int, folder: Path) -> None:
        self.shape = shape
        (port,) = free_ports(1, socket.SOCK_STREAM)
        events, replay = f"ipc://{folder}/{index}e", f"ipc://{folder}/{index}r"
        if shape.ranks > 1:
            # a concrete address: the engine connects and the follower binds, so that nothing leaves loopback
            first = _run_of_ports(2 * shape.ranks)
            events, replay = f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + shape.ranks}"
        self._spec = EngineSpec(
            f"e{index}", port, events, replay, f"kv@e{index}", shape.block, shape.blocks, index, folder, shape.ranks
        )
        self._launcher: Launcher | None = None
        self.running: RunningEngine | None = None
        self.client = httpx.Client(trust_env=False, timeout=DEADLINE_S)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._last: dict[int, int] = {}

    # --- life ----------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start it, and wait until it answers."""
        home = _SETTINGS[self.shape.kind].from_environment()
        settings = type(home)(home.env, self.shape.preset, self.shape.extra)
        if self.shape.lora:
            adapter = await ensure_lora(settings)
            options = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}")
            settings = type(home)(home.env, self.shape.preset, (*self.shape.extra, *options))
        if isinstance(settings, VllmSettings):
            self._launcher = VllmLauncher(self._spec, settings)
        else:
            assert isinstance(settings, SglangSettings)
            self._launcher = SglangLauncher(self._spec, settings)
        self._last.clear()
        self.running = await self._launcher.start()
        await self._launcher.wait_ready()

    def kill(self) -> None:
        """SIGKILL to the whole engine, as a crash would."""
        assert self._launcher is not None
        self._launcher.kill()
        self.running = None

    def restart(self) -> None:
        """Begin another life at the same addresses."""
        asyncio.run(self.begin())

    async def end(self) -> None:
        """End it, whatever state it is in."""
        self.running = None
        if self._launcher is not None:
            await self._launcher.stop()
        self.client.close()
        self._context.destroy(linger=0)

    @property
    def ranks(self) -> range:
        """Its data-parallel ranks."""
        return range(self.shape.ranks)

    @property
    def now(self) -> RunningEngine:
        """The life that runs."""
        assert self.running is not None, "the engine does not run"
        return self.running

    # --- requests ------------------------------------------------------------------------------------------

    def ask(
        self, tokens: Sequence[int], answer_tokens: int = 1, salt: str = "", rank: int | None = None
    ) -> EngineReply:
        """Send a completion straight to the engine."""
        headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
        body = completion(self.now.model, tokens, answer_tokens, salt)
        return read_reply(self.client.post(f"{self.now.url}/v1/completions", json=body, headers=headers))

    def reset(self) -> None:
        """Empty its cache, and let it take a step: vLLM tells a clear with the next one only."""
        until(self._has_reset, "the engine resets its cache")
        for rank in self.ranks:
            # shorter than a block; SGLang caches it all the same at page size 1, under a salt of its own
            step = self.ask([100, 101, 102], salt="after reset", rank=rank if self.shape.ranks > 1 else None)
            assert step.status == 200, step

    def _has_reset(self) -> bool:
        """An engine refuses while a request still holds some of its blocks."""
        answer = self.client.post(f"{self.now.url}{self.now.reset_path}")
        return answer.status_code == 200 and answer.content.replace(b" ", b"") != b'{"success":false}'

    # --- events --------------------------------------------------------------------------------------------

    def last_seq(self, rank: int = 0) -> int:
        """Return the number of the last message that a rank has published, -1 for none; it has come to rest.

        The engine queues a step's events before the step's answer leaves, but its publisher serves one message at a
        time between two looks at the replay socket: the number counts once it has been the same three times.
        """
        steady = 0
        last = self._last.get(rank, -1)
        while steady < _STEADY:
            asked = self._ask_replay(rank, max(0, last))
            steady = steady + 1 if asked == last else 1
            last = asked
        self._last[rank] = last
        return last

    def _ask_replay(self, rank: int, start: int) -> int:
        """As a follower does, with a new socket where no answer comes: one of a vLLM under load was seen to be lost."""
        deadline = time.monotonic() + DEADLINE_S
        while (last := self._replayed(rank, start)) is None:
            assert time.monotonic() < deadline, "the engine's replay socket does not answer"
        return last

    def _replayed(self, rank: int, start: int) -> int | None:
        with self._context.socket(zmq.DEALER) as replay:
            replay.set(zmq.LINGER, 0)
            replay.set(zmq.RCVHWM, 0)
            replay.connect(endpoint_of_rank(self.now.replay_endpoint, rank))
            replay.send_multipart([b"", start.to_bytes(8, "big")])
            last = -1
            while True:
                if not replay.poll(int(1000 * REPLAY_S)):
                    return None
                seq = replay.recv_multipart()[-2]
                if seq == _END:
                    return last
                last = int.from_bytes(seq, "big")


def completion(model: str, tokens: Sequence[int], answer_tokens: int, salt: str = "") -> dict[str, Any]:
    """Return a completion request that is answered in full, always the same way."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {**body, "cache_salt": salt} if salt else body


def _run_of_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now."""
    for _ in range(200):
        (first,) = free_ports(1, socket.SOCK_STREAM)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no neighbouring ports are free")


class EngineBench:
    """The engines that run now. Sockets and logs are in a folder of its own, which a failure leaves in place."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pr-live-"))
        self.failed = False
        self._shapes: tuple[EngineShape, ...] = ()
        self._engines: list[LiveEngine] = []
        self._groups = 0

    @property
    def process_groups(self) -> list[int]:
        """The process groups of the engines that run."""
        return [engine.running.pid for engine in self._engines if engine.running is not None]

    def engines(self, shapes: tuple[EngineShape, ...]) -> list[LiveEngine]:
        """Return engines of these shapes with empty caches, started if others or none run."""
        if shapes != self._shapes or any(engine.running is None for engine in self._engines):
            self.clear()
            folder = self.folder / str(self._groups)
            self._groups += 1
            folder.mkdir()
            self._engines = [LiveEngine(shape, index, folder) for index, shape in enumerate(shapes)]
            self._shapes = shapes
            asyncio.run(_begin_all(self._engines))
        for engine in self._engines:
            engine.reset()
        return self._engines

    def clear(self) -> None:
        """End all engines."""
        engines, self._engines, self._shapes = self._engines, [], ()
        asyncio.run(_end_all(engines))

    def close(self) -> None:
        """End all engines; forget their logs unless something failed."""
        try:
            self.clear()
        finally:
            if not self.failed:
                shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def open_bench() -> Iterator[EngineBench]:
    """A bench for the length of the block."""
    bench = EngineBench()
    try:
        yield bench
    finally:
        bench.close()


async def _begin_all(engines: Sequence[LiveEngine]) -> None:
    begun = await asyncio.gather(*(engine.begin() for engine in engines), return_exceptions=True)
    for result in begun:
        if isinstance(result, BaseException):
            raise result


async def _end_all(engines: Sequence[LiveEngine]) -> None:
    await asyncio.gather(*(engine.end() for engine in engines), return_exceptions=True)
