"""Entry point of ``sglang.srt.plugins``: a publisher called ``prefixroute`` beside SGLang's own.

    python -m sglang.launch_server ... --kv-events-config '{"publisher":"prefixroute"}'

Who names ``zmq`` there gets that, as ever. Tested with SGLang 0.5.23; others that have the same shape are taken, and
told.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from .plugin import Shape, UnfitError, check_shape, publisher_or_zmq, tell_unfit

SHAPE = Shape("sglang", "0.5.23", "attn_dp_rank")
"""What is needed of SGLang."""

NAME = "prefixroute"
"""The publisher's name in ``--kv-events-config``."""

log = logging.getLogger("sglang.prefixroute")

_told: set[str] = set()


def register() -> None:
    """Add the tap to SGLang's publishers, if it fits. Does so once; never raises."""
    version: object = "of an unknown version"
    try:
        version = getattr(import_module("sglang.version"), "__version__", version)
        kv_events: Any = import_module("sglang.srt.disaggregation.kv_events")
        check_shape(kv_events, SHAPE)
        if not callable(getattr(kv_events.EventPublisherFactory, "register_publisher", None)):
            raise UnfitError("EventPublisherFactory.register_publisher is not there")
    except Exception as error:  # whatever it is, the engine has to start
        if str(error) not in _told:
            _told.add(str(error))
            tell_unfit(log, SHAPE, version, error)
        return
    factory = kv_events.EventPublisherFactory
    if NAME in factory._registry:
        return
    zmq = factory._registry["zmq"]

    def make(attn_dp_rank: int = 0, **config: Any) -> Any:
        # A tap is asked for by name here, so only now does it matter whether this version was tested.
        if str(version) != SHAPE.tested:
            log.warning("prefixroute: the tap was tested with SGLang %s, this is %s", SHAPE.tested, version)
        return publisher_or_zmq(
            kv_events.EventPublisher,
            SHAPE,
            log,
            lambda: zmq(attn_dp_rank=attn_dp_rank, **config),
            attn_dp_rank,
            config,
        )

    factory.register_publisher(NAME, make)
