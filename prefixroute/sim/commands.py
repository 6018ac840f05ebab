"""``prefixroute simulate SUBJECT``: what can be simulated."""

from __future__ import annotations

from prefixroute.subjects import Subject, Subjects

_SUBJECTS = (
    Subject("replication", "random schedules of faults over real nodes; check every rule of replication"),
    Subject("paper", "the published results of decentralised routing by longest match, row by row"),
    Subject("grid", "all policies over fleets, workloads, caches, gossip, loads and delays, against no routing"),
    Subject("gateways", "stateless gateways in front of many endpoints: what gossip between them is worth"),
    Subject("stress", "the default rule where the grid does not go: wrong settings, slow nodes, losses, crashes, lies"),
    Subject("tenants", "a greedy tenant beside light ones, with and without the fairness guard"),
    Subject("place", "blocks of a model over many servers: our placements and chains against the baseline"),
    Subject(
        "prefill",
        "two clusters with arrivals: prefill divided as planned, all local, all in the pool",
        "prefill_command",
    ),
    Subject("run", "your own fleet and workload, from a scenario file", "scenario"),
)

SUBJECTS = Subjects("prefixroute.sim", _SUBJECTS)
