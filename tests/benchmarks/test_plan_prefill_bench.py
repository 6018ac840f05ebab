"""The benchmarks of prefill planning: bars that need no simulation are met, and times to first token are measured."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict

import plan_prefill
import ttft_real


def test_all_bars_of_the_formula_and_of_calibration_are_met() -> None:
    rows = [*plan_prefill.formula(), *plan_prefill.calibration(plan_prefill.MEASURED)]
    assert sum(row.bar is not None for row in rows) >= 15
    assert [row.what for row in rows if not row.met] == []


def test_times_to_first_token_of_an_engine_are_measured_cell_by_cell() -> None:
    rounds: list[int] = []

    def told(found: ttft_real.Found) -> None:
        rounds.append(min(map(len, found.values())))

    found = asyncio.run(ttft_real.run("emulated", 1, 1, True, told))
    assert rounds == [1]
    assert set(found) == set(ttft_real.cells(True))
    for cell, (seen,) in found.items():
        assert seen.cached_tokens in (cell.cached_tokens, max(0, cell.cached_tokens - ttft_real.BLOCK))
        assert 0 < seen.own_s <= seen.ttft_s


def test_medians_are_written_a_row_a_line() -> None:
    found: ttft_real.Found = defaultdict(list)
    for seconds in (3.0, 1.0, 2.0):
        found[ttft_real.Cell(128, 32, 2)].append(ttft_real.Seen(seconds, seconds / 2, 32))
    text = ttft_real.as_json("vllm", found)
    assert len(text.splitlines()) == 2
    written = json.loads(text)
    assert (written["engine"], written["rounds"]) == ("vllm", 3)
    assert written["rows"] == [
        {"prompt_tokens": 128, "cached_tokens": 32, "concurrent": 2, "ttft_s": 2.0, "own_s": 1.0}
    ]
