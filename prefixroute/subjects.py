"""Commands with subjects, as ``prefixroute simulate SUBJECT``: a table of them, each in a module of its own.

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
    """A line of a command's help, and the module in the command's package; without one it is named as the subject."""

    name: str
    help: str
    module: str = ""


class Subjects:
    """The subjects of one command, whose modules are in `package`."""

    def __init__(self, package: str, subjects: Sequence[Subject]) -> None:
        self._package = package
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
        return importlib.import_module(f"{self._package}.{self._subjects[name].module or name}")
