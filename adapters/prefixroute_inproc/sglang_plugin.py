"""Entry point of ``sglang.srt.plugins``: a publisher called ``prefixroute`` beside SGLang's own.

    python -m sglang.launch_server ... --kv-events-config '{"publisher":"prefixroute"}'

Who names ``zmq`` there gets that, as ever. Tested with SGLang 0.5.23; others that have the same shape are taken, and
told.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from .plugin import EngineShape, TapRequest, check_shape, publisher_or_zmq, tell_unfit

SHAPE = EngineShape("sglang", "0.5.23", "attn_dp_rank")
"""What is needed of SGLang."""

NAME = "prefixroute"
"""The publisher's name in ``--kv-events-config``."""

log = logging.getLogger("sglang.prefixroute")

_told: set[str] = set()


def register() -> None:
    """Add the tap to SGLang's publishers, under `NAME`. Does so once; never raises.

    Where the tap does not fit, that name stands for SGLang's own, and says so when it is used.
    """
    version: object = "of an unknown version"
    try:
        version = getattr(import_module("sglang.version"), "__version__", version)
        kv_events: Any = import_module("sglang.srt.disaggregation.kv_events")
        registry: dict[str, Any] = kv_events.EventPublisherFactory._registry
        if NAME in registry:
            return
        registry[NAME] = _maker(kv_events, registry["zmq"], version)
    except Exception as error:  # whatever it is, the engine has to start
        if TapRequest.from_environment().anything and str(error) not in _told:
            _told.add(str(error))
            tell_unfit(log, SHAPE, version, f"it has no registry of publishers to add to: {error!r}")


def _maker(kv_events: Any, zmq: Any, version: object) -> Any:
    """Return what SGLang calls to make the publisher."""
    try:
        check_shape(kv_events, SHAPE)
    except Exception as error:
        why = error  # the name is gone after this block

        def make_zmq(*args: Any, **config: Any) -> Any:
            tell_unfit(log, SHAPE, version, why)
            return zmq(*args, **config)

        return make_zmq

    def make(attn_dp_rank: int = 0, **config: Any) -> Any:
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

    return make
