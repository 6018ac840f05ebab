"""Tokens that go with a forward: a peer reads what a node of its domain wrote, and nothing that anybody else did."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixroute_serving.carried_tokens import TokenCarrier

from prefixroute import Domain

CARRIER = TokenCarrier(Domain(model="m", tokenizer="t", secret=b"s"))
BODY = b'{"prompt": "a b c"}'
TOKENS = array("I", [1, 2, 2**32 - 1])


@given(st.binary(max_size=40), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_what_is_packed_is_unpacked(body: bytes, tokens: list[int]) -> None:
    packed, header = CARRIER.pack(body, array("I", tokens))
    assert CARRIER.unpack(packed, header) == (body, array("I", tokens))


def test_nothing_is_carried_without_tokens_or_without_a_secret() -> None:
    assert CARRIER.pack(BODY, None) == CARRIER.pack(BODY, array("I")) == (BODY, "")
    assert TokenCarrier(Domain(model="m", tokenizer="t")).pack(BODY, TOKENS) == (BODY, "")


@given(st.data())
def test_a_changed_byte_is_noticed_and_the_clients_body_stays(data: st.DataObject) -> None:
    packed, header = CARRIER.pack(BODY, TOKENS)
    changed = bytearray(packed)
    changed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    assert CARRIER.unpack(bytes(changed), header) == (bytes(changed[: len(BODY)]), None)


@pytest.mark.parametrize(
    "other",
    [
        Domain(model="m", tokenizer="t", secret=b"other"),
        Domain(model="m", tokenizer="other", secret=b"s"),
        Domain(model="m", tokenizer="t"),
    ],
)
def test_a_node_of_another_domain_is_not_believed(other: Domain) -> None:
    packed, header = CARRIER.pack(BODY, TOKENS)
    assert TokenCarrier(other).unpack(packed, header) == (BODY, None)


def test_the_same_bytes_cut_elsewhere_are_not_believed() -> None:
    packed, header = CARRIER.pack(BODY, TOKENS)
    moved = header.replace(str(len(BODY)), str(len(BODY) + 4), 1)
    assert CARRIER.unpack(packed, moved) == (packed[: len(BODY) + 4], None)


@pytest.mark.parametrize("header", [None, "", "-", "read", "9", "9-", "-1-00", "99999-00", "9" * 20, "٣-00", "4-é"])
def test_any_header_leaves_a_body(header: str | None) -> None:
    body, tokens = CARRIER.unpack(BODY, header)
    assert BODY.startswith(body)
    assert tokens is None
