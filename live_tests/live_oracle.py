"""What a node expects of a prompt against what the engine then reports of the very same prompt.

Rules:
1. A probe goes through the sidecar to its own engine: the reply carries the estimate of the moment before it was sent
   (`x-prefixroute-matched`) and the engine's own count of reused tokens.
2. Every probe waits until all that the engine has published is applied. It changes the cache like any other request,
   and the next one sees that change.
3. Never high by more than one engine block. When the stream is whole, exact: equal to what the engine reuses, rounded
   down to the node's own block where the engine's is smaller.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from live_sidecars import LiveSidecar, SidecarAnswer

CANONICAL = 16
"""The block of the library, in tokens."""

TOKENS = range(100, 4000)
"""Ordinary ones of the made-up tokenizer."""


class Probe(NamedTuple):
    """A prompt to ask about: what it stands for, its tokens, and what separates it from others."""

    what: str
    tokens: list[int]
    salt: str = ""
    adapter: str = ""


class Compared(NamedTuple):
    """One served request: what was expected of it, and what the engine said. `block` is the engine's.

    `whole` is False where exactness is out of reach: messages were lost.
    """

    where: str
    what: str
    engine: str
    predicted: int
    actual: int
    block: int
    whole: bool

    @property
    def off(self) -> int:
        """Tokens that the estimate was too high; negative when it was too low."""
        return self.predicted - self.actual

    @property
    def within_a_block(self) -> bool:
        """True when it is off by at most a block, the node's own where the engine's is smaller."""
        return -max(self.block, CANONICAL) <= self.off <= self.block

    @property
    def right(self) -> bool:
        """Rule 3."""
        if not self.whole:
            return self.off <= self.block
        return -CANONICAL < self.off <= 0 if self.block < CANONICAL else self.off == 0


@dataclass
class EstimateTally:
    """Every request that was compared, over the whole suite. `where` names the scenario that runs."""

    rows: list[Compared] = field(default_factory=list)
    where: str = ""

    def note(self, what: str, sidecar: LiveSidecar, predicted: int, actual: int, whole: bool = True) -> Compared:
        """Add one request that `sidecar`'s engine served."""
        shape = sidecar.engine.shape
        row = Compared(self.where, what, shape.label, predicted, actual, shape.block, whole)
        self.rows.append(row)
        return row

    def share_within(self, whole: bool = True) -> float:
        """Return the share of requests within one block of the prediction, of whole streams or of the others."""
        rows = [row for row in self.rows if row.whole is whole]
        return sum(row.within_a_block for row in rows) / len(rows) if rows else 1.0

    def text(self) -> list[str]:
        """Return a line for whole streams and one for the others, as far as there were any."""
        lines = []
        for whole, name in ((True, "whole streams"), (False, "lossy streams")):
            rows = [row for row in self.rows if row.whole is whole]
            if rows:
                exact = sum(row.right for row in rows) if whole else sum(row.off == 0 for row in rows)
                lines.append(
                    f"predicted against reported, {name}: {len(rows)} requests, "
                    f"{100 * self.share_within(whole):.2f} % within one block, {exact} exact, "
                    f"worst {max(0, *(r.off for r in rows))} tokens high and {-min(0, *(r.off for r in rows))} low"
                )
        return lines


def draw(rng: random.Random, count: int) -> list[int]:
    """Return `count` random tokens."""
    return rng.choices(TOKENS, k=count)


def probes_of(rng: random.Random, held: Iterable[Sequence[int]], salt: str = "") -> list[Probe]:
    """Return probes around prompts that the engine has seen under `salt`: whole, by half, longer, salted, and never."""
    probes = []
    for tokens in held:
        half = list(tokens[: len(tokens) // 2])
        probes += [
            Probe("held", list(tokens), salt),
            Probe("half held", half + draw(rng, 40), salt),
            Probe("continued", [*tokens, *draw(rng, 50)], salt),
            Probe("other salt", list(tokens), f"{salt}-other"),
        ]
    return [*probes, Probe("never seen", draw(rng, 300), salt)]


def assert_residency_is_true(
    tally: EstimateTally, sidecar: LiveSidecar, probes: Iterable[Probe], *, whole: bool = True
) -> list[Compared]:
    """Send the probes through `sidecar` to its engine; AssertionError lists those that were expected wrongly."""
    rows = [probed(tally, sidecar, probe, whole=whole) for probe in probes]
    wrong = [row for row in rows if not row.right]
    assert not wrong, f"{len(wrong)} of {len(rows)} estimates are wrong, the first: {wrong[:5]}"
    return rows


def probed(
    tally: EstimateTally,
    sidecar: LiveSidecar,
    probe: Probe,
    *,
    whole: bool = True,
    settle: Callable[[], None] | None = None,
) -> Compared:
    """Send one probe and note how it went, once all events are in, or what else `settle` waits for."""
    (settle or sidecar.settle)()
    answer = sidecar.ask(probe.tokens, salt=probe.salt, adapter=probe.adapter, here=True)
    return tally.note(probe.what, sidecar, *counted(answer), whole)


def counted(answer: SidecarAnswer) -> tuple[int, int]:
    """Return what was expected of a served request and what was reported; AssertionError when it was not served."""
    assert answer.status == 200, answer
    assert answer.cached >= 0, "the engine does not report cached tokens"
    return answer.matched, answer.cached
