"""Wide-area round trips: small built-in matrices, and readers of topology files and of measured round trips.

Rules:
1. A matrix has the full round trip in milliseconds between every two places; only from a place to itself it is zero.
2. A missing value is refused with its line, so that a missing link does not become a free one.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from prefixroute import UsageError


class Wan(NamedTuple):
    """Places, and the round trip in milliseconds between every two."""

    name: str
    places: tuple[str, ...]
    rtt_ms: tuple[tuple[float, ...], ...]


def of_links(name: str, places: Sequence[str], links: Sequence[tuple[int, int, float]]) -> Wan:
    """Join places by links (from, to, one-way milliseconds); a round trip is twice the shortest path.

    Raises `UsageError` when a place cannot be reached.
    """
    near: list[list[tuple[int, float]]] = [[] for _ in places]
    for i, j, delay_ms in links:
        near[i].append((j, delay_ms))
    rows = []
    for start in range(len(places)):
        found = [math.inf] * len(places)
        found[start] = 0.0
        queue = [(0.0, start)]
        while queue:
            so_far, i = heapq.heappop(queue)
            if so_far > found[i]:
                continue
            for j, delay_ms in near[i]:
                if so_far + delay_ms < found[j]:
                    found[j] = so_far + delay_ms
                    heapq.heappush(queue, (found[j], j))
        if math.inf in found:
            raise UsageError(f"{name}: no way from {places[start]} to {places[found.index(math.inf)]}")
        rows.append(tuple(2 * each for each in found))
    return Wan(name, tuple(places), tuple(rows))


def read_graph(path: Path) -> Wan:
    """Read a topology file: ``NODES n``, a heading, rows ``label x y``; ``EDGES m``, a heading, rows with a delay.

    Delays are microseconds. Raises `UsageError` with the line.
    """
    lines = _lines(path)
    places: list[str] = []
    links: list[tuple[int, int, float]] = []
    part, heading = "", False
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields:
            continue
        if fields[0] in ("NODES", "EDGES"):
            part, heading = fields[0], True
        elif heading:
            heading = False
        elif part == "NODES" and len(fields) == 3:
            places.append(fields[0])
        elif part == "EDGES" and len(fields) == 6:
            try:
                i, j, delay_us = int(fields[1]), int(fields[2]), float(fields[5])
            except ValueError:
                raise UsageError(f"{path}:{number}: not numbers: label src dest weight bw delay") from None
            if not (0 <= i < len(places) and 0 <= j < len(places) and delay_us >= 0):
                raise UsageError(
                    f"{path}:{number}: a link joins nodes 0 to {len(places) - 1} with a delay of 0 or more"
                )
            links.append((i, j, delay_us / 1000))
        else:
            raise UsageError(f"{path}:{number}: not a row of a topology: label x y, or label src dest weight bw delay")
    if not places:
        raise UsageError(f"{path}: no NODES: not a topology file")
    return of_links(path.stem, places, links)


def read_landmarks(path: Path, places: int, rng: random.Random) -> Wan:
    """Read round trips to common landmarks (columns ``latency_m1`` ...), and draw so many places from rows.

    The round trip between two places is taken by way of the landmark that makes it shortest: an upper bound. Raises
    `UsageError` with the line.
    """
    rows: list[tuple[str, tuple[float, ...]]] = []
    reader = csv.DictReader(_lines(path))
    columns = [name for name in reader.fieldnames or () if name.startswith("latency_m")]
    if not columns:
        raise UsageError(f"{path}:1: no columns latency_m1, latency_m2, ...: not a file of round trips to landmarks")
    for number, row in enumerate(reader, 2):
        try:
            times = tuple(float(row[name]) for name in columns)
        except (TypeError, ValueError):
            raise UsageError(f"{path}:{number}: a round trip is not a number") from None
        if min(times) > 0:
            rows.append((f"row-{number}", times))
    if len(rows) < places or places < 1:
        raise UsageError(f"{path}: {len(rows)} usable rows, not enough for {places} places")
    drawn = rng.sample(rows, places)
    matrix = [
        tuple(
            0.0 if i == j else min(a + b for a, b in zip(mine, theirs, strict=True))
            for j, (_, theirs) in enumerate(drawn)
        )
        for i, (_, mine) in enumerate(drawn)
    ]
    return Wan(path.stem, tuple(name for name, _ in drawn), tuple(matrix))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from None


# --- built in ----------------------------------------------------------------------------------------------

FIBRE_KM_PER_MS = 200.0
DETOUR = 1.5
ACCESS_MS = 1.0
"""Speed of light in fibre, detours, and the last mile: the built-in matrices are computed from these and the places of
cities. They are no measurement."""

_CITIES = {
    "america": (
        "NewYork 40.7 -74.0",
        "Ashburn 39.0 -77.5",
        "Atlanta 33.7 -84.4",
        "Chicago 41.9 -87.6",
        "Dallas 32.8 -96.8",
        "Denver 39.7 -105.0",
        "LosAngeles 34.1 -118.2",
        "SanJose 37.3 -121.9",
        "Seattle 47.6 -122.3",
        "Toronto 43.7 -79.4",
        "Montreal 45.5 -73.6",
        "Miami 25.8 -80.2",
    ),
    "europe": (
        "London 51.5 -0.1",
        "Paris 48.9 2.4",
        "Frankfurt 50.1 8.7",
        "Amsterdam 52.4 4.9",
        "Madrid 40.4 -3.7",
        "Milan 45.5 9.2",
        "Stockholm 59.3 18.1",
        "Warsaw 52.2 21.0",
        "Vienna 48.2 16.4",
        "Dublin 53.3 -6.3",
        "Zurich 47.4 8.5",
        "Athens 38.0 23.7",
    ),
    "world": (
        "Ashburn 39.0 -77.5",
        "SanJose 37.3 -121.9",
        "SaoPaulo -23.6 -46.6",
        "London 51.5 -0.1",
        "Frankfurt 50.1 8.7",
        "Johannesburg -26.2 28.0",
        "Mumbai 19.1 72.9",
        "Singapore 1.4 103.8",
        "Tokyo 35.7 139.7",
        "Seoul 37.6 127.0",
        "Sydney -33.9 151.2",
        "Dubai 25.2 55.3",
    ),
}
BUILT_IN = tuple(_CITIES)


def built_in(name: str) -> Wan:
    """Return a built-in matrix: america, europe or world. Raises `UsageError` for another name."""
    if name not in _CITIES:
        raise UsageError(f"no built-in network {name!r}: {', '.join(BUILT_IN)}, or a file")
    rows = [text.split() for text in _CITIES[name]]
    cities = [(row[0], float(row[1]), float(row[2])) for row in rows]
    matrix = tuple(tuple(0.0 if a == b else round(_rtt_ms(a[1], a[2], b[1], b[2]), 3) for b in cities) for a in cities)
    return Wan(name, tuple(city[0] for city in cities), matrix)


def _rtt_ms(lat_a: float, lon_a: float, lat_b: float, lon_b: float) -> float:
    up_a, up_b, turn = math.radians(lat_a), math.radians(lat_b), math.radians(lon_b - lon_a)
    arc = math.acos(min(1.0, math.sin(up_a) * math.sin(up_b) + math.cos(up_a) * math.cos(up_b) * math.cos(turn)))
    return 2 * (6371.0 * arc * DETOUR / FIBRE_KM_PER_MS + ACCESS_MS)


def network(name: str, places: int = 64, rng: random.Random | None = None) -> Wan:
    """Return a built-in matrix, or read a file: ``.graph``, or a ``.csv`` of landmarks. Raises `UsageError`."""
    path = Path(name)
    if path.suffix == ".graph":
        return read_graph(path)
    if path.suffix == ".csv":
        return read_landmarks(path, places, rng or random.Random(0))
    return built_in(name)
