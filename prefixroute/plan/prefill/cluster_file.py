"""CLUSTER.toml: the clusters of ``prefixroute plan prefill``, read and checked.

The classes below are the tables of a file, and their fields are its keys; an unknown key is refused. Names that end in
`_ms` are milliseconds, all other times are seconds; a curve is a list of points [tokens, value].

Rule: an error names the file, the line, and what to write instead.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Literal

from prefixroute import UsageError

from ..settings_file import FileKind, FileTable, Source, read_settings
from .costs import Curve, Decode, KvBytes, Polynomial, Slower, Table
from .division import PrefillClusters
from .lengths import Empirical, Lengths, LogNormal
from .traces import read_trace

Points = tuple[tuple[float, float], ...]
MIB = 2.0**20
GBIT = 1e9 / 8


class ClusterWorkload(FileTable, frozen=True):
    """Lengths of prompts: a log-normal by `mu` and `sigma`, or a `file` of lengths; and the tokens of an answer.

    A file is a trace (`traces.read_trace`): the tokens that an unbounded cache would hold are subtracted.
    """

    mu: float = 0.0
    sigma: float = 0.0
    min_tokens: float = 1.0
    max_tokens: float = 131072.0
    file: str = ""
    output_tokens: float = 1024.0


class ClusterModel(FileTable, frozen=True):
    """Bytes of KV: points in MiB, or bytes a token plus a state. One of `layers` is sent while the next is computed."""

    kv_mib: Points = ()
    kv_bytes_per_token: float = 0.0
    kv_state_bytes: float = 0.0
    layers: int = 60


class ClusterPool(FileTable, frozen=True):
    """The prefill cluster: nodes (instances), and the seconds of a prompt by tokens, as points or as coefficients."""

    nodes: int
    prefill_s: Points = ()
    prefill_coefficients: tuple[float, ...] = ()


class ClusterLocal(FileTable, frozen=True):
    """The local cluster: nodes, seconds of prefill (or a multiple of the pool's), and the requests a node decodes.

    `alone_nodes` is the size of a cluster without a pool that costs as much, to compare with; 0: as many as `nodes`.
    """

    nodes: int
    prefill_s: Points = ()
    prefill_coefficients: tuple[float, ...] = ()
    times_pool: float = 0.0
    decode_slots: int = 32
    decode_step_ms: float = 40.0
    alone_nodes: int = 0


class ClusterLink(FileTable, frozen=True):
    """The link from the pool: bandwidth, round trip, connections, and the bandwidth of one connection (0: no bound)."""

    gbit_per_s: float
    rtt_ms: float = 20.0
    connections: int = 64
    connection_gbit_per_s: float = 0.0


class ClusterFile(FileTable, frozen=True):
    """A whole file. `average` is "length" (as published) or "time" (nearer to a simulation with arrivals)."""

    workload: ClusterWorkload
    model: ClusterModel
    pool: ClusterPool
    local: ClusterLocal
    link: ClusterLink
    title: str = ""
    average: Literal["length", "time"] = "length"

    @property
    def decode(self) -> Decode:
        """A local node that decodes."""
        return Decode(self.local.decode_slots, self.local.decode_step_ms / 1000, self.workload.output_tokens)

    @property
    def alone_nodes(self) -> int:
        """Nodes of a cluster without a pool, to compare with."""
        return self.local.alone_nodes or self.local.nodes

    @property
    def transfer_bytes_per_s(self) -> float:
        """Bytes a second that the connections of one transfer carry."""
        link = self.link
        return link.connections * link.connection_gbit_per_s * GBIT if link.connection_gbit_per_s else inf


def read_clusters(path: Path) -> tuple[ClusterFile, PrefillClusters]:
    """Read a file; return its contents, and the clusters that it describes. Raises `UsageError`."""
    file, source = read_settings(path, ClusterFile, _KIND)
    return file, _clusters(file, source, path.parent)


_KIND = FileKind(
    {
        "": ClusterFile,
        "link": ClusterLink,
        "local": ClusterLocal,
        "model": ClusterModel,
        "pool": ClusterPool,
        "workload": ClusterWorkload,
    },
    "examples/plan/cluster.toml",
)


def _clusters(file: ClusterFile, source: Source, folder: Path) -> PrefillClusters:
    """Build the clusters that the file describes; every error names the key to change."""
    source.at_least(0, (("pool.nodes", file.pool.nodes), ("local.alone_nodes", file.local.alone_nodes)))
    source.at_least(
        1,
        (
            ("local.nodes", file.local.nodes),
            ("model.layers", file.model.layers),
            ("link.connections", file.link.connections),
        ),
    )
    gbit, step_ms = file.link.gbit_per_s, file.local.decode_step_ms
    for where, amount in (("link.gbit_per_s", gbit), ("local.decode_step_ms", step_ms)):
        if not amount > 0:
            raise source.error(where, f"must be above 0, not {amount:g}")
    decode = source.made("local.decode_slots", lambda: file.decode)
    pool_s = _curve(source, "pool", file.pool.prefill_s, file.pool.prefill_coefficients)
    if file.local.times_pool:
        local_s: Curve = source.made("local.times_pool", lambda: Slower(pool_s, file.local.times_pool))
    else:
        local_s = _curve(source, "local", file.local.prefill_s, file.local.prefill_coefficients)
    return PrefillClusters(
        _lengths(file.workload, source, folder),
        _kv(file.model, source),
        pool_s,
        local_s,
        file.pool.nodes,
        file.local.nodes,
        decode.requests_per_s,
        file.link.gbit_per_s * GBIT,
        file.average,
    )


def _curve(source: Source, table: str, points: Points, coefficients: tuple[float, ...]) -> Curve:
    if points:
        return source.made(f"{table}.prefill_s", lambda: Table(points))
    if coefficients:
        return source.made(f"{table}.prefill_coefficients", lambda: Polynomial(coefficients))
    also = ", or times_pool = 2.3" if table == "local" else ""
    raise source.error(table, f"no time of prefill: give prefill_s = [[1024, 0.44], [8192, 0.72]]{also}")


def _kv(model: ClusterModel, source: Source) -> Curve:
    if model.kv_mib:
        points = tuple((tokens, mib * MIB) for tokens, mib in model.kv_mib)
        return source.made("model.kv_mib", lambda: Table(points))
    if not model.kv_bytes_per_token and not model.kv_state_bytes:
        raise source.error("model", "no size of KV: give kv_mib = [[1024, 190.8], ...] or kv_bytes_per_token")
    return source.made("model.kv_bytes_per_token", lambda: KvBytes(model.kv_bytes_per_token, model.kv_state_bytes))


def _lengths(workload: ClusterWorkload, source: Source, folder: Path) -> Lengths:
    if workload.file:
        try:
            return Empirical(row.uncached_tokens for row in read_trace(folder / workload.file))
        except UsageError as error:
            raise source.error("workload.file", str(error)) from None
    if not workload.sigma:
        raise source.error("workload", "no lengths of prompts: give mu and sigma, or file")
    return source.made(
        "workload.sigma",
        lambda: LogNormal(workload.mu, workload.sigma, workload.min_tokens, workload.max_tokens),
    )
