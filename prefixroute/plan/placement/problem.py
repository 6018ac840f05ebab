"""A placement problem: servers, clients, a model of equal blocks, and the round trips between them.

Rules:
1. In this folder a *block* is a transformer block of the model, numbered from 1; a *span* is consecutive blocks on one
   server.
2. Times are in milliseconds and memory is in bytes, and every name says so. The text at a field says whether it is per
   block, per token or per prompt.
3. Nothing is guessed: an unknown round trip, or a time that is not above zero, is refused. Otherwise a hop would be
   free, and every plan would go through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixroute.errors import UsageError

Floats = NDArray[np.float64]
Matrix = Sequence[Sequence[float]] | Floats
Vector = Sequence[float] | Floats

ROUNDING = 1e-9
"""Shares of a block or slot below this are rounding errors of the division, not a lack of memory."""


class Span(NamedTuple):
    """Blocks `first` to `first + blocks - 1` on one server."""

    first: int
    blocks: int

    @property
    def end(self) -> int:
        """The block after the last one."""
        return self.first + self.blocks


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A placement problem as arrays; build it with `Problem.of`, which checks it.

    With J servers and C clients. Without `hop_ms` the client relays between servers (hub and spoke); with it the
    servers pass a token on to each other, and the last one answers the client.
    """

    blocks: int
    """Blocks of the model."""
    block_bytes: float
    """Bytes of the weights of one block."""
    session_bytes: float
    """Bytes of cache that one block needs for one session of full length."""
    memory_bytes: Floats
    """Bytes of each server for weights and cache. Shape (J,)."""
    decode_ms: Floats
    """Milliseconds that one token takes in one block of each server. Shape (J,)."""
    rtt_ms: Floats
    """Milliseconds that one decoded token takes from client to server and back, serialised. Shape (C, J)."""
    requests: tuple[int, ...]
    """Requests that each client has under way at once: the design load. Length C."""
    prefill_ms: Floats
    """Milliseconds that a whole prompt takes in one block of each server. Shape (J,)."""
    prompt_rtt_ms: Floats
    """Milliseconds that a whole prompt takes from client to server and back. Shape (C, J)."""
    output_tokens: int
    """Tokens of an answer."""
    setup_ms: float
    """Milliseconds added to every request."""
    most_blocks: tuple[int, ...]
    """The most blocks that each server may hold. Length J."""
    hop_ms: Floats | None
    """Milliseconds that one decoded token takes one way from server to server, or None. Shape (J, J)."""
    prompt_hop_ms: Floats | None
    """Milliseconds that a whole prompt takes one way from server to server, or None. Shape (J, J)."""

    @classmethod
    def of(
        cls,
        *,
        blocks: int,
        block_bytes: float,
        session_bytes: float,
        memory_bytes: Vector,
        decode_ms: Vector,
        rtt_ms: Matrix,
        requests: Sequence[int],
        prefill_ms: Vector | None = None,
        prompt_rtt_ms: Matrix | None = None,
        output_tokens: int = 1,
        setup_ms: float = 0.0,
        most_blocks: Sequence[int] | None = None,
        hop_ms: Matrix | None = None,
        prompt_hop_ms: Matrix | None = None,
    ) -> Problem:
        """Check and build a problem; values of prompts default to those of tokens. Raises `UsageError`."""
        n, clients = len(memory_bytes), len(requests)
        if blocks < 1 or output_tokens < 1 or n < 1 or clients < 1:
            raise UsageError("a placement needs blocks, output_tokens, servers and clients, one of each at least")
        if min(requests) < 0 or sum(requests) < 1:
            raise UsageError("requests of clients are 0 or more, and one at least in all")
        for name, value in (("block_bytes", block_bytes), ("session_bytes", session_bytes)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} must be a positive number, not {value}")
        if not (math.isfinite(setup_ms) and setup_ms >= 0):
            raise UsageError(f"setup_ms must be 0 or more, not {setup_ms}")
        rtt = _array("rtt_ms", rtt_ms, (clients, n), 0.0)
        decode = _array("decode_ms", decode_ms, (n,), None)
        hop = None if hop_ms is None else _array("hop_ms", hop_ms, (n, n), 0.0)
        caps = tuple(most_blocks) if most_blocks is not None else (blocks,) * n
        if len(caps) != n or min(caps) < 0:
            raise UsageError(f"most_blocks needs a number of blocks for each of {n} servers")
        return cls(
            blocks,
            float(block_bytes),
            float(session_bytes),
            _array("memory_bytes", memory_bytes, (n,), 0.0),
            decode,
            rtt,
            tuple(requests),
            decode if prefill_ms is None else _array("prefill_ms", prefill_ms, (n,), 0.0),
            rtt if prompt_rtt_ms is None else _array("prompt_rtt_ms", prompt_rtt_ms, (clients, n), 0.0),
            output_tokens,
            float(setup_ms),
            caps,
            hop,
            hop if prompt_hop_ms is None else _array("prompt_hop_ms", prompt_hop_ms, (n, n), 0.0),
        )

    @property
    def servers(self) -> int:
        """How many servers there are."""
        return len(self.memory_bytes)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.requests)

    @property
    def concurrent(self) -> int:
        """Requests under way at once, of all clients."""
        return sum(self.requests)

    def held_blocks(self, sessions: int) -> NDArray[np.int64]:
        """Return how many blocks each server can hold beside the cache of so many sessions in every block."""
        room = self.memory_bytes / (self.block_bytes + sessions * self.session_bytes)
        return np.minimum(np.floor(room + ROUNDING).astype(np.int64), np.minimum(self.most_blocks, self.blocks))

    def slots(self, spans: Sequence[Span | None]) -> list[int]:
        """Return the cache slots left on each server: one slot is one block for one session."""
        return [
            0 if span is None else math.floor((memory - self.block_bytes * span.blocks) / self.session_bytes + ROUNDING)
            for span, memory in zip(spans, self.memory_bytes.tolist(), strict=True)
        ]

    def most_requests(self) -> int:
        """Return a number of requests that certainly fits, 0 if none; a server may waste less than one block of it."""
        spare = float(self.memory_bytes.sum()) - self.block_bytes * (self.blocks + self.servers)
        return max(math.floor(spare / (self.session_bytes * (self.blocks + self.servers)) + ROUNDING), 0)

    def missing_bytes(self, sessions: int = 1) -> float:
        """Return the bytes that are missing for the model when every server reserves so many sessions; 0 if it fits."""
        lacking = self.blocks - int(self.held_blocks(sessions).sum())
        return max(lacking, 0) * (self.block_bytes + sessions * self.session_bytes)


def _array(name: str, values: Vector | Matrix, shape: tuple[int, ...], least: float | None) -> Floats:
    """Return the values as a read-only array; they must be above zero where `least` is None."""
    try:
        array = np.array(values, np.float64)
    except ValueError:
        raise UsageError(f"{name} needs numbers in the shape {shape}") from None
    if array.shape != shape:
        raise UsageError(f"{name} needs the shape {shape}, not {array.shape}: one number for each")
    bad = ~np.isfinite(array) | (array <= 0 if least is None else array < least)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        bound = "above 0" if least is None else f"{least:g} or more"
        raise UsageError(f"{name}{list(place)} must be a number {bound}, not {array[place]}")
    array.setflags(write=False)
    return array


def with_requests(problem: Problem, requests: Sequence[int]) -> Problem:
    """Return the same problem at another load."""
    if len(requests) != problem.clients or min(requests) < 0 or sum(requests) < 1:
        raise UsageError(f"requests need a number for each of {problem.clients} clients, one at least in all")
    return replace(problem, requests=tuple(requests))
