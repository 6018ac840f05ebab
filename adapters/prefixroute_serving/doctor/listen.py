"""Listens, beside the sidecar, to the events that an engine publishes of the doctor's probes.

Rules:
1. Where the engine binds the socket of live events, the doctor subscribes to it. Where the sidecar binds it, the doctor
   asks the replay socket, which the engine always binds, for the few batches since the last that the sidecar has seen.
2. A stream that cannot be heard from here (another host's ipc, a tap) is not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

import zmq
import zmq.asyncio
from prefixroute_inproc import is_tap
from prefixroute_streams import EventSource
from prefixroute_zmq.address import live_address, replay_address
from prefixroute_zmq.follow import attach, open_socket

from prefixroute import BlocksStored, EngineBatch
from prefixroute.errors import DecodeError, UsageError

from ..attach import EngineConfig
from ..attach.kinds import KINDS, Follower, follower_of
from .engine_checks import EngineFacts, followed

_POLL_S: Final = 0.02
_END: Final = b"\xff" * 8


class Listener:
    """Collects what an engine stores while this listens; `hears` is False where its sockets cannot be reached."""

    def __init__(self) -> None:
        self.roots: list[BlocksStored] = []
        self.followers: list[Follower] = []

    @property
    def hears(self) -> bool:
        """Whether every stream has a publisher at its other end."""
        return bool(self.followers) and all(follower.stats().connected for follower in self.followers)

    def take(self, batch: EngineBatch) -> None:
        """Keep the stores at the root: a prompt begins there, and only there the event names the namespace."""
        self.roots += [event for event in batch.events if isinstance(event, BlocksStored) and event.parent is None]

    def stored(self, tokens: Sequence[int]) -> list[BlocksStored]:
        """Return the stores of a prompt's beginning."""
        return [
            event for event in self.roots if event.tokens and list(event.tokens) == list(tokens[: len(event.tokens)])
        ]


@contextlib.asynccontextmanager
async def listening(config: EngineConfig, facts: EngineFacts, patience_s: float) -> AsyncIterator[Listener]:
    """Listen to the engine's events, as far as they can be heard from here."""
    listener, kind = Listener(), KINDS[config.kind]
    for source in followed(config, facts).values():
        if is_tap(source.endpoint):
            continue
        source = source._replace(replay_endpoint=None)
        with contextlib.suppress(UsageError):
            hosts = kind.follower.engine.binding_hosts
            if not live_address(source.endpoint, source.host, hosts, source.bind).bind:
                listener.followers.append(follower_of(kind, source, listener.take))
    tasks = [asyncio.create_task(follower.run()) for follower in listener.followers]
    try:
        await until(lambda: listener.hears or not tasks, patience_s)
        yield listener
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool], patience_s: float) -> bool:
    """Wait until a condition holds; False when it does not within `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def replayed(
    config: EngineConfig, facts: EngineFacts, since: Mapping[int, int], listener: Listener, patience_s: float
) -> bool:
    """Give the listener every rank's batches from the number in `since` on; False when a rank does not answer."""
    sources = followed(config, facts)
    if not sources or not all(rank in since and source.replay_endpoint for rank, source in sources.items()):
        return False
    answers = [_replay(config, source, since[rank], listener, patience_s) for rank, source in sources.items()]
    return all(await asyncio.gather(*answers))


async def _replay(config: EngineConfig, source: EventSource, start: int, listener: Listener, patience_s: float) -> bool:
    engine, deadline = KINDS[config.kind].follower.engine, time.monotonic() + patience_s
    with zmq.asyncio.Context() as context:
        address = replay_address(source.replay_endpoint or "", source.host)
        with open_socket(context, zmq.DEALER, address, engine.max_payload_bytes) as socket:
            attach(socket, address)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while (left := deadline - time.monotonic()) > 0:
                if not await socket.poll(left * 1000):
                    break
                frames = await socket.recv_multipart()
                if len(frames) >= 2 and frames[-2] == _END:
                    return True
                with contextlib.suppress(DecodeError):
                    listener.take(engine.decode(frames[-1]))
    return False
