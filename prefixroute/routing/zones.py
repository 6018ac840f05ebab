"""Zones: nodes that lie beside each other have one label, and rules say what may be forwarded from zone to zone.

Rules:
1. The sender's rule decides, by the pair (its own zone, the target's zone). Of several that fit, the first of (a, b),
   (a, "*"), ("*", b), ("*", "*") is taken; if none does: always.
2. Within a zone it is always, unless a rule names that zone twice.
3. A zone that is not known may be any: the strictest rule that this node has for any zone applies. That goes for an
   endpoint whose first snapshot has not come, and for a node that has no label.

| rule | an endpoint there is |
|---|---|
| always | a candidate like any other |
| above a saving | a candidate if it saves so much against the best without such a rule; else the last fallback |
| never | no candidate, no fallback, no last resort |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from ..errors import UsageError
from ..events import Journal
from ..keys.names import ANY, checked_zone

FORWARDS = ("always", "above", "never")
"""Words for `ZoneRule.forward`."""

MAX_COUNTED = 32
"""Zones whose forwards are counted apart: labels come from others, and a counter is kept for ever."""

MAX_KEPT = 256
"""Labels for which the answer is kept."""


@dataclass(frozen=True, slots=True)
class ZoneRule:
    """Whether to forward: ``always``, ``never``, or ``above`` an expected saving of `saving_s` seconds.

    Raises `UsageError` for another word, and for a saving that does not go with it.
    """

    forward: str = "always"
    saving_s: float = 0.0

    def __post_init__(self) -> None:
        if self.forward not in FORWARDS:
            raise UsageError(f"a zone rule is one of {', '.join(FORWARDS)}, not {self.forward!r}")
        if self.forward == "above" and not 0 < self.saving_s < inf:
            raise UsageError(f"a zone rule above a saving needs saving_s > 0, not {self.saving_s!r}")
        if self.forward != "above" and self.saving_s:
            raise UsageError(f"a zone rule {self.forward!r} takes no saving: say 'above'")

    @property
    def needs_s(self) -> float:
        """Seconds that a forward has to save: 0.0 for always, infinite for never."""
        return inf if self.forward == "never" else self.saving_s


@dataclass(frozen=True, slots=True)
class Zones:
    """Rules by ordered pair of zones, (from, to); `ANY` stands for any zone. Without a rule: always.

    Raises `UsageError` for what is no pair of labels.
    """

    rules: Mapping[tuple[str, str], ZoneRule] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", dict(self.rules))
        for pair in self.rules:
            if len(pair) != 2:
                raise UsageError(f"a zone rule is for a pair of zones, not {pair!r}")
            for label in pair:
                if label != ANY:
                    checked_zone(label)
                if not label:
                    raise UsageError(f'a zone rule names two zones, "{ANY}" for any: a zone that is not known is any')

    def __bool__(self) -> bool:
        return bool(self.rules)

    def rule(self, source: str, to: str) -> ZoneRule:
        """Return the rule for a forward from `source` to `to`. O(1); O(rules) where `to` is not known."""
        if to in ("", ANY):
            named = {b for _, b in self.rules} - {ANY, source}
            own = self.rules.get((source, source), _ALWAYS)
            rules = (own, self._among(source, ANY), *(self._among(source, b) for b in named))
            return max(rules, key=lambda rule: rule.needs_s)
        if source == to:
            return self.rules.get((source, to), _ALWAYS)
        return self._among(source, to)

    def _among(self, source: str, to: str) -> ZoneRule:
        """The rule between two different zones."""
        pairs = ((source, to), (source, ANY), (ANY, to), (ANY, ANY))
        return next((self.rules[pair] for pair in pairs if pair in self.rules), _ALWAYS)


class Gate:
    """The rules for a node of one zone, looked up by the target's zone; what they do is counted."""

    def __init__(self, zone: str, zones: Zones, journal: Journal) -> None:
        self.zone = zone
        self._zones = zones
        self._journal = journal
        self._needs: dict[str, float] = {}
        self._counted: set[str] = set()

    def needs_s(self, to: str) -> float:
        """Return the seconds that a forward to a zone has to save; infinite: never. O(1)."""
        needs = self._needs.get(to)
        if needs is None:
            if len(self._needs) >= MAX_KEPT:
                self._needs.clear()
            needs = self._needs[to] = self._zones.rule(self.zone, to).needs_s
        return needs

    def forwarded(self, to: str) -> None:
        """Count an attempt that goes to a zone."""
        self._journal.count("zone_forwards", self._label(to))

    def withheld(self, rule: str, to: str) -> None:
        """Count a prompt that might have been quicker in a zone to which it does not go."""
        self._journal.count(f"zone_withheld_{rule}", self._label(to))

    def _label(self, to: str) -> str:
        if len(self._counted) < MAX_COUNTED:
            self._counted.add(to)
        return to if to in self._counted else ANY


_ALWAYS = ZoneRule()
