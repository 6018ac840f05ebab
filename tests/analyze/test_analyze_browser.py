"""The analyser's page in a browser: at a phone's and a desktop's width, in light and in dark, fit to be read.

Run by `make test-browser`, since it needs a Chromium.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from browser import DARK, DESKTOP, LIGHT, PHONE, WANTED, Run, browser, examine, launch

from prefixroute import cli

pytestmark = pytest.mark.browser

FRONT = "You answer in short plain sentences and name every source. "
QUICK = ("--seeds", "2", "--workers", "1", "--requests", "60", "--cache-tokens", "3000", "--sample-blocks", "200")

CHART = '<svg viewBox="0 0 560 100"><polyline class="s0" points="0,0 9,9" style="stroke:#777"/>{}</svg>'
FAULTY = {
    "throws": ("<script>throw new Error('thrown on purpose')</script>", ""),
    "warns": ("<script>console.warn('warned on purpose')</script>", ""),
    "wide": ("<div style='width:2000px'>wide</div>", "px wide in"),
    "tiny": ("<p style='font-size:11px'>tiny", "11.0 px"),
    "pale": ("<p style='color:#999'>pale", "contrast of 2.8"),
    "loads": ("<img src='http://other.example/x.png'>", "loads http://other.example/x.png"),
    "scaled": (CHART.format("<text x=9 y=50 font-size=13>13 units"), "9.1 px"),
    "leaves": (CHART.format("<text x=500 y=50 font-size=20>a label too long"), "leaves its chart"),
    "heaped": (CHART.format("<text x=9 y=50 font-size=20>one</text><text x=15 y=50 font-size=20>two"), "on each other"),
    "empty": (CHART.format(""), "no label"),
}
"""Pages with a fault, and what is to be said of it; the console's are told apart."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    browser()
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def report(folder: Path) -> Path:
    """Everything that a report can have: models, tenants, texts, a sampled curve, long names, bad lines."""
    rng = random.Random(4)
    rows = []
    for i in range(400):
        topic = min(int(rng.paretovariate(0.8)), 40)
        name = "organisation/a-model-with-a-very-long-name-and-a-date-20261130" if i % 3 else "small"
        tail = "w" * 300 if i % 2 else " ".join(str(rng.random()) for _ in range(60))
        text = f"{FRONT * 6}{topic} {FRONT * topic}{tail}"
        rows.append({"model": name, "user": f"team-{i % 7}@example.org", "timestamp": 1.7e9 + i, "prompt": text})
    log = folder / "requests-of-a-day-with-a-rather-long-file-name.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"model": "few", "prompt": "hi"}\n{broken\n')
    file = folder / "report.html"
    options = ["--text", "--method", "sampled", "--delays", "1,10,50,200", "--html", str(file)]
    assert cli.main(["analyze", str(log), *options, *QUICK]) == 0
    return file


@pytest.fixture(scope="module")
def nothing(folder: Path) -> Path:
    (folder / "empty.jsonl").write_text("")
    file = folder / "nothing.html"
    assert cli.main(["analyze", str(folder / "empty.jsonl"), "--html", str(file)]) == 1
    return file


@pytest.fixture(scope="module")
def runs(folder: Path, report: Path, nothing: Path) -> dict[str, Run]:
    """The pages in both schemes: a run of the browser each."""
    pages = {
        "phone": (report, PHONE),
        "desktop": (report, DESKTOP),
        "nothing": (nothing, PHONE),
    }
    return {name: examine(folder, pages, scheme) for name, scheme in (("light", LIGHT), ("dark", DARK))}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("frame", "width"), [("phone", 390), ("desktop", 1440), ("nothing", 390)])
def test_the_page_is_fit_to_be_read(runs: dict[str, Run], scheme: str, frame: str, width: int) -> None:
    seen = runs[scheme].frames[frame]
    assert seen.faults == []
    assert (seen.width, seen.dark) == (width, scheme == "dark")
    assert seen.letters > 50
    assert seen.charts == (0 if frame == "nothing" else 5), "two of each model, one where too little was simulated"
    assert runs[scheme].console == []


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_the_file_opens_by_itself_without_a_word_to_the_console(
    folder: Path, report: Path, size: tuple[int, int]
) -> None:
    shot = folder / f"{size[0]}.png"
    window = f"--window-size={size[0]},{size[1]}"
    _, console = launch(folder, window, f"--screenshot={shot}", report.as_uri())
    assert console == []
    assert shot.stat().st_size > 10_000, "a page of one colour is smaller"


def test_every_fault_is_found(folder: Path) -> None:
    pages = {}
    for name, (body, _) in FAULTY.items():
        pages[name] = (folder / f"{name}.html", PHONE)
        pages[name][0].write_text(f"<!doctype html><body style='background:#fff;margin:0'>{body}</body>")
    run = examine(folder, pages, LIGHT)
    for name, (_, said) in FAULTY.items():
        found = run.frames[name].faults
        assert any(said in fault for fault in found) if said else not found, (name, found)
    for said in ("thrown on purpose", "warned on purpose"):
        assert any(said in line for line in run.console), said


def test_without_a_browser_the_test_fails_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXROUTE_BROWSER", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        browser()
    assert "PREFIXROUTE_BROWSER" in WANTED
