"""Random small fleets with random faults: every request is answered once, forwarded at most once, and never to who is
known to refuse or to be suspended while somebody else could take it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import POLICIES, Decision
from prefixroute.sim.serving.cells import CellSettings, trace_of
from prefixroute.sim.serving.faults import Fault, FaultSettings, Faulty, served_once

faults = st.builds(
    lambda kind, node, begin_s, lasts_s: Fault(kind, node, begin_s, begin_s + lasts_s),
    st.sampled_from(["crash", "silent", "refuse", "hide_load", "claim_all"]),
    st.integers(0, 1),
    st.floats(0.0, 20.0),
    st.floats(1.0, 30.0),
)


class Watched(Faulty):
    """A run that looks at each decision when it is taken."""

    def route(self, job: Any, now: float) -> int:
        """Ask the origin's node, and hold what it decides against what it knows."""
        node = self.nodes[job.origin]
        rows = {row.endpoint: row for row in node.stats(now).endpoints}
        target = super().route(job, now)
        decision: Decision = job.decision
        row = rows[decision.target]
        assert row.usable or not any(other.usable or other.local for other in rows.values()), decision
        assert decision.local is (target == job.origin)
        return target

    def accept(self, attempt: Any, now: float) -> bool:
        """What was forwarded stays where it arrives, or goes back to where it came from, at the first try only."""
        accepted = super().accept(attempt, now)
        assert attempt.decision.local
        assert attempt.decision.fallbacks == ()
        assert accepted is not attempt.decision.declined
        assert accepted or attempt.number == 1
        return accepted


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(
    st.integers(2, 5),
    st.sampled_from(["uniform", "zipf1.5", "conversations"]),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0.002, 0.2]),
    st.lists(faults, max_size=3, unique_by=lambda fault: fault.node),
    st.sampled_from([0.0, 0.2]),
    st.integers(1, 10**6),
)
def test_every_request_is_answered_once_and_goes_to_nobody_who_is_known_to_be_out(
    nodes: int, workload: str, policy: str, delay_s: float, wrong: list[Fault], share: float, seed: int
) -> None:
    cell = CellSettings(nodes, workload, 0.25, 1.0, 0.5, delay_s, 60, extra=(("timeout_s", 5.0), ("loss", share)))
    trace = trace_of(cell, seed)
    run = Watched(trace, cell.serving(trace), seed, POLICIES[policy], FaultSettings(wrong, lost=share, repeated=share))
    assert served_once(run, run.run())
    assert sum(run.served.counts[kind] for kind in ("answered",)) == len(trace.arrivals)
