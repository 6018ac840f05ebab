"""The placement benchmark runs and writes what it promises; its figures are no test's business, but plausible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_place.py"


def test_every_part_has_its_rows() -> None:
    small = ["--seeds", "2", "--requests", "30", "--rates", "1", "--scenarios", "3", "--workers", "1"]
    command = [sys.executable, str(SCRIPT), "--only", "adaptive,online,studies,changes", *small, "--json", "-"]
    written = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rows = {row["what"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    for part in ("30 servers", "online", "3 scenarios", "changes"):
        assert any(what.startswith(part) for what in rows), part
    over = [row["value"] for what, row in rows.items() if "over the lower bound" in what]
    assert over and all(value >= 1 for value in over)
    assert all(row["value"] < 1 for what, row in rows.items() if "adaptive: over petals (" in what)
    assert all(row["met"] for what, row in rows.items() if "block on no server" in what)
