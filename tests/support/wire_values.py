"""Hypothesis strategies for everything that travels, with every field's bounds among its values."""

from __future__ import annotations

from hypothesis import strategies as st

from prefixroute.keys.chain import STRIDE
from prefixroute.replication.wire import KEY_LIMIT, MAX_MISSING, LoadWire, Message, Update, VectorEntry, Want


def ints(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers with the bounds and the borders of MessagePack's forms far more often than by chance."""
    borders = (0, 1, 127, 128, 255, 256, 2**16, 2**32 - 1, 2**32, high - 1, low, high)
    return st.sampled_from([value for value in borders if low <= value <= high]) | st.integers(low, high)


texts = st.text(st.characters(exclude_categories=["Cs"]))
name = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)
url = texts.map(lambda t: t[:256])
zone = st.sampled_from(["", "eu", "z" * 40]) | texts.map(lambda t: t[:40])
u16, u32, u63, ordinal = ints(0, 2**16 - 1), ints(0, 2**32 - 1), ints(0, 2**63 - 1), ints(1, 2**63 - 1)
u48 = ints(0, KEY_LIMIT)
percent = ints(0, 100)
strides = ints(1, STRIDE)
loads = st.builds(
    LoadWire,
    u32,
    u32,
    u63,
    u32,
    u32,
    u63,
    percent,
    ints(0, 2),
    u32,
    texts.map(lambda t: t[:64]),
    u32,
    percent,
    u63,
    u32,
    u32,
)
ranges = st.lists(st.tuples(u48, u48), min_size=1, max_size=MAX_MISSING)
wants = st.builds(Want, ordinal, u63, ordinal, ranges)
entries = st.builds(VectorEntry, name, ordinal, u63, u63, u16, u32, u63, st.none() | loads, st.none() | wants)
updates = st.builds(
    Update,
    *(name, ordinal, u63, ordinal, ints(0, 2**64 - 1), strides, u48, u48),
    *(st.binary(), st.binary(), url, url, zone),
)
domains = st.none() | st.dictionaries(name, url, max_size=16)
messages = st.builds(
    Message,
    *(name, u63, u63, st.booleans(), domains),
    *(st.lists(entries, max_size=3), st.lists(updates, max_size=3), st.just("") | url),
)
