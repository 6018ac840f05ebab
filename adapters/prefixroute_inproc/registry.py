"""Who wants the batches of this process's engine, beside the readers of the socket. Every engine process loads this."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from prefixroute.events import EngineBatch

Sink: TypeAlias = "Callable[[EngineBatch], object]"
"""Called on the tap's thread with every batch of every rank of this process, in order, and with gaps as such."""

_sinks: list[Sink] = []


def add_sink(sink: Sink) -> None:
    """Have every tap of this process call `sink`, whether it is made already or later.

    What was published before is a `StreamGap` to it. It has to return soon: batches pile up meanwhile. What it raises
    is counted, and the batch is a gap to it. A `Node` is not thread-safe: hand the batch over to its own thread, such
    as by ``loop.call_soon_threadsafe``. vLLM gets a tap only if there is a sink, or PREFIXROUTE_TAP, when it is made.
    """
    _sinks.append(sink)


def remove_sink(sink: Sink) -> None:
    """Undo `add_sink`; ValueError when it was not added."""
    _sinks.remove(sink)


def sinks() -> tuple[Sink, ...]:
    """What `add_sink` was given."""
    return tuple(_sinks)
