"""What holds for every test: the line coverage of the core is measured by its own tests only.

The laboratories run the core millions of times and cover no line of it that its own tests do not, but under a tracer
they take half as long again: they were a third of the suite's time (issue 15).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from coverage import Coverage

UNTRACED = frozenset(("benchmarks", "sim"))
"""The folders of tests during which nothing is traced."""


@pytest.fixture(scope="module", autouse=True)
def tracing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop the tracer, if one runs, for the modules of `UNTRACED`."""
    coverage = Coverage.current() if request.path.parent.name in UNTRACED else None
    if coverage is None:
        yield
        return
    coverage.stop()
    try:
        yield
    finally:
        coverage.start()
