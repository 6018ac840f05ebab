#!/usr/bin/env python3
"""Start a real engine with the in-process tap, and hold a node's estimates against the cached tokens it reports.

    python live_tests/check_inprocess.py vllm    needs PREFIXROUTE_VLLM_ENV, see examples/launch/README.md
    python live_tests/check_inprocess.py sglang  needs PREFIXROUTE_SGLANG_ENV
    PREFIXROUTE_VLLM_PRESET=tiny python live_tests/check_inprocess.py vllm --requests 100

| phase     | what is done                                          | what must be true                             |
|-----------|-------------------------------------------------------|-----------------------------------------------|
| traffic   | requests cold, warm and evicting, one by one          | every estimate within a block of the truth    |
| away      | the follower stops, requests go on, it comes back     | history from the tap, no gap; as above        |
| kill      | SIGKILL to the engine and all its processes           | nothing is held any more, within 2 s          |
| next life | the engine is started again on the same socket        | followed without help; as above               |

Rules:
1. The engine's environment stays as it is: it gets the tap's package and the entry points from a folder of ours.
2. One request at a time, and its events are applied before the next, as in `check_estimates`, which has the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import prefixroute_inproc
import prefixroute_sglang as sglang
import prefixroute_vllm as vllm
from check_estimates import Asked, ask, requests
from prefixroute_inproc import TapFollower, sources_of_tap
from prefixroute_launch.launcher import EngineSpec
from prefixroute_launch.processes import ProcessError, free_ports
from prefixroute_launch.real_engine import RealLauncher
from prefixroute_launch.sglang_launcher import SglangLauncher, SglangSettings
from prefixroute_launch.vllm_launcher import VllmLauncher, VllmSettings

from prefixroute import Domain, Namespace, Node, Outcome, UsageError

MODEL = RealLauncher.model
CACHE_TOKENS = 6400
FORGOTTEN_S = 2.0
"""How soon a killed engine's prefixes must be gone from the node."""

ENTRY_POINTS = """\
[vllm.general_plugins]
prefixroute = prefixroute_inproc.vllm_plugin:register

[sglang.srt.plugins]
prefixroute = prefixroute_inproc.sglang_plugin:register
"""
"""What an installed prefixroute tells both engines."""

_QUIET_S = 0.25
_POLL_S = 0.02
_PATIENCE_S = 30.0


class TappedKind(NamedTuple):
    """One engine: how it is started with a tap, and which adapter reads what it publishes."""

    engine: Any
    block_size: int
    launcher: Any
    settings: Any
    arguments: tuple[str, ...]
    discover: Any = None
    """Asks the engine where it publishes, if it can tell of a tap."""


KINDS = {
    "vllm": TappedKind(vllm.ENGINE, 32, VllmLauncher, VllmSettings, (), vllm.discover),
    "sglang": TappedKind(
        sglang.ENGINE,
        16,
        SglangLauncher,
        SglangSettings,
        ("--kv-events-config", json.dumps({"publisher": "prefixroute"})),  # of two, the last counts
    ),
}
"""Word on the command line -> engine."""


def plugin_folder(folder: Path) -> Path:
    """Make a folder that, on an engine's PYTHONPATH, is what ``pip install --no-deps prefixroute`` would be to it."""
    info = folder / "prefixroute_tap-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prefixroute-tap\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "prefixroute_inproc").symlink_to(Path(prefixroute_inproc.__file__).parent)
    return folder


def make_launcher(kind: TappedKind, spec: EngineSpec, tap: str, plugins: Path) -> Any:
    """Return a launcher of an engine whose tap is at `tap`."""

    class Tapped(kind.launcher):  # type: ignore[misc, name-defined]
        def environment(self, scratch: Path) -> dict[str, str]:
            told: dict[str, str] = super().environment(scratch)
            return {**told, "PYTHONPATH": str(plugins), "PREFIXROUTE_TAP": tap}

    settings = kind.settings.from_environment()
    arguments = (*settings.extra_args, *kind.arguments)
    return Tapped(spec, type(settings)(settings.env, settings.preset, arguments))


class Checker:
    """A node beside the engine, and what its estimates were worth."""

    def __init__(self, kind: TappedKind, tap: str, url: str) -> None:
        self._kind = kind
        self._url = url
        now = time.monotonic()
        self.node = Node("check", Domain(model=MODEL, tokenizer=MODEL), rng=random.Random(0), now=now)
        self.endpoint = self.node.add_endpoint("0", url=url, incarnation=time.time_ns(), now=now)
        (source,) = sources_of_tap(f"tap://{tap}")
        self.follower = TapFollower(source, self._apply, kind.engine)
        self._task: asyncio.Task[None] | None = None
        self.failures: list[str] = []

    def follow(self) -> None:
        """Begin to follow, or go on."""
        self._task = asyncio.create_task(self.follower.run())

    async def leave(self) -> None:
        """Stop following, for now."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def quiet(self) -> None:
        """Wait until no message has come for a while."""
        seen, since = self.follower.stats().messages, time.monotonic()
        while time.monotonic() - since < _QUIET_S:
            await asyncio.sleep(_POLL_S)
            if self.follower.stats().messages != seen:
                seen, since = self.follower.stats().messages, time.monotonic()

    async def send(self, phase: str, wanted: Iterable[Asked], *, judge: bool = True) -> None:
        """Send requests one by one; hold each estimate against the truth unless nobody is following."""
        exact = low = high = cached = tokens = 0
        async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
            for asked in wanted:
                if not judge:  # nor route: a routed prompt counts as held until its answer is reported
                    await ask(client, self._url, MODEL, asked)
                    continue
                now = time.monotonic()
                self.node.handle_timer(now)
                decision = self.node.route(asked.tokens, now, namespace=Namespace(salt=asked.salt), forwarded=True)
                truth = await ask(client, self._url, MODEL, asked)
                self.node.report(decision, Outcome.served(cached_tokens=truth), time.monotonic())
                off = decision.matched_tokens - truth
                exact, low, high = exact + (off == 0), low + (off < 0), high + (off > 0)
                tokens, cached = tokens + len(asked.tokens), cached + truth
                if abs(off) > self._kind.block_size:
                    said = f"{len(asked.tokens)} tokens: expected {decision.matched_tokens}, reported {truth}"
                    self.failures.append(f"{phase}: {said}")
                await self.quiet()
        if judge:
            print(f"{phase}: {exact} exact, {low} too low, {high} too high; {cached:,} of {tokens:,} tokens cached")

    def expect(self, phase: str, what: str, true: bool) -> None:
        """Note what had to be true."""
        print(f"{phase}: {what}: {'yes' if true else 'NO'}")
        if not true:
            self.failures.append(f"{phase}: not {what}")

    async def until(self, phase: str, what: str, condition: Any, patience_s: float = _PATIENCE_S) -> None:
        """Wait for something that must come true in time."""
        began = time.monotonic()
        while not condition() and time.monotonic() - began < patience_s:
            await asyncio.sleep(_POLL_S)
        self.expect(phase, f"{what} (after {time.monotonic() - began:.2f} s)", condition())

    def held(self) -> int:
        """Engine blocks that the node believes in."""
        return self.node.residency(self.endpoint).live_blocks

    def _apply(self, batch: Any) -> None:
        self.node.apply(self.endpoint, batch, time.monotonic())


async def check(kind: TappedKind, count: int, seed: int, folder: Path) -> list[str]:
    """Run all phases; return what was wrong."""
    (port,) = free_ports(1, socket.SOCK_STREAM)
    tap, run = str(folder / "tap"), folder / "run"
    events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    spec = EngineSpec("check", port, events, replay, "", kind.block_size, CACHE_TOKENS // kind.block_size, 0, run)
    plugins = plugin_folder(folder / "plugins")
    prompts: Iterator[Asked] = requests(seed, 1 << 30)
    launcher = make_launcher(kind, spec, tap, plugins)
    try:
        engine = await launcher.start()
        checker = Checker(kind, tap, engine.url)
        checker.follow()
        await launcher.wait_ready()
        await checker.until("traffic", "the tap is connected to", lambda: checker.follower.stats().connections == 1)
        checker.expect("traffic", "no ZeroMQ socket was made", not os.path.exists(f"{folder}/events"))
        if kind.discover is not None:
            told = [source.endpoint for source in await kind.discover(engine.url)]
            checker.expect("traffic", "the engine tells where its tap is", told == [f"tap://{tap}"])
        await checker.send("traffic", islice(prompts, count))

        await checker.leave()
        await checker.send("away", islice(prompts, count // 4), judge=False)
        checker.follow()
        await checker.until("away", "the tap is connected to again", lambda: checker.follower.stats().connections == 2)
        await checker.quiet()
        await checker.send("away", islice(prompts, count // 4))
        stats = checker.follower.stats()
        checker.expect("away", "nothing was lost", (stats.gaps, stats.restarts, stats.unknown_events) == (0, 0, 0))
        print(f"  {stats}")

        print(f"kill: {checker.held()} blocks were held")
        launcher.kill()
        await checker.until("kill", "nothing is held", lambda: checker.held() == 0, FORGOTTEN_S)
        checker.expect("kill", "the end of its life is known", checker.follower.stats().restarts == 1)

        launcher = make_launcher(kind, spec, tap, plugins)
        await launcher.start()
        await launcher.wait_ready()
        await checker.until("next life", "it is followed", lambda: checker.follower.stats().connections == 3)
        await checker.send("next life", islice(prompts, count // 2))
        stats = checker.follower.stats()
        checker.expect("next life", "nothing was lost", (stats.gaps, stats.restarts, stats.decode_errors) == (0, 1, {}))
        await checker.leave()
        return checker.failures
    finally:
        await launcher.stop()


def main(argv: list[str] | None = None) -> int:
    """Run the check; exit status 0 when all was right, 1 when not or when it failed, 2 for a mistake."""
    parser = argparse.ArgumentParser(description="Check the in-process tap with a real engine.")
    parser.add_argument("engine", choices=sorted(KINDS))
    parser.add_argument("--requests", type=int, default=100, help="of the first phase; the others have fewer")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tap-", ignore_cleanup_errors=True) as folder:
        try:
            failures = asyncio.run(check(KINDS[args.engine], args.requests, args.seed, Path(folder)))
        except UsageError as error:
            print(f"check_inprocess: {error}", file=sys.stderr)
            return 2
        except (ProcessError, httpx.HTTPError) as error:
            print(f"check_inprocess: {error!r}", file=sys.stderr)
            return 1
    for failure in failures[:10]:
        print(f"check_inprocess: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
