"""Batches for a callable in the engine's own process.

Rule: a sink sees what a follower would: batches in order, and what it missed as a `StreamGap` where it happened.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from prefixroute.errors import DecodeError, UsageError
from prefixroute.events import EngineBatch, StreamGap

if TYPE_CHECKING:
    from .registry import Sink

_DECODERS = {"vllm": "prefixroute_vllm.decode", "sglang": "prefixroute_sglang.decode"}
"""Engine name -> the module whose `batch_of` reads its publisher's objects."""


def decoder_of(engine: str) -> Callable[[object, int], EngineBatch]:
    """Return the adapter's `batch_of`. KeyError for an engine that has no adapter, ImportError as it may be."""
    found: Callable[[object, int], EngineBatch] = import_module(_DECODERS[engine]).batch_of
    return found


def find_sink(name: str) -> Sink:
    """Return the function that ``module:function`` names. Raises `UsageError` when there is none."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the user's module does as it is imported
        raise UsageError(f"a sink is module:function, and {name!r} cannot be had: {error!r}") from error
    if not callable(found):
        raise UsageError(f"{name!r} is no function")
    sink: Sink = found
    return sink


class Delivery:
    """One sink, and how far it has got. `failed` is told what the sink raises."""

    def __init__(self, sink: Sink, engine: str, rank: int, failed: Callable[[BaseException], None]) -> None:
        self._sink = sink
        self._decode = decoder_of(engine)
        self._rank = rank
        self._failed = failed
        self._next_seq = 0

    def take(self, seq: int, batch: object) -> None:
        """Hand over batch `seq`, after the gap before it."""
        if not self.lose(seq):
            return
        try:
            decoded = self._decode(batch, self._rank)
        except DecodeError as error:
            self._failed(error)
            return
        if self._call(decoded):
            self._next_seq = seq + 1

    def lose(self, next_seq: int) -> bool:
        """Tell the sink that what it has not seen below `next_seq` will not come; False when it could not be told."""
        missing = next_seq - self._next_seq
        if missing > 0:
            if not self._call(EngineBatch((StreamGap(missing),), self._rank)):
                return False
            self._next_seq = next_seq
        return True

    def _call(self, batch: EngineBatch) -> bool:
        try:
            self._sink(batch)
        except Exception as error:
            self._failed(error)
            return False
        return True
