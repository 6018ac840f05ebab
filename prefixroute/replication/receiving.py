"""Updates arrive: judged by the acceptance table, decoded, put together, applied, and verified.

An endpoint's set is written by its owner only, so the pair (incarnation, version) orders all its states. The pair of a
copy only grows, in lexicographic order. So every loss, repetition, reordering and restart is one question: does this
change apply to the pair that the copy has? `TABLE` answers it, and the result is the same for every order of arrival.

Rules:
1. No update is decoded before the table says that it applies, and no more than `max_keys` are kept of an endpoint.
2. A copy after a change has the checksum that its owner stated, or it is discarded.
"""

from __future__ import annotations

from enum import Enum

from ..errors import DecodeError
from ..events import Journal, ReplicaChanged
from ..keys.keyset import NO_KEYS, KeyDelta, Keys
from ..keys.rice import COUNT_BYTES
from .copies import Copy
from .gossip_settings import GossipSettings
from .limits import Refusals
from .members import Members
from .peers import Tempo
from .transfer import Arrival, Assembly, decode_keys
from .wire import KEY_LIMIT, Update
from .writer_set import Change

DENSE_KEYS = 256
"""So many keys may lie as close together as they like: chance makes small ranges uneven."""

STALLED_S = 1.0
"""A transfer without a new part for so long gives way to another one."""


class Order(Enum):
    """How the arriving incarnation compares with the copy's."""

    NOTHING = "nothing"
    OLDER = "older"
    SAME = "same"
    NEWER = "newer"


class Reach(Enum):
    """How the versions of a change, from and to, compare with the copy's version v."""

    PAST = "past"  # to <= v
    NEXT = "next"  # from = v
    OVERLAP = "overlap"  # from < v < to
    AHEAD = "ahead"  # from > v


class Verdict(Enum):
    """What becomes of a change. All of them are normal; those that are not applied are only counted."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    APPLY = "apply"
    REPLACE = "replace"
    WANT_DELTA = "want_delta"
    WANT_SNAPSHOT = "want_snapshot"


_ROWS = (
    # The incarnation, the reach, and what becomes of a snapshot and of a delta.
    (Order.NOTHING, None, Verdict.REPLACE, Verdict.WANT_SNAPSHOT),
    (Order.OLDER, None, Verdict.DROP, Verdict.DROP),
    (Order.NEWER, None, Verdict.REPLACE, Verdict.WANT_SNAPSHOT),
    (Order.SAME, Reach.PAST, Verdict.DUPLICATE, Verdict.DUPLICATE),
    (Order.SAME, Reach.NEXT, Verdict.REPLACE, Verdict.APPLY),
    (Order.SAME, Reach.OVERLAP, Verdict.REPLACE, Verdict.WANT_DELTA),
    (Order.SAME, Reach.AHEAD, Verdict.REPLACE, Verdict.WANT_DELTA),
)

TABLE: dict[tuple[Order, Reach | None, bool], Verdict] = {
    (order, reach, snapshot): verdict
    for order, reach, of_snapshot, of_delta in _ROWS
    for snapshot, verdict in ((True, of_snapshot), (False, of_delta))
}
"""The acceptance table by (incarnation, reach, whether it is a snapshot); docs/wire.md shows it, too."""


def judge(held: tuple[int, int], incarnation: int, since: int, version: int) -> Verdict:
    """Look a change up in the table. `held` is (incarnation, version), (0, 0) for nothing; `since` 0 is a snapshot."""
    held_incarnation, held_version = held
    snapshot = since == 0
    if held_incarnation == 0:
        return TABLE[Order.NOTHING, None, snapshot]
    if incarnation != held_incarnation:
        return TABLE[Order.OLDER if incarnation < held_incarnation else Order.NEWER, None, snapshot]
    if version <= held_version:
        reach = Reach.PAST
    elif since == held_version:
        reach = Reach.NEXT
    else:
        reach = Reach.OVERLAP if since < held_version else Reach.AHEAD
    return TABLE[Order.SAME, reach, snapshot]


class Receiver:
    """Takes updates into the copies of `members`: from bytes to a verified set."""

    def __init__(
        self, members: Members, settings: GossipSettings, tempo: Tempo, refusals: Refusals, journal: Journal
    ) -> None:
        self._members = members
        self._max_keys = settings.max_keys
        self._per_key = KEY_LIMIT // settings.max_keys
        self._tempo = tempo
        self._refusals = refusals
        self._journal = journal

    def take(self, update: Update, teller: str, now: float) -> None:
        """Take one update that `teller` sent. O(its keys), and O(keys held) copied bytes when it completes a change.

        Each part is compared and summed up as it comes, so that the last one costs no more than the others.
        """
        copy = self._members.copies.get(update.endpoint)
        if copy is None or copy.mine:
            self._journal.count("updates", "unasked")
            return
        if not self._members.believes(update.endpoint, update.incarnation, teller):
            return
        verdict = judge(copy.held, update.incarnation, update.since, update.version)
        self._journal.count("updates", verdict.value)
        if verdict not in (Verdict.APPLY, Verdict.REPLACE):
            return
        if self._too_dense(update):
            self._refuse_size(update, now)
            return
        base = copy.keys.keys if verdict is Verdict.APPLY else NO_KEYS
        try:
            delta = decode_keys(update, base)
        except DecodeError as error:
            self._refusals.refuse(update.endpoint, error.kind, str(error), now)
            if verdict is Verdict.APPLY:
                # Ranks that fit no key here mean that this is not the set that the change was made from.
                self._members.discard(copy, now)
            return
        arrival = self._assemble(copy, update, delta, now)
        if arrival is not None:
            self._complete(copy, update, arrival, verdict, base, now)
        under_way = copy.assembly.size if copy.assembly is not None else 0
        self._members.holdings.note(copy.endpoint, len(copy.keys) + under_way)

    def _too_dense(self, update: Update) -> bool:
        """Whether a range has more keys than the keys of a whole set of `max_keys` put there by chance.

        Keys are hashes: so a key of a large set takes three bytes and more, and the work of a datagram is bounded by
        its length. The densest code would hold two bits a key.
        """
        n = int.from_bytes(update.added[:COUNT_BYTES], "little")
        span = max(0, (update.upper or KEY_LIMIT) - update.lower)
        # A count that the code's length belies is refused by its decoder.
        return DENSE_KEYS + 2 * span // self._per_key < n <= 8 * len(update.added)

    def _assemble(self, copy: Copy, update: Update, delta: KeyDelta, now: float) -> Arrival | None:
        """Return the whole change if this part completes it. A transfer under way keeps its place until it stalls."""
        if update.whole:
            codes = [(update.added, update.removed)]
            stated = (update.checksum, update.anchor_stride)
            return Arrival(Change(update.since, update.version, delta, *stated, codes=codes))
        a = copy.assembly
        if a is None or not a.is_of(update):
            if a is not None and a.incarnation >= update.incarnation and now - a.touched_at < STALLED_S:
                self._journal.count("parts_of_another_transfer")
                return None
            a = copy.assembly = Assembly(update, now)
        self._tempo.stir(now)
        arrival = a.offer(update.lower, update.upper or KEY_LIMIT, delta, now, copy.keys.keys)
        if arrival is not None:
            copy.assembly = None
        elif a.size > 2 * self._max_keys or not self._members.holdings.fits(copy.endpoint, len(copy.keys) + a.size):
            copy.assembly = None
            self._refuse_size(update, now)
        return arrival

    def _complete(self, copy: Copy, update: Update, arrival: Arrival, verdict: Verdict, base: Keys, now: float) -> None:
        """Bring a copy to the version of a change that has arrived whole, if there is room for it, and verify it."""
        change, step = arrival.change, arrival.change.delta
        n = len(base) + len(step.added) - len(step.removed)
        if n > self._max_keys or not self._members.holdings.fits(copy.endpoint, n):
            self._refuse_size(update, now)
            return
        self._members.placed(copy, update, now)
        keys, before, incarnation = copy.keys, copy.keys.keys, update.incarnation
        if verdict is Verdict.REPLACE:
            step = arrival.step if arrival.step is not None else KeyDelta.between(before, step.added)
        elif not keys.fits(step):
            self._members.discard(copy, now)
            return
        if verdict is Verdict.REPLACE and (incarnation != copy.incarnation or not keys.version):
            keys.replace(change.version, change.delta.added, change.anchor_stride, now, arrival.total)
            if incarnation != copy.incarnation:
                copy.incarnation, copy.heartbeat, copy.revision = incarnation, 0, 0
            self._journal.tell(ReplicaChanged(copy.endpoint, "replaced"))
        else:
            # A snapshot of the same incarnation is a step too: without it this node could pass on snapshots only.
            codes = change.codes[0] if change.codes and verdict is Verdict.APPLY else None
            whole = change.delta.added if verdict is Verdict.REPLACE else None
            keys.advance(change.version, step, change.anchor_stride, now, codes, whole)
        a = copy.assembly
        if a is not None and (a.version <= change.version or a.since not in (0, change.version)):
            copy.assembly = None
        if keys.checksum != change.checksum:
            # The index still has the keys from before: that is what goes.
            keys.replace(keys.version, before)
            self._members.discard(copy, now)
            return
        self._members.on_update(copy.endpoint, *step)

    def _refuse_size(self, update: Update, now: float) -> None:
        reason = f"more than {self._max_keys} keys of one endpoint, or more than its owner or all may have"
        self._refusals.refuse(update.endpoint, "too_many_keys", reason, now)
