"""Prefix indexes of other projects that install from PyPI, each behind the same few methods.

Rules:
1. A rival is told the same world and asked the same prompts, in the form that it takes itself. Tokens that it wants as
   text, hashes or JSON are made into that outside the timers, unless making them is its answer's first step.
2. *match* finds who holds how much; *decide* chooses a target. `ANSWERS` says in words what an answer is.
3. One that is not installed, or does not work here, is named with the reason, and the others go on.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from comparison import rivals_dynamo, rivals_python
from comparison.contest import Run
from comparison.worlds import World


class Side(Protocol):
    """Whoever has an answer."""

    def runs(self, what: str, case: str, form: str) -> dict[str, Run]:
        """Return what it can do, name -> run: *what* is match or decide, *form* list, buffer or prepared."""


class Index(Side, Protocol):
    """What a rival holds of a world."""

    def depth(self, case: str, i: int) -> int:
        """Return how many blocks of the i-th prompt of a case the best endpoint holds, by its own answer."""

    def close(self) -> None:
        """Stop whatever it started."""


class Churn(Protocol):
    """An index that fresh prompts go into. Out of it they come again with `remove(i)`, where there is such a thing."""

    def store(self, i: int) -> None:
        """Store the i-th prompt."""


class Rival(NamedTuple):
    """A rival: its package, how its index of a world is made, and one of fresh prompts."""

    package: str
    make: Callable[[World], Index]
    churn: Callable[[Sequence[list[int]]], Churn] | None


RIVALS = {
    "dynamo service": Rival("ai-dynamo-runtime", rivals_dynamo.Service, None),
    "dynamo tree": Rival("ai-dynamo-runtime", rivals_dynamo.Tree, rivals_dynamo.TreeChurn),
    "gorgo": Rival("gorgo-lb", rivals_python.Gorgo, rivals_python.GorgoChurn),
    "ray": Rival("ray", rivals_python.Ray, rivals_python.RayChurn),
}

ANSWERS = {
    "ours": "match: the deepest four depths with their endpoints; decide: one endpoint, fallbacks, every candidate's "
    "terms, and the work booked",
    "dynamo select": "chooses one worker; nothing is booked; awaited, on uvloop where there is one",
    "dynamo select, reserve": "chooses one worker and books the work",
    "dynamo tree": "hashes every block, then a depth for every worker, not yet made into a dict; nothing is chosen",
    "gorgo": "match: a depth for every endpoint; decide: its policy `gorgo` on top, one endpoint; nothing is booked",
    "ray": "matches text, four characters a token: the deepest endpoints only; without the actor that it sits behind",
    "floor": "ours in C, called from Python: the same hashes, the same search, the same answer as a match",
    "python hash": "packs the prompt and hashes it stride by stride: no answer at all",
}
"""What an answer is: the work is not equal everywhere."""


def installed(names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions of those rivals that are installed, and why the others are not there."""
    there, absent = {}, {}
    for name in names:
        package = RIVALS[name].package
        try:
            there[name] = f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            absent[name] = f"{package} is not installed"
    return there, absent
