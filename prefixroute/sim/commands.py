"""``prefixroute simulate SUBJECT``: each subject is a line of SUBJECTS; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple


class Subject(NamedTuple):
    """A subject of simulation: the module beside this one whose add_options and run_options it has."""

    name: str
    help: str


SUBJECTS = (
    Subject("replication", "random schedules of faults over real nodes; check every rule of replication"),
    Subject("paper", "the published results of decentralised routing by longest match, row by row"),
    Subject("grid", "all policies over fleets, workloads, caches, gossip, loads and delays, against no routing"),
    Subject("gateways", "stateless gateways in front of many endpoints: what gossip between them is worth"),
    Subject("stress", "the default rule where the grid does not go: wrong settings, slow nodes, losses, crashes, lies"),
    Subject("place", "blocks of a model over many servers: our placements and chains against the baseline"),
    Subject("prefill", "two clusters with arrivals: prefill divided as planned, all local, all in the pool"),
    Subject("run", "your own fleet and workload, from a scenario file"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subjects and their options."""
    subparsers = parser.add_subparsers(dest="subject", required=True)
    for subject in SUBJECTS:
        subparser = subparsers.add_parser(subject.name, help=subject.help, description=subject.help)
        _module(subject.name).add_options(subparser)


def run_options(options: argparse.Namespace) -> int:
    """Run the chosen subject; return the exit code."""
    return int(_module(options.subject).run_options(options))


def _module(name: str) -> argparse.Namespace:
    found: argparse.Namespace = importlib.import_module(f".{MODULES.get(name, name)}", __package__)  # type: ignore[assignment]
    return found


MODULES = {"prefill": "prefill_command", "run": "scenario"}
"""Modules that are not named as their subject."""
