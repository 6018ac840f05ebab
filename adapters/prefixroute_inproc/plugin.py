"""What both entry points share: what the user asked for, whether the engine fits, and a tap or a reason why not.

Rules:
1. Nothing is asked for, nothing is done. Something is amiss, one message says what was found, what is needed and that
   the engine publishes as before.
2. Every process of an engine runs the entry points, some more than once: no socket, no thread and no engine module
   before an engine makes its publisher.

| variable               | means                                                                                |
|------------------------|--------------------------------------------------------------------------------------|
| `PREFIXROUTE_TAP`      | where the tap's Unix socket is; rank r adds ``.r``                                   |
| `PREFIXROUTE_TAP_SINK` | ``module:function`` that is called with every batch, in the engine's process         |
| `PREFIXROUTE_TAP_ZMQ`  | ``1`` to publish over ZeroMQ too; its queue stops the engine when it is full         |
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .registry import add_sink, sinks

TAP, TAP_SINK, TAP_ZMQ = "PREFIXROUTE_TAP", "PREFIXROUTE_TAP_SINK", "PREFIXROUTE_TAP_ZMQ"
"""The variables of the table above."""


class TapRequest(NamedTuple):
    """What the user asked for."""

    path: str
    sink: str
    zmq: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> TapRequest:
        """Read the variables."""
        on = environ.get(TAP_ZMQ, "").lower() not in ("", "0", "no", "false")
        return cls(environ.get(TAP, ""), environ.get(TAP_SINK, ""), on)

    @property
    def anything(self) -> bool:
        """Whether there is anybody to hand batches to."""
        return bool(self.path or self.sink or sinks())


class EngineShape(NamedTuple):
    """What a tap needs of an engine: its name, the version that was tested, and the word its publishers have for the
    rank.
    """

    engine: str
    tested: str
    rank_name: str


class UnfitError(Exception):
    """The engine is not what the tap needs; the text says what is amiss."""


def check_shape(events: Any, shape: EngineShape) -> None:
    """Look whether an engine's module of events has what is needed. Raises `UnfitError`.

    `events` is the module with ``EventPublisher``, ``EventPublisherFactory`` and ``EventBatch``.
    """
    registry = getattr(getattr(events, "EventPublisherFactory", None), "_registry", None)
    if not isinstance(registry, dict) or not callable(registry.get("zmq")):
        raise UnfitError("EventPublisherFactory._registry has no 'zmq'")
    publisher = getattr(events, "EventPublisher", None)
    if not isinstance(publisher, type) or not callable(getattr(publisher, "publish", None)):
        raise UnfitError("EventPublisher.publish is not there")
    needed: frozenset[str] = getattr(publisher, "__abstractmethods__", frozenset()) - {"publish", "shutdown"}
    if needed:
        raise UnfitError(f"EventPublisher wants {', '.join(sorted(needed))} too")
    parameters = inspect.signature(events.EventPublisherFactory.create).parameters
    if shape.rank_name not in parameters:
        raise UnfitError(f"EventPublisherFactory.create takes no {shape.rank_name}")
    fields = getattr(getattr(events, "EventBatch", None), "__struct_fields__", ())
    if not {"ts", "events"} <= set(fields):
        raise UnfitError("EventBatch has no ts and events")


def tell_unfit(log: logging.Logger, shape: EngineShape, version: object, why: object) -> None:
    """Say once that there will be no tap."""
    log.warning(
        "prefixroute: no in-process tap: this is %s %s, and %s. Tested is %s %s. "
        "Events are published over ZeroMQ as before: follow those, or unset %s",
        *(shape.engine, version, why, shape.engine, shape.tested, TAP),
    )


def publisher_or_zmq(
    base: type,
    shape: EngineShape,
    log: logging.Logger,
    make_zmq: Callable[[], Any],
    rank: int,
    config: Mapping[str, Any],
) -> Any:
    """Return what an engine publishes to: a tap, or what `make_zmq` makes when there can be none.

    `base` is the engine's abstract publisher. `config` is the rest of its ``--kv-events-config``: the tap's queue and
    ring have the sizes that ZeroMQ's would have.
    """
    wanted = TapRequest.from_environment()
    if not wanted.anything:
        log.warning("prefixroute: no tap, for %s is not set: events are published over ZeroMQ", TAP)
        return make_zmq()
    try:
        publisher = publisher_class(base)(_open(wanted, shape.engine, rank, config, log))
    except Exception as error:  # whatever it is, the engine has to start
        log.warning("prefixroute: no in-process tap: %s. Events are published over ZeroMQ as before", error)
        return make_zmq()
    log.info("prefixroute: tap of rank %d at %s; ZeroMQ: %s", rank, publisher.tap.path or wanted.sink, wanted.zmq)
    if wanted.zmq:
        publisher.publish_to(make_zmq())
    return publisher


def publisher_class(base: type) -> type:
    """Return an engine's publisher, a subclass of its abstract one, that hands batches to a tap."""

    class TapPublisher(base):  # type: ignore[misc]
        """Publishes to a tap; alone there, `publish` is the tap's own."""

        def __init__(self, tap: Any) -> None:
            self.tap = tap
            self.beside: Any = None
            self.__dict__["publish"] = tap.publish

        def publish_to(self, beside: Any) -> None:
            """Publish to another publisher too."""
            self.beside = beside
            del self.__dict__["publish"]

        def publish(self, events: Any) -> None:
            self.tap.publish(events)
            self.beside.publish(events)

        def shutdown(self) -> None:
            self.tap.close()
            if self.beside is not None:
                self.beside.shutdown()

    return TapPublisher


def _open(wanted: TapRequest, engine: str, rank: int, config: Mapping[str, Any], log: logging.Logger) -> Any:
    from .paths import path_of_rank
    from .tap import QUEUE_BATCHES, RING_BATCHES, Tap

    if wanted.sink or sinks():
        from .sinks import decoder_of, find_sink

        decoder_of(engine)  # now, when it can be told, and not on the tap's thread
        if wanted.sink and (sink := find_sink(wanted.sink)) not in sinks():
            add_sink(sink)
    tap = Tap(
        engine,
        rank,
        path_of_rank(wanted.path, rank) if wanted.path else None,
        queue_batches=_count(config.get("max_queue_size"), QUEUE_BATCHES),
        ring_batches=_count(config.get("buffer_steps"), RING_BATCHES),
        log=log,
    )
    tap.start()
    return tap


def _count(value: object, default: int) -> int:
    return value if type(value) is int and value > 0 else default
