"""Commands with subjects, as ``prefixroute simulate SUBJECT``: tables of them, each in a module of its own.

A subject's module has `add_options(parser)` and `run_options(options) -> int`, and imports what its work needs when it
runs, so that ``--help`` needs no extra.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple


class Subject(NamedTuple):
    """A line of a command's help, and the module that does it, as written after ``prefixroute.``."""

    name: str
    help: str
    module: str


class Subjects:
    """The subjects of one command."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._subjects = {subject.name: subject for subject in subjects}

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subjects and their options."""
        subparsers = parser.add_subparsers(dest="subject", required=True)
        for subject in self._subjects.values():
            subparser = subparsers.add_parser(subject.name, help=subject.help, description=subject.help)
            self._module(subject.name).add_options(subparser)

    def run_options(self, options: argparse.Namespace) -> int:
        """Run the chosen subject; return the exit code."""
        return int(self._module(options.subject).run_options(options))

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"prefixroute.{self._subjects[name].module}")


PLANS = Subjects(
    (
        Subject(
            "place", "which server should hold which blocks of a model that fits none of them", "cli.placement_plan"
        ),
        Subject(
            "prefill", "which prompts a faster cluster should prefill, and how to divide the nodes", "cli.prefill_plan"
        ),
    )
)
"""``prefixroute plan SUBJECT``: what can be planned."""

SIMULATIONS = Subjects(
    (
        Subject(
            "replication",
            "random schedules of faults over real nodes; check every rule of replication",
            "sim.replication.command",
        ),
        Subject(
            "paper",
            "the published results of decentralised routing by longest match, row by row",
            "sim.serving.paper",
        ),
        Subject(
            "grid",
            "all policies over fleets, workloads, caches, gossip, loads and delays, against no routing",
            "sim.serving.grid",
        ),
        Subject(
            "gateways",
            "stateless gateways in front of many endpoints: what gossip between them is worth",
            "sim.serving.gateway_fleet",
        ),
        Subject(
            "stress",
            "the default rule where the grid does not go: wrong settings, slow nodes, losses, crashes, lies",
            "sim.serving.stress",
        ),
        Subject(
            "situations",
            "where requests enter: each node's own traffic, one hot prefix at a gateway or at one node",
            "sim.serving.situations",
        ),
        Subject(
            "tenants",
            "a greedy tenant beside light ones, with and without the fairness guard",
            "sim.serving.greedy_tenant",
        ),
        Subject(
            "place",
            "blocks of a model over many servers: our placements and chains against the baseline",
            "sim.placement.command",
        ),
        Subject(
            "prefill",
            "two clusters with arrivals: prefill divided as planned, all local, all in the pool",
            "sim.prefill.command",
        ),
        Subject("run", "your own fleet and workload, from a scenario file", "sim.serving.scenario"),
    )
)
"""``prefixroute simulate SUBJECT``: what can be simulated."""
