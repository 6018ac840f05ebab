"""``python -m prefixroute.emulator``: one emulated engine as a program.

Rules:
1. Wrong arguments cost one line on standard error and exit code 2. No traceback reaches a user.
2. One line on standard output tells that the engine is ready, and where.
3. SIGINT and SIGTERM end the program at once: running requests are cut off, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

import uvicorn

from prefixroute.emulator.emulated_engine import EmulatedEngine
from prefixroute.emulator.emulator_config import EngineConfig, KvEventsConfig
from prefixroute.emulator.scheduler import Limits
from prefixroute.emulator.service_times import ServiceModel
from prefixroute.errors import UsageError

_KEEP_ALIVE_S = 75


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line; its defaults are those of the configuration classes."""
    engine, service, limits = EngineConfig(), ServiceModel(), Limits()
    parser = _Parser(
        prog="prefixroute.emulator",
        description="An OpenAI-compatible server that imitates a vLLM engine: cache, events, service times.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    add("--model", default=engine.model, help="name of the served model")
    add("--lora-modules", nargs="+", default=[], metavar="NAME", help="adapters that requests may name")
    add("--any-model", action="store_true", help="accept any model name")
    add("--block-size", type=int, default=engine.block_size, help="tokens a block")
    add("--capacity-blocks", type=int, default=engine.capacity_blocks, help="blocks in the cache")
    add("--max-model-len", type=int, default=0, help="prompt and output together; 0: all the cache holds")
    add("--prefill-tokens-per-s", type=float, default=service.prefill_tokens_per_s, help="prefill rate")
    add("--overhead-s", type=float, default=service.overhead_s, help="fixed cost of a prompt")
    add("--decode-s-per-token", type=float, default=service.decode_s_per_token, help="time between tokens")
    add("--time-scale", type=float, default=service.time_scale, help="multiplies all service times")
    add("--max-num-seqs", type=int, default=limits.max_num_seqs, help="most requests computed at once")
    add("--max-num-batched-tokens", type=int, default=limits.max_num_batched_tokens, help="prefill chunk")
    add("--max-num-queued-reqs", type=int, default=0, help="503 at this many in flight; 0: never")
    add("--max-num-queued-tokens", type=int, default=0, help="503 at this prefill backlog; 0: never")
    add("--default-max-tokens", type=int, default=engine.default_max_tokens, help="when a request has none")
    add("--hash-seed", default="", help="changes all block hashes, as PYTHONHASHSEED does in vLLM")
    add("--byte-hashes", action="store_true", help="whole digests in events instead of 64-bit ints")
    add("--kv-events-config", default="{}", metavar="JSON", help="as for vLLM; see docs/emulator.md")
    return parser


def config_of(options: argparse.Namespace) -> EngineConfig:
    """The engine's configuration from parsed options; UsageError tells what is wrong."""
    return EngineConfig(
        model=options.model,
        block_size=options.block_size,
        capacity_blocks=options.capacity_blocks,
        max_model_len=options.max_model_len,
        service=ServiceModel(
            options.prefill_tokens_per_s, options.overhead_s, options.decode_s_per_token, options.time_scale
        ),
        limits=Limits(
            options.max_num_seqs,
            options.max_num_batched_tokens,
            options.max_num_queued_reqs,
            options.max_num_queued_tokens,
        ),
        default_max_tokens=options.default_max_tokens,
        lora_modules=tuple(options.lora_modules),
        any_model=options.any_model,
        hash_seed=options.hash_seed,
        byte_hashes=options.byte_hashes,
        kv_events=KvEventsConfig.from_json(options.kv_events_config),
    )


class _Server(uvicorn.Server):
    """A server that prints when it is ready, and that cuts off unfinished answers when it ends."""

    def __init__(self, config: uvicorn.Config, engine: EmulatedEngine, ready: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.abort()
        await super().shutdown(sockets)


async def serve(config: EngineConfig, host: str, port: int) -> None:
    """Serve until a signal comes; UsageError when an address cannot be used. Main thread only."""
    listener = _listen(host, port)
    with listener:
        async with EmulatedEngine(config) as engine:
            web = uvicorn.Config(
                engine.app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
            server = _Server(web, engine, _ready_line(engine, host, listener.getsockname()[1]))

            def end(number: int, frame: object) -> None:
                server.should_exit = True

            # The server puts its own handlers in while it runs, and raises the signal again at its end:
            # these catch that, and a signal that comes before it runs.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, end)
            await server.serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio turns off Nagle's delay (40 ms a token) only for sockets that name their protocol.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
    return listener


def _ready_line(engine: EmulatedEngine, host: str, port: int) -> str:
    config, events = engine.config, engine.publisher.config
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    wire = f"events {events.endpoint} replay {events.replay_endpoint}" if events.publishes else "no events"
    cache = f"{config.capacity_blocks} blocks of {config.block_size}"
    return f"prefixroute.emulator ready: http://{where} model {config.model}, {cache}, {wire}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    options = build_parser().parse_args(arguments)
    try:
        asyncio.run(serve(config_of(options), options.host, options.port))
    except UsageError as error:
        print(f"prefixroute.emulator: {error}", file=sys.stderr)
        return 2
    return 0
