"""The strided chain: its definition, its two forms, every kind of input, and content items."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from prefixroute import ContentSpan, Domain, Namespace, TokenChain, UsageError
from prefixroute.keys import chain
from prefixroute.keys.chain import STRIDE, ChainCursor, ChainSpec, block_extras, content_digest, pack_tokens, wire_key

CHECKED = settings(derandomize=True, deadline=None, max_examples=60, database=None)
U64 = st.integers(0, 2**64 - 1)
SPEC = ChainSpec(4, 0x1234)
ROOT = 99


def by_definition(spec: ChainSpec, root: int, blocks: Sequence[bytes]) -> list[int]:
    """Keys of depths 0 .. len(blocks), written down from the definition and from nothing else."""
    keys = [root]
    for depth in range(1, len(blocks) + 1):
        lower = STRIDE * ((depth - 1) // STRIDE)
        keys.append(xxh3_64_intdigest(b"".join(blocks[lower:depth]), keys[lower] ^ spec.mix))
    return keys


def packed_blocks(spec: ChainSpec, tokens: Sequence[int]) -> list[bytes]:
    """The full blocks of a prompt as u32 little-endian."""
    size = spec.block_tokens
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return [data[i * size * 4 : (i + 1) * size * 4] for i in range(len(tokens) // size)]


def keys_of(prompt: TokenChain) -> list[int]:
    return [prompt.key(depth) for depth in range(prompt.depth + 1)]


def streamed(spec: ChainSpec, root: int, blocks: Sequence[bytes]) -> list[int]:
    cursor = ChainCursor(spec, root)
    return [root, *(cursor.push(block) for block in blocks)]


# --- the definition and its two forms ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "key"),
    [
        (1, 0x79C2079C74A8EE4D),
        (2, 0x34509D8372E62E6D),
        (31, 0x7B49C3C59468D9D0),
        (32, 0xED23844E189677F1),
        (33, 0x2C8BE54E8D79DD56),
        (34, 0x3DC002136497DEA5),
    ],
)
def test_reference_vectors(depth: int, key: int) -> None:
    spec = ChainSpec(16)
    tokens = list(range(34 * 16))
    assert TokenChain(spec, 0, tokens).key(depth) == key
    assert streamed(spec, 0, packed_blocks(spec, tokens))[depth] == key
    assert by_definition(spec, 0, packed_blocks(spec, tokens))[depth] == key


@CHECKED
@given(
    st.integers(1, 5), U64, U64, st.integers(0, 3 * STRIDE + 2), st.integers(0, 4), st.randoms(use_true_random=False)
)
def test_both_forms_are_the_definition_at_every_depth_in_any_order(
    block_tokens: int, root: int, mix: int, depth: int, rest: int, rng: random.Random
) -> None:
    spec = ChainSpec(block_tokens, mix)
    tokens = [rng.randrange(2**32) for _ in range(depth * block_tokens + min(rest, block_tokens - 1))]
    blocks = packed_blocks(spec, tokens)
    expected = by_definition(spec, root, blocks)
    assert streamed(spec, root, blocks) == expected
    prompt = TokenChain(spec, root, tokens)
    assert (prompt.depth, prompt.n_tokens) == (depth, len(tokens))
    order = list(range(depth + 1))
    rng.shuffle(order)
    assert {d: prompt.key(d) for d in order} == dict(enumerate(expected))
    assert [prompt.key(d) for d in order] == [expected[d] for d in order]
    assert [wire_key(prompt.key(d)) for d in range(depth + 1)] == [wire_key(key) for key in expected]


@pytest.mark.parametrize("depth", [0, 1, 2, 30, 31, 32, 33, 63, 64, 65, 95, 96, 97])
def test_cursor_resumes_at_any_depth(depth: int) -> None:
    blocks = packed_blocks(SPEC, list(range(4 * 130)))
    expected = by_definition(SPEC, ROOT, blocks)
    lower = depth - depth % STRIDE
    cursor = ChainCursor(SPEC, expected[lower], depth, b"".join(blocks[lower:depth]))
    assert (cursor.depth, cursor.key) == (depth, expected[depth])
    assert [cursor.push(block) for block in blocks[depth:]] == expected[depth + 1 :]
    assert (cursor.depth, cursor.key) == (130, expected[130])


def test_wire_key_is_the_upper_48_bits_and_keeps_order() -> None:
    keys = sorted(keys_of(TokenChain(SPEC, ROOT, list(range(400)))))
    assert [wire_key(key) for key in keys] == sorted(key >> 16 for key in keys)
    assert wire_key(2**64 - 1) == 2**48 - 1


# --- input -------------------------------------------------------------------------------------------------

TOKENS = [0, 1, 255, 256, 65535, 65536, 2**31 - 1, 7, 8] * 5
SMALL = [token % 60000 for token in TOKENS]


class Lazy(Sequence[int]):
    """A sequence that is neither a list nor a buffer."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        return self.tokens[index]


def readonly(tokens: list[int]) -> np.ndarray[Any, Any]:
    frozen = np.array(tokens, dtype="<u4")
    frozen.flags.writeable = False
    return frozen


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "list of numpy ints": lambda tokens: [np.int64(token) for token in tokens],
    "tuple": tuple,
    "deque": deque,
    "sequence": Lazy,
    "array I": lambda tokens: array("I", tokens),
    "array i": lambda tokens: array("i", tokens),
    "array q": lambda tokens: array("q", tokens),
    "array Q": lambda tokens: array("Q", tokens),
    "numpy u32": lambda tokens: np.array(tokens, dtype=np.uint32),
    "numpy i32": lambda tokens: np.array(tokens, dtype=np.int32),
    "numpy i64": lambda tokens: np.array(tokens, dtype=np.int64),
    "numpy u64": lambda tokens: np.array(tokens, dtype=np.uint64),
    "numpy u32 big-endian": lambda tokens: np.array(tokens, dtype=">u4"),
    "numpy i64 big-endian": lambda tokens: np.array(tokens, dtype=">i8"),
    "numpy u32 strided": lambda tokens: np.repeat(np.array(tokens, dtype=np.uint32), 3)[::3],
    "numpy i64 reversed twice": lambda tokens: np.array(tokens[::-1], dtype=np.int64)[::-1],
    "numpy column": lambda tokens: np.array([tokens, tokens], dtype=np.int64).T[:, 0],
    "numpy readonly": readonly,
    "memoryview": lambda tokens: memoryview(array("I", tokens)),
    "memoryview readonly": lambda tokens: memoryview(readonly(tokens)),
    "memoryview strided": lambda tokens: memoryview(array("q", [t for token in tokens for t in (token, 0)]))[::2],
}
NARROW: dict[str, Callable[[list[int]], Any]] = {
    "numpy u16": lambda tokens: np.array(tokens, dtype=np.uint16),
    "numpy u16 big-endian": lambda tokens: np.array(tokens, dtype=">u2"),
    "array H": lambda tokens: array("H", tokens),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_keys(kind: str) -> None:
    prompt = TokenChain(SPEC, ROOT, KINDS[kind](TOKENS))
    assert keys_of(prompt) == by_definition(SPEC, ROOT, packed_blocks(SPEC, TOKENS))
    assert prompt.packed == pack_tokens(TOKENS) == np.array(TOKENS, dtype="<u4").tobytes()


@pytest.mark.parametrize("kind", NARROW)
def test_narrow_ints_give_the_same_keys(kind: str) -> None:
    prompt = TokenChain(SPEC, ROOT, NARROW[kind](SMALL))
    assert keys_of(prompt) == by_definition(SPEC, ROOT, packed_blocks(SPEC, SMALL))


def test_range_gives_the_same_keys_as_its_list() -> None:
    assert keys_of(TokenChain(SPEC, ROOT, range(50, 250))) == keys_of(TokenChain(SPEC, ROOT, list(range(50, 250))))


def test_bytes_are_read_when_wrapped_as_the_error_says() -> None:
    data = pack_tokens(TOKENS)
    with pytest.raises(UsageError, match=r"numpy\.frombuffer"):
        pack_tokens(data)
    assert pack_tokens(np.frombuffer(data, dtype="<u4")) == data


@pytest.mark.parametrize("last", [2**32 - 1, 2**31])
def test_largest_ids_are_taken(last: int) -> None:
    expected = last.to_bytes(4, "little")
    for tokens in ([last], (last,), array("Q", [last]), np.array([last]), np.array([last], dtype=np.uint32)):
        assert pack_tokens(tokens) == expected


UNUSABLE: dict[str, tuple[Any, str]] = {
    "negative in a list": ([1, -1], "0 .. 2"),
    "negative in an array": (array("q", [1, -1]), "0 .. 2"),
    "negative in numpy i32": (np.array([1, -1], dtype=np.int32), "0 .. 2"),
    "negative in numpy i8": (np.array([1, -1], dtype=np.int8), "0 .. 2"),
    "too large in a list": ([2**32], "0 .. 2"),
    "far too large in a list": ([2**70], "0 .. 2"),
    "too large in a sequence": (Lazy([2**32]), "0 .. 2"),
    "too large in numpy i64": (np.array([2**32]), "0 .. 2"),
    "too large in numpy u64": (np.array([2**64 - 1], dtype=np.uint64), "0 .. 2"),
    "floats in a list": ([1.0], "must be integers"),
    "floats in numpy": (np.array([1.0, 2.0]), "must be integers, not float64"),
    "bools in numpy": (np.array([True]), "must be integers, not bool"),
    "objects in numpy": (np.array([None]), "must be integers"),
    "None in a list": ([None], "must be integers"),
    "text in a list": (["hello"], "must be integers"),
    "text": ("hello", "tokenise text first"),
    "bytes": (b"\0\0\0\0", "numpy.frombuffer"),
    "bytearray": (bytearray(8), "numpy.frombuffer"),
    "view of bytes": (memoryview(bytes(8)), "numpy.frombuffer"),
    "matrix": (np.zeros((2, 8), dtype=np.int64), r"one-dimensional, not of shape \(2, 8\)"),
    "batch of one": (np.zeros((1, 8), dtype=np.uint32), "one prompt at a time"),
    "nested list": ([[1, 2], [3, 4]], "must be integers"),
    "scalar": (np.int64(5), "one-dimensional"),
    "int": (5, "not int"),
    "None": (None, "not NoneType"),
    "generator": ((token for token in (1, 2)), "not generator"),
    "set": ({1, 2}, "not set"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_input_says_what_to_pass(name: str) -> None:
    tokens, said = UNUSABLE[name]
    with pytest.raises(UsageError, match=said):
        _ = TokenChain(SPEC, ROOT, tokens).packed


@pytest.mark.parametrize("tokens", [[], (), range(0), array("I"), np.array([], dtype=np.int64)], ids=repr)
def test_empty_prompt_has_depth_0_and_the_root_key(tokens: Any) -> None:
    prompt = TokenChain(SPEC, ROOT, tokens)
    assert (prompt.depth, prompt.n_tokens, prompt.packed, prompt.key(0)) == (0, 0, b"", ROOT)


@pytest.mark.parametrize(("n", "depth"), [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_depth_counts_full_blocks(n: int, depth: int) -> None:
    prompt = TokenChain(SPEC, ROOT, list(range(n)))
    assert (prompt.depth, prompt.n_tokens) == (depth, n)


# --- cost --------------------------------------------------------------------------------------------------


def test_first_key_packs_the_first_block_only() -> None:
    prompt = TokenChain(SPEC, ROOT, [1, 2, 3, 4, -1])
    assert prompt.key(1) == TokenChain(SPEC, ROOT, [1, 2, 3, 4]).key(1)
    with pytest.raises(UsageError):
        _ = prompt.packed


def test_keys_cost_one_hash_of_at_most_a_stride_once_boundaries_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def count(data: bytes, seed: int) -> int:
        hashed.append(len(data) // SPEC.block_bytes)
        return xxh3_64_intdigest(data, seed)

    monkeypatch.setattr(chain, "xxh3_64_intdigest", count)
    prompt = TokenChain(SPEC, ROOT, list(range(4 * 1000)))
    prompt.key(1)
    assert hashed == [1]
    prompt.key(1)
    assert hashed == [1]
    prompt.key(1000)
    assert hashed == [1, *[STRIDE] * 31, 1000 - 31 * STRIDE]
    del hashed[:]
    for depth in (500, 750, 625, 64, 65, 2):
        prompt.key(depth)
    assert hashed == [20, 14, 17, 1, 2], "depth 64 is a boundary, known already"


# --- namespaces, secrets -----------------------------------------------------------------------------------


def prompt_in(domain: Domain, namespace: Namespace) -> TokenChain:
    return TokenChain(ChainSpec(domain.block_size, domain.mix), domain.root_key(namespace), list(range(64)))


def test_no_key_is_shared_between_namespaces_or_domains() -> None:
    domains = [Domain("m", "t", 1), Domain("m", "t", 1, secret=b"s"), Domain("n", "t", 1)]
    namespaces = [Namespace(), Namespace("a"), Namespace("", "a")]
    keys = [keys_of(prompt_in(domain, namespace)) for domain in domains for namespace in namespaces]
    assert len({key for some in keys for key in some}) == sum(map(len, keys))


def test_secret_enters_every_stride_and_not_the_root_alone() -> None:
    blocks = packed_blocks(SPEC, list(range(4 * 70)))
    plain, mixed = (streamed(ChainSpec(4, mix), ROOT, blocks) for mix in (0, 1))
    assert not set(plain[1:]) & set(mixed[1:])
    # Who knows the key of a boundary, but not the secret, cannot go on from it.
    assert ChainCursor(ChainSpec(4, 0), mixed[32], 32).push(blocks[32]) != mixed[33]


# --- content items -----------------------------------------------------------------------------------------

PLACEHOLDERS = [9] * 4 * 40


def with_items(*items: tuple[str, int]) -> list[int]:
    return keys_of(TokenChain(SPEC, ROOT, PLACEHOLDERS, [ContentSpan(name, start) for name, start in items]))


def first_difference(one: list[int], other: list[int]) -> int:
    """The depth from which on all keys differ; before it all are equal."""
    depth = next(d for d, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    assert not set(one[depth:]) & set(other[depth:])
    return depth


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 4 * 31, 4 * 32 - 1, 4 * 32, 4 * 39 + 3])
def test_other_picture_in_the_same_place_differs_from_its_block_on(start: int) -> None:
    cat, dog = with_items(("cat", start)), with_items(("dog", start))
    block_end = start // 4 + 1
    assert first_difference(cat, dog) == block_end
    assert first_difference(cat, with_items()) == block_end


def test_place_in_the_block_matters() -> None:
    assert first_difference(with_items(("cat", 4)), with_items(("cat", 5))) == 2
    assert first_difference(with_items(("cat", 4)), with_items(("cat", 8))) == 2


def test_several_items_in_a_block_all_count_whatever_order_they_are_passed_in() -> None:
    both = with_items(("cat", 4), ("dog", 6))
    assert with_items(("dog", 6), ("cat", 4)) == both
    for other in (with_items(("cat", 4)), with_items(("dog", 6)), with_items(("dog", 4), ("cat", 6))):
        assert first_difference(both, other) == 2
    assert first_difference(both, with_items(("cat", 4), ("dog", 8))) == 2


def test_two_items_at_one_place_are_told_from_one() -> None:
    both = with_items(("a", 5), ("b", 5))
    assert with_items(("b", 5), ("a", 5)) == both
    assert first_difference(both, with_items(("ab", 5))) == 2


def test_forms_agree_with_items_at_every_depth() -> None:
    items = [ContentSpan("cat", 2), ContentSpan("dog", 4 * 31 + 1), ContentSpan("cow", 4 * 31 + 2)]
    items += [ContentSpan("eel", 4 * 32), ContentSpan("in the unfinished block", 4 * 40 + 1)]
    prompt = TokenChain(SPEC, ROOT, [*PLACEHOLDERS, 9, 9], items)
    blocks = packed_blocks(SPEC, PLACEHOLDERS)
    blocks[0] += content_digest("cat", 2)
    blocks[31] += content_digest("dog", 1) + content_digest("cow", 2)
    blocks[32] += content_digest("eel", 0)
    assert [prompt.block(i) for i in range(40)] == blocks
    assert keys_of(prompt) == by_definition(SPEC, ROOT, blocks) == streamed(SPEC, ROOT, blocks)
    assert (
        block_extras(items, 4)
        == prompt.extras
        == {i: blocks[i][16:] for i in (0, 31, 32)} | {40: content_digest("in the unfinished block", 1)}
    )


def test_imitating_an_item_takes_ids_that_no_vocabulary_has() -> None:
    digest = np.frombuffer(content_digest("cat", 0), dtype="<u4").tolist()
    item = TokenChain(SPEC, ROOT, [1, 2, 3, 4], [ContentSpan("cat", 0)])
    text = TokenChain(SPEC, ROOT, [1, 2, 3, 4, *digest])
    assert item.key(1) == text.key(3)
    assert sum(token >= 2**20 for token in digest) == 8


@pytest.mark.parametrize("start", [-1, 160, 1000])
def test_item_outside_the_prompt_is_refused(start: int) -> None:
    with pytest.raises(UsageError, match="'cat' starts at"):
        with_items(("cat", start))


def test_digest_of_an_item_is_pinned() -> None:
    """It enters keys: changing it needs a new hash version."""
    assert content_digest("cat", 5).hex() == "c2d95aaae16ef5910104335663cd4ed45bd0292eff1d77e3cd134bddbd9b1ff8"


def test_ids_of_items_may_be_any_text() -> None:
    assert first_difference(with_items(("\ud800", 0)), with_items(("", 0))) == 1
