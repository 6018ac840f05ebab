"""Reading request logs: every form of a request, what is none, and what is counted of them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixroute import UsageError
from prefixroute.analyze import Collector, Limits, Log, PromptReader
from prefixroute.analyze.prefixes import TopPrefixes, fit_zipf
from prefixroute.analyze.records import BadLine, Chat, TraceBlocks, parse
from prefixroute.analyze.sources import SourceLine

FRONT = "You are a careful assistant who answers in short plain sentences and names every source. " * 8


def body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": FRONT}, {"role": "user", "content": text}]
    return {"model": "m", "messages": messages} | more


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def read(path: Path, limits: Limits | None = None, **reader: Any) -> Log:
    return Collector(PromptReader(**reader), limits or Limits()).read([path])


# --- records -----------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"messages": CHAT}, (Chat(CHAT, ()),)),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, (Chat(CHAT, [{"type": "function"}]),)),
        ({"prompt": "hi"}, ("hi",)),
        ({"prompt": ["a", "b"]}, ("a", "b")),
        ({"prompt": [1, 2, 3]}, ([1, 2, 3],)),
        ({"prompt": [[1, 2], [3]]}, ([1, 2], [3])),
        ({"input": "hi"}, ("hi",)),
        ({"input": "hi", "instructions": "be brief"}, (Chat([{"role": "system", "content": "be brief"}, *CHAT], ()),)),
        ({"messages": CHAT, "system": "be brief"}, (Chat([{"role": "system", "content": "be brief"}, *CHAT], ()),)),
        ({"messages": CHAT, "functions": [{"name": "f"}]}, (Chat(CHAT, [{"name": "f"}]),)),
        ({"prompt": "half of a \ud83d"}, ("half of a \ud83d",)),
        ({"custom_id": "1", "method": "POST", "body": {"messages": CHAT}}, (Chat(CHAT, ()),)),
        ({"request": json.dumps({"prompt": "hi"})}, ("hi",)),
        ({"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 9]}, (TraceBlocks([0, 9], 700),)),
    ],
    ids=str,
)
def test_a_request_is_read_in_every_form(row: dict[str, Any], contents: tuple[Any, ...]) -> None:
    assert tuple(parse(json.dumps(row).encode()).contents) == contents


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"1", "no JSON object"),
        (b'[{"prompt": "hi"}]', "a line has one request"),
        (b'{"body":' * 300 + b"{}" + b"}" * 300, "no prompt"),
        (b'{"prompt": "\\ud83d', "no JSON"),
        (b'{"model": "m"}', "no prompt"),
        (b'{"messages": []}', "neither text nor a list"),
        (b'{"messages": 5}', "neither text nor a list"),
        (b'{"prompt": [1, -2]}', "neither text nor tokens"),
        (b'{"prompt": [true]}', "neither text nor tokens"),
        (b'{"hash_ids": [1, "2"]}', "no list of whole numbers"),
        (b'{"hash_ids": [99999999999999999999]}', "no list of whole numbers"),
        (b'{"hash_ids": [1], "input_length": -1}', "no number of tokens"),
        (b'{"body": "{"}', "no JSON in 'body'"),
    ],
)
def test_what_is_no_request_has_its_reason(line: bytes, reason: str) -> None:
    with pytest.raises(BadLine, match=reason):
        parse(line)


@pytest.mark.parametrize(
    ("time", "at"),
    [
        ({"timestamp": 1_700_000_000}, 1.7e9),
        ({"timestamp": 1_700_000_000_500}, 1_700_000_000.5),
        ({"ts": "1700000000.5"}, 1_700_000_000.5),
        ({"created_at": "2023-11-14T22:13:20Z"}, 1.7e9),
        ({"time": "2023-11-14T23:13:20+01:00"}, 1.7e9),
        ({"time": "yesterday"}, None),
        ({"time": True}, None),
        ({"time": "inf"}, None),
        ({"time": "nan"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_times_are_read_by_their_size_or_as_dates(time: dict[str, Any], at: float | None) -> None:
    assert parse(json.dumps({"prompt": "hi"} | time).encode()).at == at


def test_times_of_traces_are_milliseconds() -> None:
    assert parse(b'{"timestamp": 1500, "hash_ids": [1]}').at == 1.5


def test_the_tenant_is_the_first_field_that_there_is_or_the_one_named() -> None:
    row = json.dumps({"prompt": "hi", "user": "u", "organization": "o", "team": 7}).encode()
    assert parse(row).tenant == "o"
    assert parse(row, "team").tenant == "7"
    assert parse(row, "nothing").tenant == ""


# --- prompts -----------------------------------------------------------------------------------------------


def test_keys_are_equal_as_far_as_prompts_are_and_no_further() -> None:
    rng = random.Random(1)
    for block_tokens in (1, 2, 3, 16):
        reader = PromptReader(block_tokens)
        for _ in range(50):
            text = "".join(rng.choice("ab") for _ in range(900))
            at = rng.randrange(900)
            other = text[:at] + "c" + text[at + 1 :]
            one, two = reader.read(text).keys, reader.read(other).keys
            assert (one == two).tolist() == [i < at // (4 * block_tokens) for i in range(len(one))]


def test_a_block_moved_to_another_place_has_another_key() -> None:
    reader = PromptReader(4)
    a, b = "a" * 16, "b" * 16
    assert reader.read(a + b).keys[1] != reader.read(b + a).keys[1]
    assert reader.read(a + a).keys[0] != reader.read(a + a).keys[1]


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"one": 1, "two": 2, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    reader = PromptReader(2, tokenizer=tmp_path)
    prompt = reader.read("one two two one one")
    assert (prompt.tokens, len(prompt.keys)) == (5, 2)
    assert prompt.keys.tolist() == PromptReader(2).read([1, 2, 2, 1, 1]).keys.tolist()


def picture(name: str, text: str = "what is this?") -> dict[str, Any]:
    url = f"data:image/png;base64,{'A' * 40_000}{name}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"])
def test_a_picture_is_what_names_it_not_its_bytes(template: str | None, tmp_path: Path) -> None:
    if template:
        (tmp_path / "t.jinja").write_text(template)
    reader = PromptReader(4, template=tmp_path / "t.jinja" if template else None)
    one, same, other = (
        reader.read(Chat([{"role": "system", "content": "s" * 40}, picture(name)], ())) for name in "aab"
    )
    assert one.tokens < 60, "ten thousand tokens of base64 would drown the text"
    assert one.keys.tolist() == same.keys.tolist()
    equal = (one.keys == other.keys).tolist()
    assert equal[1]
    assert not equal[-1], "what comes after another picture is not shared"


def test_what_a_message_has_beside_its_content_is_in_the_prompt() -> None:
    reader = PromptReader(2)
    for more in ("tool_calls", "function_call", "arguments", "output"):
        one, other = (reader.read(Chat([{"role": "assistant", more: [text]}, *CHAT], ())) for text in "ab")
        assert (one.keys != other.keys).any()


def test_a_chat_template_is_found_where_models_have_it(tmp_path: Path) -> None:
    chat = Chat(CHAT, ())
    plain = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "tokenizer_config.json").write_text(json.dumps({"chat_template": plain, "bos_token": "<s>"}))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (tmp_path / "two" / "chat_template.jinja").write_text(plain)
    (tmp_path / "alone.jinja").write_text(plain)
    for name in ("one", "one/tokenizer_config.json", "two", "two/tokenizer_config.json", "two/chat_template.jinja"):
        assert PromptReader(template=tmp_path / name).text(chat) == "<s>hi"
    assert PromptReader(template=tmp_path / "alone.jinja").text(chat) == "hi"
    (tmp_path / "two" / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="no chat template"):
        PromptReader(template=tmp_path / "two")


@pytest.mark.parametrize("option", ["tokenizer", "template"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text("{}")
    if option == "template":
        monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(UsageError, match="tokenizer" if option == "tokenizer" else "needs Jinja, run: pip install"):
        PromptReader(**{option: tmp_path / "x.json"})


# --- what is counted ---------------------------------------------------------------------------------------


def test_bad_lines_are_counted_and_shown_with_their_numbers(tmp_path: Path) -> None:
    log = read(write(tmp_path / "log", [body("a"), "{", "", {"model": "m"}, body("b")]))
    assert (log.lines, log.requests) == (4, 2)
    assert sum(log.bad.values()) == 2
    assert [number for _, number, _ in log.shown] == [2, 4]


def test_reasons_are_bounded_and_do_not_quote_prompts(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}"
        "{% elif messages[0].role == 'x' %}{{ raise_exception('no: ' + messages[0].content) }}"
        "{% else %}{{ messages[0].content.absent.field }}{% endif %}"
    )
    secret = {"role": "x", "content": "secret"}
    path = write(tmp_path / "log", [body("secret"), {"messages": [secret]}, {"messages": [secret | {"role": "y"}]}])
    log = read(path, template=tmp_path / "t.jinja")
    assert log.requests == 0
    assert dict(log.bad) == {
        "chat template: one message only": 1,
        "chat template: it refuses the messages": 1,
        "chat template: UndefinedError": 1,
    }
    collector = Collector(PromptReader(), Limits())
    for i in range(100):
        collector.add(SourceLine("log", i, None, f"reason {i}"))
    assert (len(collector.log.bad), sum(collector.log.bad.values())) == (51, 100)


def test_names_cannot_move_a_terminals_cursor(tmp_path: Path) -> None:
    (name,) = read(write(tmp_path / "log", [body("a", model="m\x1b[2J\ud83d\n")])).models
    assert name == "m\ufffd[2J\ufffd\ufffd"


def test_tenants_that_share_nothing_hit_less(tmp_path: Path) -> None:
    log = read(write(tmp_path / "log", [body(f"{i} {'x' * 90}", user=f"u{i % 3}") for i in range(30)]))
    model = log.models["m"]
    shared, apart = model.shared.curve(), model.apart.curve()
    blocks = len(PromptReader().read(FRONT).keys)
    assert shared.rates[-1] * model.totals.blocks == pytest.approx(29 * blocks)
    assert apart.rates[-1] * model.totals.blocks == pytest.approx(27 * blocks)
    assert {name: tenant.requests for name, tenant in model.tenants.items()} == {"u0": 10, "u1": 10, "u2": 10}
    assert model.shared.curve("u0").rates[-1] < model.shared.curve("u1").rates[-1], "the first request is u0's"


def test_models_share_nothing(tmp_path: Path) -> None:
    log = read(write(tmp_path / "log", [body("a"), body("a", model="n"), {"hash_ids": [1], "model": "m"}]))
    assert sorted(log.models) == ["m", "m (512-token blocks)", "n"]
    assert all(model.shared.curve().rates[-1] == 0 for model in log.models.values())


def test_the_shared_front_is_the_top_prefix_and_its_text_is_kept_only_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "log", [body(f"{i} {'y' * 200}") for i in range(20)])
    for texts in (False, True):
        (top, *_) = read(path, Limits(texts=texts)).models["m"].prefixes.top(3)
        assert (top.requests, top.first) == (20, "log:2")
        assert top.tokens == len(PromptReader().read(f"<|system|>\n{FRONT}").keys) * 16
        assert ("careful assistant" in top.text) is texts


def test_exact_stacks_are_given_up_when_they_grow(tmp_path: Path) -> None:
    path = write(tmp_path / "log", [body(f"{i} {'z' * 200}") for i in range(200)])
    sampled = read(path, Limits(exact_blocks=300, sample_blocks=200)).models["m"]
    exact = read(path, Limits(method="exact", exact_blocks=300)).models["m"]
    assert not sampled.shared.exact
    assert exact.shared.curve().exact
    assert abs(sampled.shared.curve().rates[-1] - exact.shared.curve().rates[-1]) < 0.05


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_of_drawn_counts_is_found(exponent: float) -> None:
    rng = random.Random(5)
    weights = [(k + 1) ** -exponent for k in range(57)]
    drawn = rng.choices(range(57), weights, k=20_000)
    fitted = fit_zipf([drawn.count(k) for k in range(57) if k in drawn])
    assert fitted is not None
    assert fitted.exponent == pytest.approx(exponent, abs=0.06)
    assert fitted.low <= fitted.exponent <= fitted.high
    assert fit_zipf([5, 3]) is None


def test_prefixes_that_are_followed_are_bounded_and_the_heaviest_stay() -> None:
    top = TopPrefixes(limit=50)
    for i in range(3000):
        key = 1 if i % 3 == 0 else 100 + i
        top.add([key, 10**6 + i], 1, 16, f"log:{i}")
    assert top.top(1)[0].requests >= 1000
    assert len(top.ends()) <= 50
