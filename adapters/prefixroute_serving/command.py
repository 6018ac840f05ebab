"""``prefixroute serve`` and ``prefixroute doctor``: their options.

Rule: nothing is imported here but the command line's own table, so that ``prefixroute --help`` needs no extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from prefixroute.cli import Command, needing_extra


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the sidecar's configuration, a JSON file")


def _run_serve(options: argparse.Namespace) -> int:
    with needing_extra("serving", "demo"):
        from .serve import run
    return run(options.config)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("configs", nargs="+", type=Path, metavar="CONFIG", help="a sidecar's configuration; best those of all nodes")
    add("--patience", type=_seconds, default=3.0, metavar="S", help="how long an event or an echo may take (3)")
    add("--json", action="store_true", help="print the findings as JSON")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 10:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 10 seconds, not {text}")
    return value


def _run_doctor(options: argparse.Namespace) -> int:
    with needing_extra("the doctor", "demo"):
        from .doctor.examination import run_options
    return run_options(options)


SERVE: Final = Command(
    "serve",
    "run the sidecar of one node: an OpenAI-compatible door in front of its engine that routes",
    _serve_options,
    _run_serve,
)
DOCTOR: Final = Command(
    "doctor",
    "examine running sidecars and their engines, and say what to change; exit code 1 when something is wrong",
    _doctor_options,
    _run_doctor,
)
