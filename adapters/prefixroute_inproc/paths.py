"""Names of a tap's sockets. Not in `tap_address`: engines load this file, and that one imports the core."""

from __future__ import annotations

from typing import Final

MAX_PATH_BYTES: Final = 107
"""sun_path holds 108 bytes with its final zero."""


def path_of_rank(path: str, rank: int) -> str:
    """Return the socket's path of a data-parallel rank, given that of rank 0."""
    return path if rank == 0 else f"{path}.{rank}"
