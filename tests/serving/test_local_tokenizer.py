"""A sidecar's own copy of the tokenizer: it reads as the engine does, and steps back when it does not."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from prefixroute_serving.local_tokenizer import CHECKED_PROMPTS, OwnTokenizer
from prefixroute_serving.prompts import PromptTokenizer, read_body
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from prefixroute.errors import UsageError

WORDS = {word: number for number, word in enumerate(("<s>", "?", "a", "b", "c"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of five words that begins every text with <s>."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("model")
    made.save(str(path / "tokenizer.json"))
    return path


class Engine:
    """Answers ``POST /tokenize``; `read` is its tokenizer."""

    def __init__(self, read: Callable[[str], list[int]]) -> None:
        self.read = read
        self.asked: list[str] = []
        self.up = True

    async def answer(self, question: bytes) -> bytes | None:
        body = json.loads(question)
        if not self.up:
            return None
        self.asked.append(body["prompt"])
        return json.dumps({"tokens": self.read(body["prompt"])}).encode()


def right(text: str) -> list[int]:
    return [0, *(WORDS.get(word, 1) for word in text.split())]


def read(engine: Engine, own: OwnTokenizer, *payloads: dict[str, object]) -> list[array[int] | None]:
    """What a reader with a copy makes of the payloads."""

    async def all_of_them() -> list[array[int] | None]:
        reader = PromptTokenizer(engine.answer, "m", own)
        bodies = [read_body(json.dumps(payload).encode()) for payload in payloads]
        return [(await reader.read(body, chat=False)).tokens for body in bodies]

    return asyncio.run(all_of_them())


def texts(n: int) -> list[dict[str, object]]:
    return [{"prompt": "a b " + "c " * i} for i in range(n)]


def test_the_engine_is_asked_for_the_first_prompts_only(folder: Path) -> None:
    engine, n = Engine(right), CHECKED_PROMPTS + 5
    got = read(engine, OwnTokenizer(str(folder)), *texts(n))
    assert got == [array("I", right(str(payload["prompt"]))) for payload in texts(n)]
    assert len(engine.asked) == CHECKED_PROMPTS


def test_a_copy_that_differs_once_is_not_used_any_more(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, n = Engine(lambda text: [7, *right(text)]), CHECKED_PROMPTS + 5
    got = read(engine, OwnTokenizer(str(folder / "tokenizer.json")), *texts(n))
    assert got == [array("I", [7, *right(str(payload["prompt"]))]) for payload in texts(n)]
    assert len(engine.asked) == n
    assert caplog.text.count("is not used") == 1


def test_an_engine_that_does_not_answer_confirms_nothing(folder: Path) -> None:
    engine, own = Engine(right), OwnTokenizer(str(folder))
    engine.up = False
    assert read(engine, own, *texts(3)) == [None] * 3
    assert own.trusted and own.checking


def test_special_tokens_are_left_out_where_the_request_says_so(folder: Path) -> None:
    engine, own = Engine(right), OwnTokenizer(str(folder))
    read(engine, own, *texts(CHECKED_PROMPTS))
    (got,) = read(engine, own, {"prompt": "c a", "add_special_tokens": False})
    assert got == array("I", [4, 2])


def test_a_long_text_is_read_the_same(folder: Path) -> None:
    engine, own = Engine(right), OwnTokenizer(str(folder))
    read(engine, own, *texts(CHECKED_PROMPTS))
    (got,) = read(engine, own, {"prompt": "b " * 30_000})
    assert got == array("I", [0, *[3] * 30_000])


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_file_that_cannot_be_read_is_the_users_to_change(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match="cannot read"):
        OwnTokenizer(str(tmp_path))


def test_without_the_library_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="pip install"):
        OwnTokenizer(str(folder))
