"""Domains and namespaces: what makes keys comparable, and what keeps caches apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import Domain, Namespace, UsageError
from prefixroute.keys import domain
from prefixroute.keys.domain import keyed_digest

BASE = Domain("model", "tokenizer")
OTHERS = {
    "model": Domain("Model", "tokenizer"),
    "tokenizer": Domain("model", "tokenizer2"),
    "block_size": Domain("model", "tokenizer", block_size=32),
    "namespace_policy": Domain("model", "tokenizer", namespace_policy="lora"),
    "secret": Domain("model", "tokenizer", secret=b"s"),
}


def test_equal_fields_give_an_equal_fingerprint_of_eight_bytes() -> None:
    assert BASE.fingerprint == Domain("model", "tokenizer", 16, "lora+salt", b"").fingerprint
    assert len(BASE.fingerprint) == 8


def test_format_is_pinned() -> None:
    """These travel, or enter every key: changing them needs a new hash version."""
    secret = Domain("m", "t", 32, "lora", b"cluster secret")
    assert (BASE.fingerprint.hex(), secret.fingerprint.hex()) == ("5e34b82ea26f7d36", "94e8d97f5f2a6fa2")
    assert f"{BASE.mix:016x} {secret.mix:016x}" == "56dd44e84625a80e 62df1ae66823cd4e"
    namespaces = (Namespace(), Namespace("lo"), Namespace("lo", "salt"))
    assert [f"{secret.root_key(namespace):016x}" for namespace in namespaces] == [
        "182baca039e6e897",
        "84fe3474f0f8792e",
        "941d5e812e1a841b",
    ]


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_changes_fingerprint_and_root_key_and_is_named(field: str) -> None:
    other = OTHERS[field]
    assert other.fingerprint != BASE.fingerprint
    assert other.root_key(Namespace()) != BASE.root_key(Namespace())
    ours, theirs = BASE.fields(), other.fields()
    assert [name for name in ours if ours[name] != theirs[name]] == [field]


def test_hash_version_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Domain("hash version test", "t").fingerprint
    monkeypatch.setattr(domain, "HASH_VERSION", domain.HASH_VERSION + 1)
    domain._fingerprint.cache_clear()
    assert Domain("hash version test", "t").fingerprint != before
    monkeypatch.undo()
    domain._fingerprint.cache_clear()
    assert Domain("hash version test", "t").fingerprint == before


def test_values_cannot_slide_from_one_field_to_the_next() -> None:
    assert Domain("ab", "c").fingerprint != Domain("a", "bc").fingerprint
    assert Domain("a=b", "c").fingerprint != Domain("a", "b=c").fingerprint


def test_only_the_secret_enters_the_mix() -> None:
    assert {other.mix for name, other in OTHERS.items() if name != "secret"} == {BASE.mix}
    assert OTHERS["secret"].mix != BASE.mix


def test_secret_shows_nowhere() -> None:
    secret = b"attack at dawn"
    hidden = Domain("m", "t", secret=secret)
    shown = f"{hidden!r} {hidden.fields()} {hidden.fingerprint!r}"
    assert secret.decode() not in shown
    assert secret.hex() not in shown
    assert hidden.fields().keys() == BASE.fields().keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"model": "x" * 257},
        {"tokenizer": None},
        {"tokenizer": b"bytes"},
        {"namespace_policy": ""},
        {"block_size": 0},
        {"block_size": 4097},
        {"block_size": True},
        {"block_size": 16.0},
        {"secret": b"x" * 65},
        {"secret": "text"},
    ],
    ids=repr,
)
def test_unusable_field_is_named(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(UsageError, match=f"Domain.{name} must be"):
        replace(BASE, **fields)


def test_limits_of_fields_are_accepted() -> None:
    Domain("x" * 256, "y" * 256, 4096, "z" * 256, b"s" * 64)
    Domain("x", "y", 1)


NAMESPACES = [
    Namespace(),
    Namespace("a"),
    Namespace(salt="a"),
    Namespace("a", "b"),
    Namespace("b", "a"),
    Namespace("ab"),
    Namespace("", "ab"),
    Namespace("a", "\ud800"),
]


def test_namespaces_share_no_root_and_cannot_imitate_each_other() -> None:
    for one, other in combinations(NAMESPACES, 2):
        assert BASE.root_key(one) != BASE.root_key(other)
    assert BASE.root_key(Namespace("a", "b")) == BASE.root_key(Namespace(lora="a", salt="b"))


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_keyed_digest_tells_lists_of_parts_apart(one: list[bytes], other: list[bytes]) -> None:
    assert (keyed_digest(b"k", "p", *one) == keyed_digest(b"k", "p", *other)) == (one == other)


def test_keyed_digest_separates_secrets_and_purposes() -> None:
    assert len(keyed_digest(b"", "p", b"x", size=16)) == 16
    assert len({keyed_digest(secret, purpose, b"x") for secret in (b"", b"k") for purpose in ("p", "q")}) == 4
