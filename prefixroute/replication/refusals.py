"""What a node refuses: every refusal is counted by kind, and told by an event at a bounded pace.

Rules:
1. Refusals are counted all, and told `TOLD_AT_ONCE` one by one, then one a second, however many there are.
2. A peer of another domain is told of by the field that differs, once in `MISMATCH_TOLD_S` for each source and field:
   a mismatch would otherwise be a cache that silently never hits.
"""

from __future__ import annotations

from collections.abc import Hashable

from cachetools import LRUCache

from ..events import DatagramRejected, DomainMismatch, Journal
from ..keys.domain import Domain
from .limits import Bucket
from .wire import Message

TOLD_AT_ONCE = 64
"""Refusals that are told one by one; from then on one a second."""

MISMATCH_TOLD_S = 60.0
"""The same mismatch of one source is told once in so long."""

MAX_MISMATCHES = 256
"""Mismatches (source, field) that are remembered."""


class Refusals:
    """Counts and tells the refusals of one node. O(1) a call."""

    __slots__ = ("_domain", "_journal", "_mismatches", "_pace")

    def __init__(self, domain: Domain, journal: Journal) -> None:
        self._domain = domain
        self._journal = journal
        self._pace = Bucket(1.0, TOLD_AT_ONCE)
        self._mismatches: LRUCache[tuple[Hashable, str], float] = LRUCache(MAX_MISMATCHES)
        """When each was last told."""

    def refuse(self, source: object, kind: str, reason: str, now: float) -> None:
        """Count that something from `source`, an address or an endpoint, is of no use."""
        self._journal.count("rejected", kind)
        if self._pace.take(1, now):
            self._journal.tell(DatagramRejected(source, kind, reason))

    def foreign(self, source: Hashable, message: Message, now: float) -> None:
        """Count a datagram of another domain, and tell which fields differ; just that, if its fields are not known."""
        self._journal.count("rejected", "domain")
        theirs = message.domain or {}
        if not theirs:
            self._mismatch(source, message, "fingerprint", self._domain.fingerprint.hex(), "unknown", now)
            return
        for field, ours in self._domain.fields().items():
            other = theirs.get(field)
            if other is not None and other != ours:
                self._mismatch(source, message, field, ours, other, now)

    def _mismatch(self, source: Hashable, message: Message, field: str, ours: str, theirs: str, now: float) -> None:
        told = self._mismatches.get((source, field))
        if told is None or now - told > MISMATCH_TOLD_S:
            self._mismatches[source, field] = now
            self._journal.count("domain_mismatch", field)
            self._journal.tell(DomainMismatch(source, message.sender, field, ours, theirs))
