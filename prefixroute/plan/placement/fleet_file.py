"""FLEET.toml: the servers, clients and model of ``prefixroute plan place``, read and checked.

The classes below are the tables of a file, and their fields are its keys; an unknown key is refused. Memory is in GB of
10^9 bytes, times are in milliseconds.

Rule: an error names the file, the line, and what to write instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ..settings_file import FileKind, FileTable, Source, read_settings
from .design_load import DesignLoad, design_load, share_out
from .problem import Floats, Problem, with_requests

GB = 1e9


class FleetModel(FileTable, frozen=True):
    """The model's equal blocks: how many, the weights of one in GB, and the cache bytes of one token in one block."""

    blocks: int
    block_gb: float
    kv_bytes_per_token: float
    name: str = ""


class FleetWorkload(FileTable, frozen=True):
    """Lengths in tokens, and the load: arrivals a second, or requests under way at once."""

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float = 0.0
    concurrent: int = 0
    setup_ms: float = 0.0


class FleetServer(FileTable, frozen=True):
    """One machine, or `count` equal ones; in one block a prompt takes `prefill_ms`, plus `prefill_ms_per_token`."""

    name: str
    site: str
    memory_gb: float
    decode_ms: float
    prefill_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    most_blocks: int = 0
    count: int = 1


class FleetClient(FileTable, frozen=True):
    """A source of requests, and its share of them (in any unit: shares are divided by their sum)."""

    name: str
    site: str
    share: float = 1.0


class FleetNetwork(FileTable, frozen=True):
    """The round trip inside a site, and the cost of each step in addition: serialisation, copies, queues."""

    inside_ms: float = 0.5
    overhead_ms: float = 0.0
    prompt_overhead_ms: float = 0.0
    prompt_overhead_ms_per_token: float = 0.0


class FleetLink(FileTable, frozen=True):
    """The round trip between two sites."""

    sites: tuple[str, str]
    rtt_ms: float


class FleetFile(FileTable, frozen=True):
    """A whole file; with "hub" the client relays between servers, with "chain" servers pass tokens to each other."""

    model: FleetModel
    workload: FleetWorkload
    servers: tuple[FleetServer, ...]
    clients: tuple[FleetClient, ...]
    network: FleetNetwork = FleetNetwork()
    links: tuple[FleetLink, ...] = ()
    topology: Literal["hub", "chain"] = "hub"
    title: str = ""


class Fleet(NamedTuple):
    """A fleet file, and the problem that it describes, with J servers and C clients."""

    file: FleetFile
    """The file's contents."""
    servers: tuple[str, ...]
    """Names of the servers, in the order of the problem's arrays. Length J."""
    clients: tuple[str, ...]
    """Names of the clients, in the same order. Length C."""
    problem: Problem
    """The problem at the file's load."""
    load: DesignLoad
    """The design load: requests under way at once, and how that number was found."""
    raw_rtt_ms: Floats
    """Milliseconds of the round trips between clients and servers, without overheads. Shape (C, J)."""


def read_fleet(path: Path) -> Fleet:
    """Read a file and build its problem. Raises `UsageError`."""
    file, source = read_settings(path, FleetFile, _KIND)
    return _built(file, source)


_KIND = FileKind(
    {
        "": FleetFile,
        "clients": FleetClient,
        "links": FleetLink,
        "model": FleetModel,
        "network": FleetNetwork,
        "servers": FleetServer,
        "workload": FleetWorkload,
    },
    "examples/plan/fleet.toml",
)


def _check(file: FleetFile, source: Source) -> None:
    positive: list[tuple[str, float]] = [
        ("model.blocks", file.model.blocks),
        ("model.block_gb", file.model.block_gb),
        ("model.kv_bytes_per_token", file.model.kv_bytes_per_token),
        ("workload.prompt_tokens", file.workload.prompt_tokens),
        ("workload.output_tokens", file.workload.output_tokens),
    ]
    least: list[tuple[str, float]] = [("workload.setup_ms", file.workload.setup_ms)]
    least += [(f"network.{name}", getattr(file.network, name)) for name in FleetNetwork.__struct_fields__]
    for i, server in enumerate(file.servers):
        positive += [(f"servers[{i}].{name}", getattr(server, name)) for name in ("memory_gb", "decode_ms", "count")]
        names = ("prefill_ms", "prefill_ms_per_token", "most_blocks")
        least += [(f"servers[{i}].{name}", getattr(server, name)) for name in names]
    positive += [(f"clients[{i}].share", client.share) for i, client in enumerate(file.clients)]
    least += [(f"links[{i}].rtt_ms", link.rtt_ms) for i, link in enumerate(file.links)]
    source.more_than(0, positive)
    source.at_least(0, least)
    for table, rows in (("servers", file.servers), ("clients", file.clients)):
        if not rows:
            raise source.error(table, f"the list is empty: add [[{table}]]")
    workload = file.workload
    if (workload.requests_per_s > 0) == (workload.concurrent > 0):
        raise source.error("workload", "give one of requests_per_s and concurrent, above 0")


def _names(file: FleetFile) -> list[tuple[str, FleetServer]]:
    """Return every machine with a name of its own; a row with a count stands for several machines."""
    return [
        (server.name if server.count == 1 else f"{server.name}-{i}", server)
        for server in file.servers
        for i in range(1, server.count + 1)
    ]


def _round_trips(file: FleetFile, source: Source, froms: Sequence[str], tos: Sequence[str]) -> Floats:
    sites = {row.site for rows in (file.servers, file.clients) for row in rows}
    linked: dict[frozenset[str], float] = {}
    for i, link in enumerate(file.links):
        for site in link.sites:
            if site not in sites:
                known = ", ".join(sorted(sites))
                raise source.error(f"links[{i}].sites", f"no server or client is at {site!r}; sites are {known}")
        if frozenset(link.sites) in linked or link.sites[0] == link.sites[1]:
            kind = "inside_ms of [network] is the round trip inside a site" if len(set(link.sites)) == 1 else "keep one"
            raise source.error(f"links[{i}].sites", f"{' to '.join(link.sites)} is said already: {kind}")
        linked[frozenset(link.sites)] = link.rtt_ms

    def rtt(a: str, b: str) -> float:
        if a == b:
            return file.network.inside_ms
        found = linked.get(frozenset((a, b)))
        if found is None:
            raise source.error(
                "links", f"no link says the round trip between {a} and {b}: add one with sites = {json.dumps([a, b])}"
            )
        return found

    return np.array([[rtt(a, b) for b in tos] for a in froms])


def _built(file: FleetFile, source: Source) -> Fleet:
    _check(file, source)
    named = _names(file)
    rows = [row for _, row in named]
    for table, names in (("servers", [name for name, _ in named]), ("clients", [row.name for row in file.clients])):
        for i, name in enumerate(names):
            if name in names[:i]:
                raise source.error(table, f"two are called {name!r}: names must differ")
    sites = [row.site for row in rows]
    raw = _round_trips(file, source, [client.site for client in file.clients], sites)
    tokens, network, prompt = file.workload.prompt_tokens, file.network, file.workload.prompt_tokens
    overhead = network.overhead_ms
    prompt_overhead = network.prompt_overhead_ms + network.prompt_overhead_ms_per_token * prompt
    hops = _round_trips(file, source, sites, sites) if file.topology == "chain" else None
    shares = [client.share for client in file.clients]
    problem = Problem.of(
        blocks=file.model.blocks,
        block_bytes=file.model.block_gb * GB,
        session_bytes=file.model.kv_bytes_per_token * (tokens + file.workload.output_tokens),
        memory_bytes=[row.memory_gb * GB for row in rows],
        decode_ms=[row.decode_ms for row in rows],
        prefill_ms=[row.prefill_ms + row.prefill_ms_per_token * prompt for row in rows],
        rtt_ms=raw + overhead,
        prompt_rtt_ms=raw + prompt_overhead,
        requests=share_out(max(file.workload.concurrent, 1), shares),
        output_tokens=file.workload.output_tokens,
        setup_ms=file.workload.setup_ms,
        most_blocks=[row.most_blocks or file.model.blocks for row in rows],
        hop_ms=None if hops is None else (hops + overhead) / 2,
        prompt_hop_ms=None if hops is None else (hops + prompt_overhead) / 2,
    )
    if problem.missing_bytes(1):
        held = int(problem.held_blocks(1).sum())
        need = problem.missing_bytes(1)
        raise source.error(
            "model.blocks",
            f"the model does not fit by {need:,.0f} bytes: the servers hold {held} of {problem.blocks} blocks with the "
            "cache of one request; add memory or servers, or use smaller blocks",
        )
    load = (
        DesignLoad(file.workload.concurrent, float(file.workload.concurrent), 0.0)
        if file.workload.concurrent
        else design_load(problem, file.workload.requests_per_s, shares)
    )
    problem = with_requests(problem, share_out(load.requests, shares))
    return Fleet(file, tuple(name for name, _ in named), tuple(c.name for c in file.clients), problem, load, raw)
