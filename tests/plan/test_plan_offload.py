"""One prompt weighed: the derived figures, the lines' closed form against direct weighing, and what must hold."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import UsageError
from prefixroute.plan import KvLink, Line, Polynomial, Side, attention_kv, offload_from, offload_gain

GBIT = 1e9 / 8
LOCAL, POOL, KV = Line(0.8, 1e-4), Line(0.9, 4e-5), Line(182_766_796.8, 17_047)


def link(gbit: float, rtt_s: float = 0.02) -> KvLink:
    return KvLink(gbit * GBIT, rtt_s, 61)


def goes(tokens: float, way: KvLink, kv: object = KV) -> bool:
    assert callable(kv)
    return offload_gain(Side(tokens, LOCAL), Side(tokens, POOL), tokens, kv, way).offload


@pytest.mark.parametrize(
    ("gbit", "rtt_s", "tokens"),
    [
        (10, 0.02, 2_047.6),
        (2, 0.02, 2_241.5),
        (1.6, 0.02, 11_132.4),
        (1.386, 0.02, inf),
        (10, 0.0, 1_713.0),
        (10, 0.05, 2_549.4),
        (10, 0.1, 3_385.9),
        (10, 0.2, 5_058.8),
    ],
)
def test_prompts_go_from_a_length_on(gbit: float, rtt_s: float, tokens: float) -> None:
    found = offload_from(LOCAL, POOL, KV, link(gbit, rtt_s))
    assert found == pytest.approx(tokens, abs=0.1)
    if tokens < inf:
        assert [goes(n, link(gbit, rtt_s)) for n in (int(found), int(found) + 1)] == [False, True]
    else:
        assert not any(goes(n, link(gbit, rtt_s)) for n in (100, 10_000, 1_000_000, 1e9))


def test_a_dense_model_never_pays_on_ten_gigabits() -> None:
    kv = attention_kv(80, 8, 128)
    assert kv.bytes_per_token == 327_680
    local, pool = Line(0.01, 9e-5), Line(0.01, 4e-5)
    assert offload_from(local, pool, Line(0, kv.bytes_per_token), link(10)) == inf
    weighed = offload_gain(Side(30_000, local), Side(30_000, pool), 30_000, kv, link(10))
    assert not weighed.offload
    assert weighed.transfer_s / 30_000 > 0.15e-3


LINES = st.tuples(st.floats(0, 2), st.floats(1e-6, 1e-3)).map(lambda pair: Line(*pair))
SIZES = st.tuples(st.floats(0, 1e9), st.floats(0, 5e5)).map(lambda pair: Line(*pair))
QUICK = settings(derandomize=True, deadline=None, database=None, max_examples=200)


@given(LINES, LINES, SIZES, st.floats(0.1, 200), st.floats(0, 0.3), st.integers(1, 100))
@QUICK
def test_the_closed_form_is_where_weighing_turns(
    local: Line, pool: Line, kv: Line, gbit: float, rtt_s: float, layers: int
) -> None:
    way = KvLink(gbit * GBIT, rtt_s, layers)

    def goes_at(tokens: float) -> bool:
        return offload_gain(Side(tokens, local), Side(tokens, pool), tokens, kv, way).offload

    try:
        found = offload_from(local, pool, kv, way)
    except UsageError:
        # Only short ones gain, if any: beyond some length none does.
        assert not goes_at(1e30)
        return
    if found == inf:
        assert not any(goes_at(tokens) for tokens in (1, 1e3, 1e6, 1e9))
    else:
        assert goes_at(found * (1 + 1e-3) + 1)
        if found > 2:
            assert not goes_at(found * (1 - 1e-3) - 1)


@given(st.floats(1.5, 100), st.floats(1, 4), st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 1e8))
@QUICK
def test_the_length_falls_with_bandwidth_and_rises_with_the_way_and_the_state(
    gbit: float, wider: float, rtt_s: float, later_s: float, state: float
) -> None:
    found = offload_from(LOCAL, POOL, KV, link(gbit, rtt_s))
    near = 1 - 1e-9
    assert offload_from(LOCAL, POOL, KV, link(gbit * wider, rtt_s)) * near <= found
    assert offload_from(LOCAL, POOL, KV, link(gbit, rtt_s + later_s)) >= found * near
    assert offload_from(LOCAL, POOL, Line(KV.fixed + state, KV.per_token), link(gbit, rtt_s)) >= found * near


def test_only_the_last_layer_is_sent_after_its_prefill_on_a_fast_link() -> None:
    way = KvLink(1e9, 0.0, layers=10)
    assert way.arrival_s(1e9, 5.0) == pytest.approx(5.0 + 0.1)
    assert way.arrival_s(10e9, 5.0) == pytest.approx(10.0 + 1.0), "a slow link sends all the time"
    assert way.arrival_s(0.0, 5.0) == 5.0
    assert KvLink(1e9, 0.0, layers=1).arrival_s(1e9, 5.0) == pytest.approx(6.0), "one layer overlaps with nothing"


def test_connections_bound_a_transfer_and_others_take_their_share() -> None:
    assert KvLink(10e9, connections=4, connection_bytes_per_s=1e9).effective_bytes_per_s == 4e9
    assert KvLink(10e9, connections=64, connection_bytes_per_s=1e9).effective_bytes_per_s == 10e9
    assert KvLink(10e9).used(0.75).effective_bytes_per_s == 2.5e9
    full = KvLink(10e9).used(1.7)
    assert full.effective_bytes_per_s == 0.0 and full.arrival_s(1.0, 1.0) == inf
    assert offload_from(LOCAL, POOL, KV, full) == inf and not goes(50_000, full)


def test_waits_on_either_side_count() -> None:
    way, tokens = link(10), 1_000
    waiting = offload_gain(Side(tokens, LOCAL, wait_s=5.0), Side(tokens, POOL), tokens, KV, way)
    assert waiting.offload and not goes(tokens, way)
    assert waiting.local_s == pytest.approx(5.9)
    both = offload_gain(Side(tokens, LOCAL, wait_s=5.0), Side(tokens, POOL, wait_s=6.0), tokens, KV, way)
    assert not both.offload
    assert both.remote_s == pytest.approx(waiting.remote_s + 6.0)


def test_hysteresis_asks_for_a_clear_gain_and_a_margin_for_a_link_that_lasts() -> None:
    way, tokens = link(1.6), 12_000
    sides = (Side(tokens, LOCAL), Side(tokens, POOL), tokens, KV, way)
    plain = offload_gain(*sides)
    assert plain.offload and not plain.sustained
    assert not offload_gain(*sides, hysteresis=0.2).offload
    assert not offload_gain(*sides, margin=0.0).offload
    fast = (*sides[:4], link(10))
    assert offload_gain(*fast, margin=0.5).offload
    assert not offload_gain(*fast, margin=9.0).offload


def test_a_cached_prefix_here_need_not_be_sent() -> None:
    all_of_it = offload_gain(Side(9_000, LOCAL), Side(9_000, POOL), 9_000, KV, link(2))
    half = offload_gain(Side(9_000, LOCAL), Side(9_000, POOL), 4_000, KV, link(2))
    assert half.remote_s < all_of_it.remote_s


def test_on_a_tie_the_prompt_stays() -> None:
    same = Polynomial((1.0,))
    assert not offload_gain(Side(10, same), Side(10, same), 0, Line(0, 0), KvLink(1e9)).offload


def test_what_cannot_be_is_refused() -> None:
    for bad in ({"bytes_per_s": 0}, {"rtt_s": -1}, {"layers": 0}, {"connections": 0}, {"utilisation": 1.1}):
        with pytest.raises(UsageError):
            KvLink(**{"bytes_per_s": 1.0, **bad})
    with pytest.raises(UsageError, match="hysteresis"):
        offload_gain(Side(1, LOCAL), Side(1, POOL), 1, KV, link(1), hysteresis=-0.1)
    with pytest.raises(UsageError, match="only short prompts"):
        offload_from(Line(5.0, 1e-5), Line(0.1, 1e-4), Line(0, 0), link(10))
