"""The memo of long prompts: a chain made with it has the keys that it has without, however prompts grow and fork."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import ContentSpan, Domain, Namespace, Node, Outcome
from prefixroute.keys.chain import STRIDE, TOKEN_BYTES, ChainSpec, TokenChain, pack_tokens
from prefixroute.keys.chain_memo import LOOKED_AT, SPAN, ChainMemo

SPEC = ChainSpec(16, 5)
STRIDE_TOKENS = STRIDE * SPEC.block_tokens
SPAN_TOKENS = SPAN * STRIDE_TOKENS


def memo(most: int = 1 << 17) -> ChainMemo:
    return ChainMemo(STRIDE_TOKENS * TOKEN_BYTES, most)


def draw(seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 128_000, n)]


def chain(
    tokens: list[int], kept: ChainMemo | None, root: int = 7, contents: tuple[ContentSpan, ...] = ()
) -> TokenChain:
    return TokenChain(SPEC, root, tokens, contents, memo=kept)


def ends(one: TokenChain) -> list[int]:
    """All stride ends, asked for at once, as a search of a long prompt does."""
    one.key(one.depth)
    return [one.key(depth) for depth in range(0, one.depth + 1, STRIDE)]


def known(kept: ChainMemo, tokens: list[int], root: int = 7) -> int:
    """How many stride ends of a prompt the memo knows."""
    one = chain(tokens, None, root)
    if one.depth < STRIDE:
        return 0
    return max(0, len(kept.recall(one.key(STRIDE), pack_tokens(tokens), one.depth // STRIDE)) - 1)


def test_the_next_turn_takes_over_what_the_last_one_hashed() -> None:
    kept, tokens = memo(), draw(1, 5 * SPAN_TOKENS + 900)
    first = chain(tokens, kept)
    assert ends(first) == ends(chain(tokens, None))
    first.remember()
    following = tokens + draw(2, 500)
    assert known(kept, following) == 5 * SPAN
    assert ends(chain(following, kept)) == ends(chain(following, None))
    kept._check()


def test_what_is_known_is_really_used() -> None:
    """Keys put into the memo by hand come out of a chain: a chain that hashed for itself would not have them."""
    kept, tokens = memo(), draw(1, 2 * SPAN_TOKENS)
    made_up = [7, chain(tokens, None).key(STRIDE), *range(100, 100 + 2 * SPAN - 1)]
    kept.keep(made_up, pack_tokens(tokens))
    assert ends(chain(tokens, kept)) == made_up


@pytest.mark.parametrize("at", [0, STRIDE_TOKENS - 1, STRIDE_TOKENS, 2 * SPAN_TOKENS, 3 * SPAN_TOKENS - 40])
def test_another_token_anywhere_is_another_prompt(at: int) -> None:
    kept, tokens = memo(), draw(1, 3 * SPAN_TOKENS)
    one = chain(tokens, kept)
    ends(one)
    one.remember()
    other = [*tokens]
    other[at] += 1
    assert known(kept, other) == 0
    assert ends(chain(other, kept)) == ends(chain(other, None))
    assert known(kept, tokens, root=8) == 0, "another namespace"


def test_a_shorter_prompt_and_a_much_longer_one() -> None:
    kept, tokens = memo(), draw(1, (3 + 2 * LOOKED_AT) * SPAN_TOKENS)
    one = chain(tokens[: 3 * SPAN_TOKENS], kept)
    ends(one)
    one.remember()
    assert known(kept, tokens[: 3 * SPAN_TOKENS - 1]) == 0
    assert known(kept, tokens[: (2 + LOOKED_AT) * SPAN_TOKENS]) == 3 * SPAN
    assert known(kept, tokens[: (3 + LOOKED_AT) * SPAN_TOKENS]) == 0, "too far above to be looked for"
    short = chain(tokens[: SPAN_TOKENS - 1], kept)
    ends(short)
    short.remember()
    assert len(kept) == 1, "what is short is not worth remembering"


def test_images_are_not_in_the_tokens_so_such_prompts_keep_out() -> None:
    kept, tokens = memo(), draw(1, 2 * SPAN_TOKENS)
    image = (ContentSpan("cat", 40),)
    pictured = chain(tokens, kept, contents=image)
    ends(pictured)
    pictured.remember()
    assert len(kept) == 0
    plain = chain(tokens, kept)
    ends(plain)
    plain.remember()
    assert ends(chain(tokens, kept, contents=image)) == ends(chain(tokens, None, contents=image)) != ends(plain)


def test_it_is_bounded_and_what_was_used_last_stays() -> None:
    kept = memo(most=10 * (SPAN + 1))
    prompts = [draw(i, SPAN_TOKENS) for i in range(30)]
    for tokens in prompts:
        one = chain(tokens, kept)
        ends(one)
        one.remember()
        hot = chain(prompts[0], kept)
        ends(hot)
        hot.remember()
        kept._check()
    assert len(kept) == 10
    assert [i for i, tokens in enumerate(prompts) if known(kept, tokens)] == [0, *range(21, 30)]


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=12))
def test_conversations_that_grow_and_fork_have_the_keys_they_have_without(turns: list[tuple[int, int, int]]) -> None:
    kept, spec_tokens = memo(most=200), draw(9, 60 * STRIDE_TOKENS)
    for fork, own, strides in turns:
        tokens = spec_tokens[: own * STRIDE_TOKENS] + draw(fork, strides * STRIDE_TOKENS + fork)
        with_memo = chain(tokens, kept)
        assert with_memo.key(with_memo.depth) == chain(tokens, None).key(with_memo.depth)
        assert ends(with_memo) == ends(chain(tokens, None))
        with_memo.remember()
        kept._check()


def test_a_node_remembers_what_was_served() -> None:
    node = Node("a", Domain("m", "m", SPEC.block_tokens), rng=random.Random(1), now=0.0)
    node.add_endpoint("0", url="http://a", incarnation=1, now=0.0)
    tokens, space = draw(1, 2 * SPAN_TOKENS), Namespace(salt="s")
    for namespace in (Namespace(), space):
        prompt = node.chain(tokens, namespace=namespace)
        prompt.key(prompt.depth)
        before = len(node._memo)
        decision = node.route(prompt, 0.0)
        assert len(node._memo) == before
        node.report(decision, Outcome.served(0, 0.1), 0.1)
        assert len(node._memo) == before + 1
