"""The emulator's tokenizer and answers: the same in every process, prefixes give prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.emulator import Answer, ChatMessage, encode, render_chat
from prefixroute.emulator.answer import WORDS
from prefixroute.emulator.tokenizer import VOCABULARY

PIECES = st.lists(
    st.sampled_from(["one", "two", "x", ",", ".", " ", " ", "\n", "\t", "größe", "数字", "🙂", "longerword"]),
    max_size=12,
)


PINNED = [1954, 12824, 24851, 149, 28965, 149, 149, 28369, 24734]


def test_ids_are_pinned() -> None:
    assert encode("Hello, world!\n  Grüße 数字") == PINNED
    assert encode("") == []


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("hello", " world"),
        ("hello ", "world"),
        ("hello", ", world"),
        ("hello ", " world"),
        ("hello\n", "world"),
        ("hello", "\nworld"),
        ("hello \n", " world"),
        ("", "world"),
        ("a.", "b"),
        ("user: hello\n", "assistant:"),
    ],
)
def test_prefix_that_ends_at_a_boundary_gives_a_prefix(left: str, right: str) -> None:
    whole, prefix = encode(left + right), encode(left)
    assert whole[: len(prefix)] == prefix
    assert len(whole) > len(prefix)


@given(PIECES, PIECES)
def test_any_two_texts_joined_where_no_word_goes_on_keep_the_prefix(left: list[str], right: list[str]) -> None:
    a, b = "".join(left), "".join(right)
    if a[-1:].isalnum() and b[:1].isalnum():
        a += " "
    if a[-1:] == "🙂" or b[:1] == "🙂":
        b = " " + b
    assert encode(a + b)[: len(encode(a))] == encode(a)


@given(PIECES, PIECES)
def test_texts_with_equal_ids_differ_in_a_trailing_space_at_most(left: list[str], right: list[str]) -> None:
    a, b = "".join(left), "".join(right)
    if encode(a) == encode(b):
        assert a.removesuffix(" ") == b.removesuffix(" ")


@given(st.text())
def test_any_text_encodes_to_ids_below_the_vocabulary(text: str) -> None:
    assert all(0 <= token < VOCABULARY for token in encode(text))


def test_lone_surrogate_encodes() -> None:
    assert len(encode("\ud800")) == 1


def test_chat_is_rendered_line_by_line_and_opens_the_assistants_turn() -> None:
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hi")]
    assert render_chat(messages) == "system: be brief\nuser: hi\nassistant:"


def test_words_are_distinct_and_one_piece_each() -> None:
    assert len(set(WORDS)) == len(WORDS) > 128
    assert all(len(encode(word)) == 1 for word in WORDS)
    assert len({encode(word)[0] for word in WORDS}) == len(WORDS)


def test_answer_depends_on_the_prompt_alone_and_in_no_order() -> None:
    one, same, other = Answer([1, 2, 3]), Answer([1, 2, 3]), Answer([1, 2, 4])
    assert [same.word(i) for i in reversed(range(100))][::-1] == [one.word(i) for i in range(100)]
    assert one.text(0, 20) != other.text(0, 20)
    assert one.text(0, 3) == " iris mint spring"


def test_prompt_followed_by_its_answer_encodes_to_both() -> None:
    prompt = encode("Tell me about rivers.")
    answer = Answer(prompt)
    text = "Tell me about rivers." + answer.text(0, 40)
    assert encode(text) == prompt + [answer.token(index) for index in range(40)]


def test_next_chat_turn_continues_the_tokens_of_prompt_and_answer() -> None:
    first = [ChatMessage("user", "hi")]
    prompt = encode(render_chat(first))
    answer = Answer(prompt)
    content = answer.text(0, 10)[1:]
    following = encode(render_chat([*first, ChatMessage("assistant", content), ChatMessage("user", "more")]))
    said = prompt + [answer.token(index) for index in range(10)]
    assert following[: len(said)] == said
