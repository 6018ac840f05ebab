"""Bytes of KV and curves of cost: the formulas by hand, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import UsageError
from prefixroute.plan import (
    Decode,
    KvBytes,
    Polynomial,
    Slower,
    Table,
    Window,
    attention_kv,
    latent_kv,
    recurrent_kv,
    reusable_tokens,
    window_kv,
)


def test_grouped_query_attention_of_eighty_layers_takes_ten_gibibytes_for_32_k() -> None:
    kv = attention_kv(80, 8, 128)
    assert kv.bytes_per_token == 327_680
    assert kv(32_768) == 10 * 2**30


def test_latent_attention_keeps_one_row_a_token() -> None:
    assert latent_kv(61, 512, 64).bytes_per_token == 70_272


def test_multi_head_attention_of_one_block_and_of_seventy() -> None:
    assert attention_kv(1, 112, 128).bytes_per_token == 57_344
    assert attention_kv(70, 112, 128).bytes_per_token == 4_014_080


def test_a_window_stops_growing_and_a_state_never_grows() -> None:
    kv = window_kv(10, 128, 8, 64)
    assert kv(64) == 64 * 2 * 10 * 8 * 64 * 2
    assert kv(128) == kv(10_000) == 2 * kv(64)
    assert recurrent_kv(30, 1e6)(1) == recurrent_kv(30, 1e6)(1e6) == 3e7


def test_a_hybrid_is_the_sum_of_its_layers() -> None:
    parts = (attention_kv(16, 4, 128), window_kv(8, 512, 4, 128), recurrent_kv(48, 2e6))
    hybrid = parts[0] + parts[1] + parts[2]
    assert hybrid == KvBytes(32_768.0, 96e6, (Window(512, 16_384.0),))
    for tokens in (1, 512, 513, 100_000):
        assert hybrid(tokens) == sum(part(tokens) for part in parts)


def test_of_a_hybrid_a_match_is_reusable_at_stored_lengths_only() -> None:
    full, hybrid = attention_kv(16, 4, 128), attention_kv(16, 4, 128) + recurrent_kv(48, 2e6)
    assert reusable_tokens(full, 1000, [512]) == 1000
    assert reusable_tokens(hybrid, 1000, [256, 512, 1024]) == 512
    assert reusable_tokens(hybrid, 1024, [256, 512, 1024]) == 1024
    assert reusable_tokens(hybrid, 200, [256]) == reusable_tokens(hybrid, 200) == 0
    assert reusable_tokens(window_kv(2, 128, 2, 64), 300, [100]) == 100


def test_a_table_joins_its_points_and_goes_on_beyond_them() -> None:
    table = Table(((10, 1.0), (20, 3.0), (40, 4.0)))
    assert [table(tokens) for tokens in (5, 10, 15, 20, 30, 40, 60)] == [0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert table(0) == 0.0, "not below 0"


def test_a_polynomial_is_not_below_zero_and_a_slower_machine_takes_a_multiple() -> None:
    curve = Polynomial((-1.0, 0.5, 0.25))
    assert [curve(tokens) for tokens in (0, 2, 4)] == [0.0, 1.0, 5.0]
    assert Slower(curve, 3)(4) == 15.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=6, unique=True), st.data())
@settings(derandomize=True, deadline=None, database=None, max_examples=100)
def test_a_table_of_rising_costs_never_falls(tokens: list[float], data: st.DataObject) -> None:
    tokens.sort()
    costs = sorted(data.draw(st.lists(st.floats(0, 1e3), min_size=len(tokens), max_size=len(tokens))))
    table = Table(tuple(zip(tokens, costs, strict=True)))
    low, high = sorted(data.draw(st.tuples(st.floats(0, 2e6), st.floats(0, 2e6))))
    assert table(low) <= table(high) * (1 + 1e-9) + 1e-9


def test_a_decode_node_completes_its_slots_in_the_time_of_an_answer() -> None:
    decode = Decode(32, 0.040, 1024)
    assert decode.request_s == pytest.approx(40.96)
    assert decode.requests_per_s == pytest.approx(0.78125)
    assert Decode.of_batch(Table(((1, 0.02), (64, 0.08))), 22, 1024) == Decode(22, 0.04, 1024)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Table(((1, 1.0),)), "two points"),
        (lambda: Table(((2, 1.0), (2, 2.0))), "must rise"),
        (lambda: Table(((2, 1.0), (3, -2.0))), "0 or more"),
        (lambda: Table(((2, 1.0), (3, float("nan")))), "0 or more"),
        (lambda: Polynomial(()), "finite coefficients"),
        (lambda: Polynomial((float("inf"),)), "finite coefficients"),
        (lambda: Slower(Polynomial((1.0,)), 0), "positive number of times"),
        (lambda: attention_kv(0, 8, 128), "must be positive"),
        (lambda: latent_kv(61, 0, 0), "must be positive"),
        (lambda: KvBytes(-1.0), "0 or more"),
        (lambda: Decode(0, 0.04, 1024), "slots >= 1"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=says):
        make()
