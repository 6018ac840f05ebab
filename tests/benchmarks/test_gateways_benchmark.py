"""The gateway benchmark runs, forwards what it says it forwards, and tells what it could not measure."""

from __future__ import annotations

from pathlib import Path

from test_benchmarks import run
from workbench.stub_worker import Cache, tokens, words


def test_gateways_writes_a_row_for_each_gateway_and_kind_of_prompt(tmp_path: Path) -> None:
    sizes = ["--sizes", "1000", "--requests", "3", "--rounds", "1", "--idle-s", "0.1"]
    result = run("gateways.py", *sizes, "--env", str(tmp_path), "--rivals", "smg")
    rows = {(row["gateway"], row["prompt"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 8
    for form in ("text", "tokens"):
        assert rows["direct", form]["added_ms"] == rows["direct", form]["cpu_ms"] == 0
        assert rows["ours, local", form]["targets"] == {"n0/0": 3}
        assert rows["ours, forwarded", form]["targets"] == {"n1/0": 3}
        assert rows["ours, local", form]["cpu_ms"] > 0 < rows["ours, forwarded", form]["cpu_ms"]
        assert rows["smg", form]["why_not"] == "not installed"
    assert set(result["idle_ms_per_s"]) == {"direct", "ours, local", "ours, forwarded", "smg"}


def test_a_stub_worker_counts_what_it_has_seen_alike_for_texts_and_tokens() -> None:
    ids = list(range(1000))
    assert tokens(words(ids)) == ids
    for prompt in (ids, words(ids)):
        cache = Cache()
        assert cache.take(prompt) == (1000, 0)
        assert cache.take(prompt) == (1000, 768)
        assert cache.take(prompt[: len(prompt) // 2]) == (500, 256)
