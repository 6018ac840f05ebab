"""The live suite against real engines: fixtures, the order of tests, and what is told at the end.

    make test-engines                 environments made once, then all of it
    python -m pytest live_tests       with PREFIXROUTE_VLLM_ENV and PREFIXROUTE_SGLANG_ENV set

Rules:
1. A test names the engines that it needs by its parameter `engines`; tests of the same engines run together, so that
   each group is started once. Every test finds empty caches.
2. However the run is ended, its engines end with it: a signal is an interrupt here, in the background too.
3. The run fails when fewer than 99 % of all requests on whole streams were within one block of what was expected.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_engines import EngineBench, EngineShape, LiveEngine, open_bench
from live_memory import MemoryWatch
from live_oracle import EstimateTally
from live_sidecars import SidecarFleet, open_fleet

WITHIN = 0.99
"""The share of requests that must be within one block of what was expected."""

TEST_TIMEOUT_S = 1800
"""A pair of engines starts within 300 s; three hundred requests on a busy machine take the most."""

_BEGAN = pytest.StashKey[float]()
_TALLY = pytest.StashKey[EstimateTally]()
_PEAK = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for a report."""
    parser.addoption("--live-json", metavar="FILE", help="write duration, memory and predictions to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count; rule 2."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    config.stash[_BEGAN] = time.monotonic()
    config.stash[_TALLY] = EstimateTally()
    config.stash[_PEAK] = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of the same engines next to each other (rule 1)."""
    order: dict[Any, int] = {}
    for item in items:
        order.setdefault(_engines_of(item), len(order))
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
    items.sort(key=lambda item: order[_engines_of(item)])


def _engines_of(item: pytest.Item) -> Any:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("engines") if callspec is not None else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Keep the engines' logs of a run in which something failed."""
    report = yield
    bench = getattr(item, "funcargs", {}).get("bench")
    if report.failed and isinstance(bench, EngineBench):
        bench.failed = True
        report.sections.append(("engine and sidecar logs", str(bench.folder)))
    return report


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    """The place where engines run."""
    with open_bench() as bench:
        watch = MemoryWatch(lambda: bench.process_groups)
        watch.start()
        try:
            yield bench
        finally:
            watch.stop()
            request.config.stash[_PEAK] = watch.peak_bytes


@pytest.fixture
def engines(request: pytest.FixtureRequest, bench: EngineBench) -> list[LiveEngine]:
    """Engines of the shapes that the test's parameter names, with empty caches."""
    shapes: tuple[EngineShape, ...] = request.param
    return bench.engines(shapes)


@pytest.fixture
def engine(engines: list[LiveEngine]) -> LiveEngine:
    """The only engine of a test that needs one."""
    (only,) = engines
    return only


@pytest.fixture
def fleet(request: pytest.FixtureRequest, bench: EngineBench, engines: list[LiveEngine]) -> Iterator[SidecarFleet]:
    """No sidecars yet, and a folder for them."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    folder: Path = bench.folder / name
    folder.mkdir()
    with open_fleet(folder) as fleet:
        yield fleet


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> EstimateTally:
    """Where compared requests are noted."""
    tally = request.config.stash[_TALLY]
    tally.where = request.node.name
    return tally


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Rule 3."""
    tally = session.config.stash[_TALLY]
    if exitstatus == pytest.ExitCode.OK and tally.share_within() < WITHIN:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Tell duration, memory and how right the estimates were."""
    took_s, peak, tally = time.monotonic() - config.stash[_BEGAN], config.stash[_PEAK], config.stash[_TALLY]
    terminalreporter.section("live suite")
    for line in tally.text():
        terminalreporter.line(line)
    if tally.share_within() < WITHIN:
        terminalreporter.line(f"FAILED: fewer than {100 * WITHIN:.0f} % within one block")
    terminalreporter.line(f"duration {took_s:.0f} s, peak memory of the engines {peak / 2**30:.2f} GiB (proportional)")
    if path := config.getoption("--live-json"):
        report = {
            "duration_s": round(took_s, 1),
            "peak_pss_bytes": peak,
            "share_within_one_block": tally.share_within(),
            "compared": [row._asdict() for row in tally.rows],
        }
        Path(path).write_text(json.dumps(report) + "\n", encoding="utf-8")
