"""``prefixroute plan SUBJECT``: each subject is a line of SUBJECTS; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple


class Subject(NamedTuple):
    """A subject of planning: the module beside this one whose add_options and run_options it has."""

    name: str
    help: str
    module: str


SUBJECTS = (
    Subject("place", "which server should hold which blocks of a model that fits none of them", "place_command"),
    Subject("prefill", "which prompts a faster cluster should prefill, and how to divide the nodes", "prefill_command"),
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
    (module,) = [subject.module for subject in SUBJECTS if subject.name == name]
    found: argparse.Namespace = importlib.import_module(f".{module}", __package__)  # type: ignore[assignment]
    return found
