"""The benchmark runs and writes what it promises; its figures are no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROUTE = Path(__file__).parent.parent / "benchmarks" / "route.py"


def test_route_writes_a_row_for_each_case_and_form() -> None:
    arguments = ["--endpoints", "3", "--blocks", "40", "--repeat", "1", "--json"]
    done = subprocess.run([sys.executable, str(ROUTE), *arguments], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [(row["case"], row["form"]) for row in rows] == [
        (case, form) for case in ("hit", "half", "miss") for form in ("list", "buffer", "chain")
    ]
    assert all(row["endpoints"] == 3 and row["blocks"] == 40 and row["route_us"] > 0 for row in rows)
