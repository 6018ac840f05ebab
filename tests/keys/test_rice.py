"""The set codec: the reference vector, round trips at every size, its bounds, and no bytes that surprise it."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import DecodeError
from prefixroute.keys.keyset import MAX_UNIVERSE
from prefixroute.keys.rice import decode_sorted, encode_sorted, encoded_bytes, rice_parameter

exact = settings(derandomize=True, deadline=None, max_examples=200, database=None)


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    universe = draw(st.sampled_from([1, 2, 7, 100, 2**16, 2**40, 2**48, MAX_UNIVERSE]))
    values = draw(st.sets(st.integers(0, universe - 1), max_size=60))
    return sorted(values), universe


def plain_encode(values: list[int], universe: int) -> bytes:
    """The definition, bit by bit."""
    if not values:
        return b""
    w = rice_parameter(universe, len(values))
    gaps = [value - before for value, before in zip(values, [0, *values], strict=False)]
    unary = "".join("0" * (gap >> w) + "1" for gap in gaps)
    low = "".join(format(gap & ((1 << w) - 1), f"0{w}b") for gap in gaps)
    packed = [int((bits + "0" * (-len(bits) % 8)), 2).to_bytes((len(bits) + 7) // 8, "big") for bits in (unary, low)]
    return len(values).to_bytes(4, "little") + len(packed[0]).to_bytes(4, "little") + packed[0] + packed[1]


def test_the_reference_vector() -> None:
    # Three values below 20 and up to 27 are cut at two bits.
    assert encode_sorted(np.array([3, 9, 20], np.uint64), 21).hex() == "0300000001000000a4ec"


@pytest.mark.parametrize(("values", "universe"), [((3, 9, 20), 21), ((3, 9, 20), 1 << 48), ((8,), 35), ((1,), 3)])
def test_the_documents_codes_are_those_of_the_codec(values: tuple[int, ...], universe: int) -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text("utf-8")
    assert f"`{encode_sorted(np.array(values, np.uint64), universe).hex()}`" in text


@pytest.mark.parametrize(
    ("universe", "n", "w"),
    [
        (1, 1, 1),
        (3, 1, 1),
        (4, 1, 2),
        (7, 1, 2),
        (8, 1, 3),
        (21, 3, 2),
        (35, 1, 5),
        (2**48, 3, 46),
        (9, 20, 1),
        (0, 5, 1),
    ],
)
def test_the_cut_is_the_logarithm_of_the_whole_mean_gap(universe: int, n: int, w: int) -> None:
    assert rice_parameter(universe, n) == w


CODE = encode_sorted(np.array([3, 9, 20], np.uint64), 21)
OTHERS = {
    "nothing but a header": CODE[:8],
    "no values": bytes(8),
    "a byte less": CODE[:-1],
    "a byte more": CODE + b"\0",
    "unary one byte longer": CODE[:4] + b"\2" + CODE[5:9] + b"\0" + CODE[9:],
    "a one less": CODE[:8] + b"\xa0" + CODE[9:],
    "a one more": CODE[:8] + b"\xa5" + CODE[9:],
    "padding of the remainders": CODE[:-1] + b"\xed",
    "a value at the universe": encode_sorted(np.array([3, 9, 21], np.uint64), 22),
    "a value twice": b"\2\0\0\0\1\0\0\0\xc0\x60",
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_code_is_refused(what: str) -> None:
    assert decode_sorted(CODE, 21).tolist() == [3, 9, 20]
    with pytest.raises(DecodeError) as caught:
        decode_sorted(OTHERS[what], 21)
    assert caught.value.kind == "keys"


def test_a_gap_that_would_wrap_around_is_refused() -> None:
    # 2**16 zero bits, at w = 48, are a gap of 2**64.
    code = (1).to_bytes(4, "little") + (8193).to_bytes(4, "little") + bytes(8192) + b"\x80" + bytes(6)
    with pytest.raises(DecodeError):
        decode_sorted(code, 1 << 48)


@exact
@given(sets())
def test_it_is_the_definition_and_comes_back(case: tuple[list[int], int]) -> None:
    values, universe = case
    data = encode_sorted(np.array(values, np.uint64), universe)
    assert data == plain_encode(values, universe)
    assert decode_sorted(data, universe).tolist() == values
    assert len(data) <= encoded_bytes(universe, len(values))


@pytest.mark.parametrize("n", [1, 16, 625, 10_000])
def test_random_sets_take_what_the_formula_says(n: int) -> None:
    rng = random.Random(n)
    values = np.array(sorted(rng.sample(range(1 << 48), n)), np.uint64)
    data = encode_sorted(values, 1 << 48)
    assert (decode_sorted(data, 1 << 48) == values).all()
    if n > 100:
        bits = 8 * (len(data) - 8) / n
        assert np.log2(2**48 / n) + 1.4 < bits < np.log2(2**48 / n) + 1.7


@exact
@given(st.binary(max_size=60), st.sampled_from([1, 9, 2**16, 2**48]))
def test_any_bytes_give_a_set_or_a_decode_error(data: bytes, universe: int) -> None:
    try:
        values = decode_sorted(data, universe)
    except DecodeError as error:
        assert error.kind == "keys"
        return
    assert encode_sorted(values, universe) == data, "a set has one encoding only"
    assert values.tolist() == sorted(set(values.tolist()))
    assert all(value < universe for value in values.tolist())


@exact
@given(sets(), st.data())
def test_a_flipped_bit_gives_another_set_or_a_decode_error(case: tuple[list[int], int], data: st.DataObject) -> None:
    values, universe = case
    encoded = bytearray(encode_sorted(np.array(values, np.uint64), universe))
    if not encoded:
        return
    at = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[at // 8] ^= 1 << at % 8
    try:
        assert decode_sorted(bytes(encoded), universe).tolist() != values
    except DecodeError:
        return


@pytest.mark.parametrize("claim", [(2**32 - 1, 1), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0, 0), (9, 1)])
def test_nothing_is_allocated_by_a_claim(claim: tuple[int, int]) -> None:
    n, m = claim
    data = n.to_bytes(4, "little") + m.to_bytes(4, "little") + bytes(40)
    tracemalloc.start()
    with pytest.raises(DecodeError):
        decode_sorted(data, 1 << 48)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
