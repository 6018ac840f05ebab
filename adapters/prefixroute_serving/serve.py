"""``prefixroute serve CONFIG``: a sidecar as a process, from its configuration to the signal that ends it.

Rules:
1. SIGINT and SIGTERM end the sidecar. SIGHUP reads the secrets of the configuration anew; all other changes of the file
   need a restart.
2. A configuration or an address that cannot be used raises a `UsageError` before anything is served.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import uvicorn

from prefixroute.errors import UsageError

from .sidecar import Sidecar
from .sidecar_config import GOOD_SECRET_BYTES, SidecarConfig, load_config
from .site import Site
from .sockets import open_listener

log = logging.getLogger("prefixroute.sidecar")


def run(path: Path) -> int:
    """Serve by the configuration at `path` until a signal comes. Raises `UsageError` for a bad configuration."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = load_config(path)
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(config, path))
    else:
        uvloop.run(serve(config, path))
    return 0


async def serve(config: SidecarConfig, path: Path) -> None:
    """Serve until SIGINT or SIGTERM; SIGHUP reads the secrets at `path` anew. UsageError for an unusable address."""
    sidecar = Sidecar(config)
    _warn_of_weak_secrets(config)
    with open_listener(config.http) as listener:
        async with sidecar.running() as site:
            reread_on_sighup(site, path)
            settings = uvicorn.Config(
                sidecar.app,
                interface="asgi3",
                proxy_headers=False,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
                timeout_keep_alive=75,
            )
            await uvicorn.Server(settings).serve(sockets=[listener])


def reread_on_sighup(site: Site, path: Path) -> None:
    """Make a SIGHUP to this process read the secrets anew."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reread_secrets, site, path)


def _reread_secrets(site: Site, path: Path) -> None:
    try:
        config = load_config(path)
        site.set_secrets(config.secret_bytes)
    except UsageError as error:
        log.error("the secrets stay as they are: %s", error)
    else:
        log.info("secrets read from %s: the first of %d signs", path, len(config.secret_bytes))


def _warn_of_weak_secrets(config: SidecarConfig) -> None:
    short = [len(secret) for secret in config.secret_bytes if len(secret) < GOOD_SECRET_BYTES]
    if short:
        log.warning("a secret of %d bytes: who hears one datagram can guess it; see docs/security.md", min(short))
