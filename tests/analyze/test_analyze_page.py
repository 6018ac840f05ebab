"""The command and what it writes: text, JSON, and a page that needs nothing but itself."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from prefixroute import cli
from prefixroute.analyze.charts import Axis, Series, line_chart, percent, short

DOCUMENT = Path(__file__).parents[2] / "docs" / "analyze.md"
FRONT = "You answer in short plain sentences and name every source. " * 12
QUICK = ("--seeds", "2", "--workers", "1", "--requests", "40", "--delays", "1,300", "--cache-tokens", "4000")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = [
        {"model": "<m>", "user": f"u{i % 2}", "timestamp": 1.7e9 + i, "prompt": f"{FRONT} <b>{i}</b> {'w' * 300}"}
        for i in range(60)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return path


VOID = {"meta", "link"}
SVG_EMPTY = {"line", "polyline", "circle", "polygon"}


class Page(HTMLParser):
    """Counts tags, checks that they nest, and keeps what could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SVG_EMPTY
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_without_scripts_that_shows_both_charts(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.html"
    assert cli.main(["analyze", str(log), "--html", str(file), "--text", *QUICK]) == 0
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags["svg"] == 2
    assert "script" not in page.tags
    assert page.loads == ["data:,"]
    assert "@import" not in text
    assert "url(" not in text
    assert "<m>" not in text, "what comes from a log is escaped"
    assert "&lt;m&gt;" in text
    assert "short plain sentences" in text
    for part in text.split("<svg")[1:]:
        ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
    assert "model <m>: 60 requests" in capsys.readouterr().out


def test_json_goes_to_standard_output_alone_and_has_all_figures(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["analyze", str(log), "--json", *QUICK]) == 0
    found = json.loads(capsys.readouterr().out)
    (model,) = found["models"]
    assert (found["requests"], found["lines"], found["bad"]["count"]) == (60, 61, 1)
    assert found["bad"]["first"] == [[str(log), 61, "no JSON"]]
    assert model["hit_rate"] == pytest.approx(59 * 11 / model["blocks"], rel=0.1)
    assert model["span_s"] == pytest.approx(59)
    assert (model["tenant_count"], len(model["tenants"])) == (2, 2)
    assert [row["delay_ms"] for row in model["gain"]["delays"]] == [1, 300]
    assert model["verdict"]["advice"] in ("route", "local caches suffice", "a bigger or central cache is better")
    assert not any(prefix["text"] for prefix in model["prefixes"])
    rates = [point["hit_rate"] for point in model["curve"]]
    assert rates == sorted(rates)


def test_a_sampled_report_tells_its_error(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--method", "sampled", "--sample-blocks", "100", "--requests", "0")
    assert cli.main(["analyze", str(log), *small]) == 0
    assert "(sampled, +-" in capsys.readouterr().out


def test_a_log_without_a_request_is_a_failure_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    assert cli.main(["analyze", str(tmp_path / "empty")]) == 1
    assert "no request to judge" in capsys.readouterr().out
    for name, text in (("list.json", "[{}]"), ("pretty.json", '{\n"prompt":\n"hi"}\n')):
        (tmp_path / name).write_text(text)
        assert cli.main(["analyze", str(tmp_path / name)]) == 1
        assert "jq -c" in capsys.readouterr().out


def test_no_prompt_is_in_a_report_unless_asked(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(log.read_text() + '["short plain sentences"]\n{"prompt": {"short plain sentences": 1}}\n')
    for asked in ((), ("--text",)):
        files = [tmp_path / "report.html", tmp_path / "report.json"]
        options = ["--html", str(files[0]), "--json", str(files[1]), "--requests", "0", *asked]
        assert cli.main(["analyze", str(log), *options]) == 0
        out, err = capsys.readouterr()
        said = [text.count("plain sentences") for text in (out, *(file.read_text() for file in files))]
        assert all(said) if asked else not any(said)
        assert "plain" not in err


def test_a_token_is_what_the_log_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"text": {"prompt": "hi"}, "tokens": {"prompt": [1, 2]}, "trace": {"hash_ids": [1]}}
    for kind, said in (("text", "4 bytes"), ("tokens", "as they were logged"), ("trace", "as the trace tells")):
        (tmp_path / kind).write_text(json.dumps(rows[kind]))
        assert cli.main(["analyze", str(tmp_path / kind)]) == 0
        assert said in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "1"], "nodes >= 2"),
        (["--delays", "a"], "numbers with commas"),
        (["--load", "1"], "under 1"),
        (["--top", "0"], "1 or more"),
        (["--block-tokens", "0"], "1 to 4096"),
        (["--sample-blocks", "1"], "at least 64"),
        (["--html", "/dev/null/x"], "cannot write"),
        (["--tokenizer", "/nowhere"], "no tokenizer.json"),
    ],
)
def test_what_cannot_be_is_one_line(
    log: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["analyze", str(log), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert cli.main(["analyze", str(log) + ".gone"]) == 2


def test_the_example_of_the_document_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(document.split("```python\n")[1].split("```")[0], {})
    told = document.split("$ prefixroute analyze requests.jsonl ")[1].split("```")[0]
    options, _, shown = told.partition("\n")
    assert cli.main(["analyze", "requests.jsonl", *options.split(), "--requests", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 20
    # What is simulated takes a minute: the verdict's two lines, and all after the tenants.
    lines = shown.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("model "))
    assert printed[: at + 1] + printed[at + 3 :] == lines[: at + 1] + lines[at + 3 : len(printed)]


def test_charts_stay_in_their_box_whatever_the_points() -> None:
    for points in ([], [(5.0, 0.5)], [(1.0, 0.2), (1e9, 0.9)], [(0.0, 1.0), (10.0, 3.0)], [(1.0, 0.0), (2.0, 0.0)]):
        chart = line_chart("t", Axis("x", short), Axis("y", percent), [Series("a", points, [0.1] * len(points))])
        if not [x for x, _ in points if x > 0]:
            assert chart == ""
            continue
        svg = ET.fromstring(chart[chart.index("<svg") : chart.index("</svg>") + 6])
        for line in svg.iter("polyline"):
            for pair in line.attrib["points"].split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= 560
                assert 0 <= y <= 310
