"""Streams that break: what a client sees is one answer, whole and to the letter, or an error."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefixroute_serving.answer_streams import (
    MAX_EVENT_BYTES,
    Diverged,
    EventCutter,
    StreamLedger,
    UpstreamBroke,
    cached_tokens,
    read_event,
)

DONE = b"data: [DONE]\n\n"
# A busy machine is no failure.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(content: str, finish: str | None = None, chat: bool = False) -> bytes:
    piece: dict[str, object] = {"delta": {"content": content}} if chat else {"text": content}
    return event({"id": "x", "choices": [{"index": 0, **piece, "finish_reason": finish}]})


def usage(cached: int) -> bytes:
    details = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"id": "x", "choices": [], "usage": details})


def answer(words: list[str], chat: bool = False) -> list[bytes]:
    """A whole answer as an engine streams it."""
    role = [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})] if chat else []
    texts = [text(word, chat=chat) for word in words[:-1]] + [text(words[-1], "length", chat)]
    return [*role, *texts, usage(16), DONE]


def client_view(passed: list[bytes]) -> tuple[str, int]:
    """What a client makes of the bytes: the text, and how many ends it saw."""
    ledger = StreamLedger()
    for data in passed:
        ledger.accept(data)
    return ledger.text, passed.count(DONE)


def resumed(first: list[bytes], second: list[bytes]) -> list[bytes]:
    """What passes when `first` breaks and `second` is the answer of another engine."""
    ledger = StreamLedger()
    passed = [ledger.accept(data) for data in first]
    ledger.restart()
    passed += [ledger.accept(data) for data in second]
    return [data for data in passed if data is not None]


@calm
@given(st.lists(st.binary(min_size=1, max_size=5).filter(lambda b: b"\n" not in b and b"\r" not in b)), st.data())
def test_events_are_cut_alike_however_the_bytes_arrive(lines: list[bytes], data: st.DataObject) -> None:
    whole = [b"data: " + line + data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for line in lines]
    stream = b"".join(whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    cutter = EventCutter()
    assert [cut for piece in pieces for cut in cutter.feed(piece)] == whole


def test_an_unfinished_event_is_held_back() -> None:
    cutter = EventCutter()
    assert cutter.feed(b"data: 1\n\ndata: 2\n") == [b"data: 1\n\n"]
    assert cutter.feed(b"\n") == [b"data: 2\n\n"]


def test_an_event_without_end_is_given_up() -> None:
    with pytest.raises(ValueError, match="more than"):
        EventCutter().feed(b"x" * (MAX_EVENT_BYTES + 1))


def test_an_unbroken_stream_passes_byte_for_byte() -> None:
    ledger = StreamLedger()
    events = [b": keep-alive\n\n", *answer([" one", " two"])]
    assert [ledger.accept(data) for data in events] == events
    assert (ledger.text, ledger.done, ledger.cached_tokens) == (" one two", True, 16)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("words", [["a"], [" one", " two", " three"], [" x"] * 6])
def test_a_stream_broken_anywhere_gives_one_whole_answer(words: list[str], chat: bool) -> None:
    whole = answer(words, chat)
    for broken_after in range(len(whole)):
        passed = resumed(whole[:broken_after], whole)
        assert client_view(passed) == ("".join(words), 1), broken_after
        assert sum(b'"usage"' in data for data in passed) == 1, broken_after


def test_a_second_engine_that_cuts_its_chunks_elsewhere_is_trimmed_to_fit() -> None:
    passed = resumed(answer([" one", " two", " three"])[:2], answer([" on", "e tw", "o three"]))
    assert client_view(passed) == (" one two three", 1)
    coarse = resumed(answer([" one", " two", " three"], chat=True)[:3], answer([" one two three"], chat=True))
    assert client_view(coarse) == (" one two three", 1)


def test_a_second_answer_that_differs_is_never_spliced_on() -> None:
    with pytest.raises(Diverged, match="differs"):
        resumed([text(" one"), text(" two")], [text(" one"), text(" too")])
    with pytest.raises(Diverged, match="ends before"):
        resumed([text(" one"), text(" two")], [text(" one"), DONE])
    with pytest.raises(Diverged, match="ends before"):
        resumed([text(" one"), text(" two")], [text(" one", "length")])


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [{"index": 1, "text": "b"}]},
        {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]},
        {"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"id": "t"}]}}]},
        {"unheard_of": 1},
        [1, 2],
    ],
)
def test_streams_that_hold_more_than_text_are_never_resumed(chunk: object) -> None:
    with pytest.raises(Diverged, match="cannot be resumed"):
        resumed([text("a"), event(chunk)], [])
    with pytest.raises(Diverged, match="more than text"):
        resumed([text("a")], [event(chunk)])


def test_a_stream_that_broke_before_its_first_event_starts_anew() -> None:
    assert resumed([], answer(["a"], chat=True)) == answer(["a"], chat=True)


def test_a_second_break_is_resumed_like_the_first() -> None:
    whole = answer([" one", " two", " three"])
    ledger = StreamLedger()
    passed = [ledger.accept(data) for data in whole[:2]]
    ledger.restart()
    passed += [ledger.accept(data) for data in whole[:1]]
    ledger.restart()
    passed += [ledger.accept(data) for data in whole]
    assert client_view([data for data in passed if data is not None]) == (" one two three", 1)


def test_an_error_inside_the_stream_is_the_engines_failure() -> None:
    with pytest.raises(UpstreamBroke, match="out of memory"):
        StreamLedger().accept(event({"error": {"message": "out of memory"}}))


@calm
@given(st.binary(max_size=60))
def test_any_bytes_can_be_read_as_an_event(data: bytes) -> None:
    read_event(b"data: " + data)
    read_event(data)


@pytest.mark.parametrize("junk", [None, 3, {}, {"prompt_tokens_details": None}, {"prompt_tokens_details": 1}])
def test_usage_without_cached_tokens_says_nothing(junk: object) -> None:
    assert cached_tokens(junk) is None
    assert cached_tokens({"prompt_tokens_details": {"cached_tokens": 0}}) == 0
