"""Where a tap listens: ``tap:///absolute/path.sock``, one Unix socket a data-parallel rank.

Rule: rank 0 has the path itself, rank r has ``path.r``.
"""

from __future__ import annotations

from typing import Final

from prefixroute_streams import EventSource

from prefixroute.errors import UsageError

from .paths import MAX_PATH_BYTES, path_of_rank

__all__ = ["MAX_PATH_BYTES", "SCHEME", "is_tap", "path_of_rank", "path_of_tap", "sources_of_tap"]

SCHEME: Final = "tap://"


def is_tap(endpoint: str) -> bool:
    """Whether an event endpoint is a tap's."""
    return endpoint.startswith(SCHEME)


def path_of_tap(endpoint: str) -> str:
    """Return the socket's path. Raises `UsageError` when it is not absolute, or longer than the system can bind."""
    path = endpoint.removeprefix(SCHEME)
    if not is_tap(endpoint) or not path.startswith("/") or "\0" in path:
        raise UsageError(
            f"a tap's endpoint is tap:// and an absolute path, such as tap:///run/x.sock, not {endpoint!r}"
        )
    if len(path.encode()) > MAX_PATH_BYTES:
        raise UsageError(f"a socket's path has at most {MAX_PATH_BYTES} bytes: {path}")
    return path


def sources_of_tap(endpoint: str, ranks: int = 1) -> list[EventSource]:
    """Return the sources of an engine whose PREFIXROUTE_TAP is the path of `endpoint`, one a rank, in rank order."""
    path = path_of_tap(endpoint)
    paths = [path_of_rank(path, rank) for rank in range(ranks)]
    return [EventSource(f"{SCHEME}{path_of_tap(SCHEME + path)}", rank=rank) for rank, path in enumerate(paths)]
