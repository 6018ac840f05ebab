"""Why a decision was made: every term of every candidate, as a table or as plain values."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from ..policy.interface import Candidate
from .decision import Decision


class Explanation(NamedTuple):
    """A decision, term by term."""

    decision: Decision

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values; times in milliseconds."""
        d = self.decision
        return {
            "decision": d.id,
            "target": d.target,
            "local": d.local,
            "url": d.url,
            "reason": d.reason,
            "prompt_tokens": d.prompt_tokens,
            "matched_tokens": d.matched_tokens,
            "expected_ttft_ms": _ms(d.expected_ttft_s),
            "expected_saving_ms": _ms(d.expected_saving_s),
            "budget_ms": None if d.budget_s == inf else _ms(d.budget_s),
            "declined": d.declined,
            "fallbacks": list(d.fallbacks),
            "zone": d.zone,
            "candidates": [self._row(c) for c in d.candidates],
            "excluded": [self._row(c) for c in d.excluded],
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
            zone = f"  zone {c.zone}" if c.zone else ""
            if c.withheld is not None:
                zone = f"  {c.withheld.text(d.zone, c.zone)}"
            lines.append(
                f"{mark} {name:<24}{c.matched_tokens:>7}{c.confidence:>6.2f}{_ms(c.rtt_s):>8}{_ms(c.wait_s):>9}"
                f"{_ms(c.overhead_s):>8}{_ms(c.prefill_s):>9}{_ms(c.cost_s):>9}{_ms(c.delays_s):>8}"
                f"  {c.state.name.lower():<9}{_ms(c.age_s):>8}{'  expected' if c.predicted else ''}{zone}"
            )
        return "\n".join(lines)

    def _row(self, c: Candidate) -> dict[str, Any]:
        row: dict[str, Any] = {
            "endpoint": c.endpoint,
            "local": c.local,
            "matched_tokens": c.matched_tokens,
            "confidence": round(c.confidence, 3),
            "rtt_ms": _ms(c.rtt_s),
            "wait_ms": _ms(c.wait_s),
            "overhead_ms": _ms(c.overhead_s),
            "prefill_ms": _ms(c.prefill_s),
            "cost_ms": _ms(c.cost_s),
            "push_back": c.state.name.lower(),
            "age_ms": _ms(c.age_s),
            "queued": c.queued,
            "expected": c.predicted,
            "evicted_tokens": round(c.evicted_tokens),
            "delays_ms": _ms(c.delays_s),
            "zone": c.zone,
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
