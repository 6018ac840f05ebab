"""Sorted sets of integers in few bytes: split Rice coding, vectorised both ways.

A set of n values below `universe` is coded as its gaps (the first value, then differences), each cut at w bits, the
optimum for gaps of a random set:

    w = max(1, floor(log2(universe / n)))

    n 4 | m 4 | unary, m bytes | remainders, ceil(n * w / 8) bytes

unary: for each gap, gap >> w zero bits, then a one bit; remainders: the gap's low w bits. Bits run from the most
significant one, padding is zero, numbers are little-endian. An empty set is no bytes at all.

Rules:
1. Both ends know the universe, so w does not travel, and a set has one encoding only: another one is refused.
2. n and m come from the network: they are held against the data's own length before anything is allocated.

Cost: 4.11 bytes a key at 100,000 keys of 48 bits (log2(universe / n) + 1.58 bits; no code of a set takes under 1.44);
10 ms to encode and 4 ms to decode them, 0.05 ms for 625.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import DecodeError
from .keyset import Keys

COUNT_BYTES = 4
HEADER_BYTES = 2 * COUNT_BYTES


def rice_parameter(universe: int, n: int) -> int:
    """Return the number of low bits that are coded as they are."""
    return max(1, (universe // max(n, 1)).bit_length() - 1)


def encoded_bytes(universe: int, n: int) -> int:
    """Return an upper bound of what `n` values below `universe` take. O(1)."""
    if not n:
        return 0
    w = rice_parameter(universe, n)
    unary_bits = n + (universe >> w)
    return HEADER_BYTES + (unary_bits + 7) // 8 + (n * w + 7) // 8


def encode_sorted(values: Keys, universe: int) -> bytes:
    """Encode strictly ascending values below `universe` <= 2**56."""
    n = len(values)
    if not n:
        return b""
    w = rice_parameter(universe, n)
    gaps = np.diff(values, prepend=np.uint64(0))
    ends = np.cumsum(gaps >> np.uint64(w), dtype=np.int64) + np.arange(n, dtype=np.int64)
    bits = np.zeros(int(ends[-1]) + 1, np.uint8)
    bits[ends] = 1
    unary = np.packbits(bits).tobytes()
    columns = (w + 7) // 8
    low = (gaps & np.uint64((1 << w) - 1)).astype(">u8").view(np.uint8).reshape(n, 8)[:, 8 - columns :]
    remainders = np.packbits(np.unpackbits(np.ascontiguousarray(low), axis=1)[:, columns * 8 - w :]).tobytes()
    return n.to_bytes(COUNT_BYTES, "little") + len(unary).to_bytes(COUNT_BYTES, "little") + unary + remainders


def decode_sorted(data: bytes, universe: int) -> Keys:
    """Decode what `encode_sorted` made of values below `universe`. Raises `DecodeError` of kind ``keys``."""
    if not data:
        return np.empty(0, np.uint64)
    n = int.from_bytes(data[:COUNT_BYTES], "little")
    m = int.from_bytes(data[COUNT_BYTES:HEADER_BYTES], "little")
    w = rice_parameter(universe, n)
    if not 0 < n <= 8 * m or len(data) != HEADER_BYTES + m + (n * w + 7) // 8:
        raise DecodeError("keys", f"{len(data)} bytes do not hold {n} values with {m} bytes of unary code")
    packed = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(np.unpackbits(packed[HEADER_BYTES : HEADER_BYTES + m]))
    if len(ends) != n or 8 * m - int(ends[-1]) > 8 or int(ends[-1]) + 1 - n > universe >> w:
        raise DecodeError("keys", "the unary code is not that of values in their universe")
    remainders = _read(packed[HEADER_BYTES + m :], n, w)
    gaps = (np.diff(ends, prepend=-1) - 1).astype(np.uint64) << np.uint64(w) | remainders
    values = np.cumsum(gaps, dtype=np.uint64)
    unused = -n * w % 8
    if bool((gaps[1:] == 0).any()) or int(values[-1]) >= universe or data[-1] & ((1 << unused) - 1):
        raise DecodeError("keys", "values do not ascend within their universe")
    return values


def _read(packed: NDArray[np.uint8], n: int, w: int) -> Keys:
    """Read `n` numbers of `w` bits each."""
    padded = np.zeros(len(packed) + 8, np.uint8)
    padded[: len(packed)] = packed
    starts = np.arange(n, dtype=np.int64) * w
    # Eight bytes from every byte on, overlapping: numpy's own windows cost 30 us more, half of a small decode.
    windows: NDArray[np.uint64] = np.ndarray((len(packed) + 1,), ">u8", padded.data, 0, (1,))
    words = windows[starts >> 3].astype(np.uint64)
    numbers: Keys = (words << (starts & 7).astype(np.uint64)) >> np.uint64(64 - w)
    return numbers
