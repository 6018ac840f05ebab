"""Entry point of ``vllm.general_plugins``: the tap takes the place of vLLM's ZeroMQ publisher.

vLLM refuses publishers by other names than ``zmq`` (0.11.1 on), so the name stays and what it stands for is replaced:
the engine still needs ``--kv-events-config '{"enable_kv_cache_events":true}'``. Tested with vLLM 0.32.0; others that
have the same shape are taken, and told.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from .plugin import EngineShape, TapRequest, check_shape, publisher_or_zmq, tell_unfit

SHAPE = EngineShape("vllm", "0.32.0", "data_parallel_rank")
"""What is needed of vLLM."""

log = logging.getLogger("vllm.prefixroute")  # below vLLM's own logger, whose handler it shares

_told: set[str] = set()


def register() -> None:
    """Put the tap into vLLM's registry of publishers, if one is asked for and it fits. Does so once; never raises."""
    if not TapRequest.from_environment().anything:
        return
    version: object = "of an unknown version"
    try:
        version = getattr(import_module("vllm"), "__version__", version)
        kv_events: Any = import_module("vllm.distributed.kv_events")
        check_shape(kv_events, SHAPE)
    except Exception as error:  # whatever it is, the engine has to start
        if str(error) not in _told:
            _told.add(str(error))
            tell_unfit(log, SHAPE, version, error)
        return
    registry: dict[str, Any] = kv_events.EventPublisherFactory._registry
    zmq = registry["zmq"]
    if getattr(zmq, "is_tap", False):
        return
    if str(version).partition("+")[0] != SHAPE.tested:
        log.warning("prefixroute: the tap was tested with vLLM %s, this is %s; its shape fits", SHAPE.tested, version)

    def make(data_parallel_rank: int = 0, **config: Any) -> Any:
        made = publisher_or_zmq(
            kv_events.EventPublisher,
            SHAPE,
            log,
            lambda: zmq(data_parallel_rank=data_parallel_rank, **config),
            data_parallel_rank,
            config,
        )
        if isinstance(made, kv_events.EventPublisher) and hasattr(made, "tap"):
            made._data_parallel_rank = data_parallel_rank
            made.get_publisher_config = lambda: _config_of(made, kv_events, config)
        return made

    make.is_tap = True  # type: ignore[attr-defined]
    registry["zmq"] = make


def _config_of(publisher: Any, kv_events: Any, config: dict[str, Any]) -> Any:
    """What the engine tells at ``/kv_event_sources``: where the tap is, so that nobody need be told twice."""
    if publisher.beside is not None:
        return publisher.beside.get_publisher_config()
    path = publisher.tap.path
    if path is None or not hasattr(kv_events, "KVEventsConfig"):
        return None
    told = {**config, "endpoint": f"tap://{path}", "replay_endpoint": None}
    return kv_events.KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **told)
