"""The emulated engine in one object: what drives the scheduler, and the web application that takes requests for it."""

from __future__ import annotations

from prefixroute.emulator.emulator_config import EngineConfig
from prefixroute.emulator.engine_driver import EngineDriver
from prefixroute.emulator.http_app import build_app


class EmulatedEngine(EngineDriver):
    """A stand-in for a vLLM server: `app` is the ASGI application, `start` and `stop` bound its life.

    Use it in the process of a test (``async with EmulatedEngine(config) as engine``) or behind a server.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        self.app = build_app(self)
