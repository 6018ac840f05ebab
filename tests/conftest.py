"""What holds for every test: the line coverage of the core is measured by its own tests only.

The laboratories, and what serves and plans, run the core millions of times and cover no line of it that its own tests
do not, but under a tracer they take half as long again: they were a third of the suite's time (issue 15).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from coverage import Coverage

UNTRACED = frozenset(("analyze", "benchmarks", "examples", "plan", "serving", "sim"))
"""The folders of tests during which nothing is traced."""

LONG = frozenset(
    (
        "test_anchors.py",
        "test_decoder_fuzz.py",
        "test_gossip_faults.py",
        "test_hostile.py",
        "test_lives_of_owners.py",
        "test_members.py",
        "test_outcomes.py",
        "test_silent_peers.py",
        "test_tree.py",
    )
)
"""Files of the core's own tests that run for minutes, of which the same holds."""


@pytest.fixture(scope="module", autouse=True)
def tracing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stop all tracers for the modules of `UNTRACED`; a worker process has two, and stopping one resumes the other."""
    stopped: list[Coverage] = []
    untraced = request.path.parent.name in UNTRACED or request.path.name in LONG
    while untraced and (coverage := Coverage.current()) is not None:
        coverage.stop()
        stopped.append(coverage)
    yield
    for coverage in reversed(stopped):
        coverage.start()
