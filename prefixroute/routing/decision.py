"""What `Node.route` returns and what the caller reports back: plain data.

Rules:
1. A decision keeps every candidate that was weighed, so that it can explain itself later: every term of each, as a
   table or as plain values.
2. An outcome is reported once for each attempt. What follows from each kind is in `flights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from ..errors import UsageError, expect, is_number
from ..load import LoadReport
from ..policy.interface import Candidate

FORWARDED = "forwarded here"
"""Reason of a decision for what another node sent."""


class OutcomeKind(Enum):
    """How an attempt ended."""

    SERVED = "served"
    REFUSED = "refused"
    DECLINED = "declined"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended; make it with one of the class methods.

    `cached_tokens` is the engine's own count, `ttft_s` the time to first token in seconds as the caller saw it, `load`
    what the server's reply said of its load. `read_cache` is False where the engine did not look the prompt up in its
    cache, as for `echo` or log probabilities of the prompt, or where that is not known: then count and time are
    compared with nothing. Raises `UsageError` for numbers that cannot be.
    """

    kind: OutcomeKind
    reason: str = ""
    cached_tokens: int | None = None
    ttft_s: float | None = None
    load: LoadReport | None = None
    read_cache: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.kind, OutcomeKind):
            raise UsageError(f"an outcome's kind must be an OutcomeKind, as Outcome.failed() has it, not {self.kind!r}")
        cached, ttft_s = self.cached_tokens, self.ttft_s
        if cached is not None and not (is_number(cached) and 0 <= cached < 2**63):
            raise UsageError(f"cached_tokens must be a number of tokens, or None, not {self.cached_tokens!r}")
        if ttft_s is not None and not (is_number(ttft_s) and 0 <= ttft_s < inf):
            raise UsageError(f"ttft_s must be seconds since the request was sent, or None, not {self.ttft_s!r}")
        if not isinstance(self.reason, str):
            raise UsageError(f"an outcome's reason is a text, not {self.reason!r:.60}")
        if self.load is not None:
            expect(self.load, LoadReport, "an outcome's load")

    @classmethod
    def served(
        cls,
        cached_tokens: int | None = None,
        ttft_s: float | None = None,
        load: LoadReport | None = None,
        *,
        read_cache: bool = True,
    ) -> Outcome:
        """The request was answered."""
        return cls(OutcomeKind.SERVED, "", cached_tokens, ttft_s, load, read_cache)

    @property
    def counted_tokens(self) -> int | None:
        """The engine's count where it says what the cache held; None where there is nothing to compare."""
        return self.cached_tokens if self.read_cache else None

    @classmethod
    def refused(cls, reason: str = "", load: LoadReport | None = None) -> Outcome:
        """The target turned the request away (503)."""
        return cls(OutcomeKind.REFUSED, reason, load=load)

    @classmethod
    def declined(cls, load: LoadReport | None = None, cached_tokens: int | None = None) -> Outcome:
        """The target handed the prompt back, over the budget; `cached_tokens` is what it holds of it."""
        return cls(OutcomeKind.DECLINED, "", cached_tokens, None, load)

    @classmethod
    def failed(cls, reason: str = "") -> Outcome:
        """The target could not be reached, or broke off."""
        return cls(OutcomeKind.FAILED, reason)

    @classmethod
    def timed_out(cls, reason: str = "") -> Outcome:
        """The target did not answer in time; counts as a failure."""
        return cls(OutcomeKind.TIMED_OUT, reason)

    @classmethod
    def cancelled(cls) -> Outcome:
        """The client went away; says nothing about the target."""
        return cls(OutcomeKind.CANCELLED)


class Decision(NamedTuple):
    """Where a prompt goes. `target` and `fallbacks`, in order, are endpoints; `url` is the target's service address.

    `matched_tokens` and `expected_ttft_s` (seconds) are those of the target. `expected_saving_s` is against serving the
    prompt at the origin, 0.0 when that is what is done or not possible. `candidates` are all that were weighed.
    `budget_s` goes with a forward: a target that expects to need more hands the prompt back, and its own decision is
    `declined`: nothing is booked, and nothing is to be served. `zone` is the origin's label. `excluded` is the endpoint
    that holds more of the prompt than any candidate does, in a zone to which nothing is forwarded. `masks` say who
    could be chosen and who was offered, in bits that only the node can read: `Node.explain` does.
    """

    id: int
    target: str
    local: bool
    url: str
    fallbacks: tuple[str, ...]
    prompt_tokens: int
    matched_tokens: int
    expected_ttft_s: float
    expected_saving_s: float
    reason: str
    candidates: tuple[Candidate, ...]
    budget_s: float = inf
    declined: bool = False
    zone: str = ""
    excluded: tuple[Candidate, ...] = ()
    masks: tuple[int, int] = (-1, -1)

    def candidate(self, endpoint: str) -> Candidate | None:
        """Return what an endpoint was weighed at; None if it was not. O(candidates), a handful."""
        return next((weighed for weighed in self.candidates if weighed.endpoint == endpoint), None)


def decided(
    ticket: int,
    best: Candidate,
    url: str,
    fallbacks: tuple[str, ...],
    origin_s: float,
    reason: str,
    candidates: tuple[Candidate, ...],
    budget_s: float,
    zone: str,
    excluded: tuple[Candidate, ...],
    masks: tuple[int, int],
) -> Decision:
    """Make the decision for `best`; `origin_s` is the least cost of another candidate that is local, else infinite."""
    local, cost_s = best.local, best.cost_s
    saving_s = 0.0 if local or not cost_s < origin_s < inf else origin_s - cost_s
    # In the order of the fields, without the constructor of named tuples, which takes twice as long.
    return tuple.__new__(
        Decision,
        (
            ticket,
            best.endpoint,
            local,
            url,
            fallbacks,
            best.prompt_tokens,
            best.matched_tokens,
            cost_s,
            saving_s,
            reason,
            candidates,
            inf if local else budget_s,
            False,  # declined
            zone,
            excluded,
            masks,
        ),
    )


_AS_THEY_ARE = ("target", "local", "url", "reason", "prompt_tokens", "matched_tokens")


class Veto(NamedTuple):
    """An endpoint that could not be chosen, and why: "suspended: ...", "refusing: ...", "overloaded", "not offered"."""

    endpoint: str
    why: str


SHOWN_VETOES = 16
"""Of them so many have a line in the text of an explanation."""


class Explanation(NamedTuple):
    """A decision, term by term, and the endpoints that were `vetoed`."""

    decision: Decision
    vetoed: tuple[Veto, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values; times in milliseconds."""
        d = self.decision
        return {
            "decision": d.id,
            **{name: getattr(d, name) for name in _AS_THEY_ARE},
            "expected_ttft_ms": _ms(d.expected_ttft_s),
            "expected_saving_ms": _ms(d.expected_saving_s),
            "budget_ms": None if d.budget_s == inf else _ms(d.budget_s),
            "declined": d.declined,
            "fallbacks": list(d.fallbacks),
            "zone": d.zone,
            "candidates": [self._row(c) for c in d.candidates],
            "excluded": [self._row(c) for c in d.excluded],
            "vetoed": [veto._asdict() for veto in self.vetoed],
        }

    def text(self) -> str:
        """Return a table for people; times in milliseconds, the chosen candidate marked."""
        d = self.decision
        lines = [
            f"{d.prompt_tokens} tokens -> {d.target} ({d.reason}); {d.matched_tokens} cached there, "
            f"first token in {_ms(d.expected_ttft_s)} ms, saves {_ms(d.expected_saving_s)} ms",
            f"  {'endpoint':<24}{'match':>7}{'conf':>6}{'rtt':>8}{'wait':>9}{'fixed':>8}{'prefill':>9}{'cost':>9}"
            f"{'delays':>8}  push-back   age",
        ]
        for c in (*d.candidates, *d.excluded):
            mark = "*" if c.endpoint == d.target else " "
            name = c.endpoint + (" (local)" if c.local else "")
            zone = f"  home {c.home:.2f}" if c.home else ""
            zone += f"  zone {c.zone}" if c.zone else ""
            if c.withheld is not None:
                zone = f"  {c.withheld.text(d.zone, c.zone)}"
            lines.append(
                f"{mark} {name:<24}{c.matched_tokens:>7}{c.confidence:>6.2f}{_ms(c.rtt_s):>8}{_ms(c.wait_s):>9}"
                f"{_ms(c.overhead_s):>8}{_ms(c.prefill_s):>9}{_ms(c.cost_s):>9}{_ms(c.delays_s):>8}"
                f"  {c.state.name.lower():<9}{_ms(c.age_s):>8}{'  expected' if c.predicted else ''}{zone}"
            )
        lines += [f"- {veto.endpoint:<24}  {veto.why}" for veto in self.vetoed[:SHOWN_VETOES]]
        if len(self.vetoed) > SHOWN_VETOES:
            lines.append(f"- and {len(self.vetoed) - SHOWN_VETOES} more")
        return "\n".join(lines)

    def _row(self, c: Candidate) -> dict[str, Any]:
        row: dict[str, Any] = {
            "endpoint": c.endpoint,
            "local": c.local,
            "matched_tokens": c.matched_tokens,
            "confidence": round(c.confidence, 3),
            **{f"{term}_ms": _ms(getattr(c, f"{term}_s")) for term in ("rtt", "wait", "overhead", "prefill", "cost")},
            "push_back": c.state.name.lower(),
            "age_ms": _ms(c.age_s),
            "queued": c.queued,
            "expected": c.predicted,
            "evicted_tokens": round(c.evicted_tokens),
            "delays_ms": _ms(c.delays_s),
            "zone": c.zone,
            "home": round(c.home, 3),
            "demand": round(c.demand, 3),
        }
        if c.withheld is not None:
            needs_s, saves_s = c.withheld
            row["withheld"] = {
                "why": c.withheld.text(self.decision.zone, c.zone),
                "needs_ms": None if needs_s == inf else _ms(needs_s),
                "saves_ms": _ms(saves_s),
            }
        return row


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
