"""Line coverage of the core, file by file, from the data of ``pytest --cov``; exit code 1 below the percentage given.

python -m pytest --cov && python tests/house/core_coverage.py 95
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from coverage import Coverage
from coverage.exceptions import CoverageException
from test_import_rules import CORE, ROOT


class Lines(NamedTuple):
    """Executable lines of a file, and those that no test ran."""

    total: int
    missing: tuple[int, ...]

    @property
    def percent(self) -> float:
        """Share that ran; a file without lines is whole."""
        return 100.0 * (1 - len(self.missing) / self.total) if self.total else 100.0


def measure(data_file: str) -> dict[str, Lines]:
    """Read the coverage of every file of the core. Raises `CoverageException` when there is no data."""
    coverage = Coverage(data_file=data_file, config_file=str(ROOT / "pyproject.toml"))
    coverage.load()
    if not coverage.get_data().measured_files():
        raise CoverageException(f"no coverage data in {data_file}: run pytest --cov first")
    rows = {}
    for module, path in sorted(CORE.items()):
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        rows[module.removeprefix("prefixroute.")] = Lines(len(statements), tuple(missing))
    return rows


def whole(rows: dict[str, Lines]) -> Lines:
    """All files as one; its missing lines are only a number."""
    return Lines(sum(row.total for row in rows.values()), tuple(line for row in rows.values() for line in row.missing))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0 when the total reaches the least percentage, 1 when not, 2 without data."""
    parser = argparse.ArgumentParser(description="Line coverage of the core.")
    parser.add_argument("least", type=float, help="least percentage of lines in total")
    parser.add_argument("--data-file", default=str(ROOT / ".coverage"), help="what pytest --cov wrote")
    options = parser.parse_args(arguments)
    try:
        rows = measure(options.data_file)
    except CoverageException as error:
        print(f"core_coverage: {error}", file=sys.stderr)
        return 2
    total = whole(rows)
    print(f"{'file':<32}{'lines':>7}{'missed':>8}{'%':>8}")
    for name, row in [*rows.items(), ("total", total)]:
        print(f"{name:<34}{row.total:>7}{len(row.missing):>8}{row.percent:>8.1f}")
    if total.percent >= options.least:
        return 0
    print(f"core_coverage: {total.percent:.1f} % of the core's lines ran, {options.least:g} % wanted", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
