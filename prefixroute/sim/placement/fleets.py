"""Fleets for simulations of placement: a 176-billion-parameter model on few large and many small servers of a network.

Rule: the constants are those of the published experiments, so that figures can be compared; all random numbers come
from one seed, in the order of the published recipe.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefixroute import UsageError
from prefixroute.plan import PetalsRates, Problem

from .wan import Wan


class ServerKind(NamedTuple):
    """A kind of server: memory in bytes, milliseconds of a token and a prompt in one block, and its `PetalsRates`."""

    memory_bytes: float
    decode_ms: float
    prefill_ms: float
    prefill_ms_per_token: float
    forward: float
    network: float


LARGE = ServerKind(79.13e9, 3.2197, 32.99, 0.0743, 20829.38, 3020.37)
SMALL = ServerKind(8.2e9, 16.2488, 206.3547, 0.1041, 2757.72, 3138.10)


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Parameters of drawn fleets; the defaults are the published ones, without their fixed delays."""

    servers: int = 20
    large_share: float = 0.2
    clients: int = 1
    small_blocks: int = 4
    """The most blocks on a small server: 4 in the published code; 70 is no bound."""
    prompt_tokens: int = 20
    output_tokens: int = 128
    overhead_ms: float = 100.0
    setup_ms: float = 70.0

    def __post_init__(self) -> None:
        if self.servers < 1 or self.clients < 1 or not 0 <= self.large_share <= 1:
            raise UsageError("a fleet has a server and a client at least, and a large_share from 0 to 1")


BLOCKS = 70
BLOCK_BYTES = 1.3233976672e9
KV_BYTES_PER_TOKEN = 57344


class MadeFleet(NamedTuple):
    """A drawn fleet at a load of one request, its raw round trips in milliseconds, PETALS' rates, and the generator."""

    problem: Problem
    raw_rtt_ms: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    rates: PetalsRates
    rng: random.Random


def made_fleet(wan: Wan, seed: int, shape: FleetShape | None = None) -> MadeFleet:
    """Draw the places of clients and servers from a network; each has its own place if the network has enough."""
    shape = shape or FleetShape()
    rng = random.Random(1000 * seed + 7)
    places = list(range(len(wan.places)))
    rng.shuffle(places)
    wanted = shape.clients + shape.servers
    if len(places) < wanted:
        places += rng.choices(places, k=wanted - len(places))
    large = round(shape.large_share * shape.servers)
    kinds = [LARGE] * large + [SMALL] * (shape.servers - large)
    rng.shuffle(kinds)
    clients, servers = places[: shape.clients], places[shape.clients : wanted]
    raw = np.array([[wan.rtt_ms[c][j] for j in servers] for c in clients])
    prompt, whole = shape.prompt_tokens, shape.prompt_tokens + shape.output_tokens
    problem = Problem.of(
        blocks=BLOCKS,
        block_bytes=BLOCK_BYTES,
        session_bytes=KV_BYTES_PER_TOKEN * whole,
        memory_bytes=[kind.memory_bytes for kind in kinds],
        decode_ms=[kind.decode_ms for kind in kinds],
        prefill_ms=[kind.prefill_ms + kind.prefill_ms_per_token * prompt for kind in kinds],
        rtt_ms=raw + shape.overhead_ms,
        prompt_rtt_ms=raw + 0.7049 * prompt + 67,
        requests=[1] * shape.clients,
        output_tokens=shape.output_tokens,
        setup_ms=shape.setup_ms,
        most_blocks=[BLOCKS if kind is LARGE else shape.small_blocks for kind in kinds],
    )
    rates = PetalsRates(tuple(kind.forward for kind in kinds), tuple(kind.network for kind in kinds))
    return MadeFleet(problem, raw, rates, rng)
