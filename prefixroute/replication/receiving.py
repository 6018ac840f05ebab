"""Updates arrive: judged by the acceptance table, decoded, put together, applied, and verified.

Rules:
1. Nothing is decoded before the table says that it applies, and nothing is kept beyond `max_keys` an endpoint.
2. A copy after a change has the checksum that its owner stated, or it is discarded.
3. What arrives never raises: it is counted, and an event tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..errors import DecodeError
from ..events import ReplicaChanged
from ..keys.keyset import NO_KEYS, KeyDelta, Keys
from ..keys.names import owner_of
from ..keys.rice import COUNT_BYTES
from .acceptance import Verdict, judge
from .assembly import Arrival, Assembly, decode_keys
from .copies import Copy
from .gossip_settings import GossipSettings
from .members import Members
from .tempo import Tempo
from .wire import KEY_LIMIT, Update
from .writer_set import Change

DENSE_KEYS = 256
"""So many keys may be as close together as they like: chance makes small ranges uneven."""

STALLED_S = 1.0
"""A transfer without a part for so long gives way to another one."""


class Receiver:
    """Takes updates into the copies of `members`. `reject(source, kind, reason)` tells what could not be used."""

    def __init__(
        self,
        members: Members,
        settings: GossipSettings,
        tempo: Tempo,
        emit: Callable[[ReplicaChanged], None],
        reject: Callable[[object, str, str], None],
        counters: Counter[str],
        on_update: Callable[[str, Keys, Keys], None],
    ) -> None:
        self._members = members
        self._max_keys = settings.max_keys
        self._per_key = KEY_LIMIT // settings.max_keys
        self._tempo = tempo
        self._emit = emit
        self._reject = reject
        self._counters = counters
        self._on_update = on_update

    def take(self, update: Update, teller: str, now: float) -> None:
        """Take one update that `teller` sent. O(its keys), and O(keys held) copied bytes when it completes a change.

        Each part is compared and summed up as it comes, so that the last one costs no more than the others.
        """
        copy = self._members.copies.get(update.endpoint)
        if copy is None or copy.mine:
            self._counters["updates_unasked"] += 1
            return
        if self._members.unbelievable(update.endpoint, update.incarnation, teller):
            self._counters["incarnations_unbelieved"] += 1
            return
        verdict = judge(copy.held, update.incarnation, update.since, update.version)
        self._counters[_COUNTERS[verdict]] += 1
        if verdict not in (Verdict.APPLY, Verdict.REPLACE):
            return
        if self._too_dense(update):
            self._reject_size(update)
            return
        held = copy.keys.keys if verdict is Verdict.APPLY else NO_KEYS
        try:
            delta = decode_keys(update, held)
        except DecodeError as error:
            self._reject(update.endpoint, error.kind, str(error))
            if verdict is Verdict.APPLY:
                # Ranks that fit no key here mean that this is not the set that the change was made from.
                self._members.discard(copy, now)
            return
        arrival = self._assemble(copy, update, delta, now)
        if arrival is not None:
            self._complete(copy, update, arrival, verdict, held, now)
        self._note(copy)

    def _complete(self, copy: Copy, update: Update, arrival: Arrival, verdict: Verdict, held: Keys, now: float) -> None:
        """Apply a change that has come whole, if there is room for what it leaves."""
        change = arrival.change
        n = len(held) + len(change.delta.added) - len(change.delta.removed)
        if n > self._max_keys or not self._members.holdings.fits(copy.endpoint, owner_of(copy.endpoint), n):
            self._reject_size(update)
            return
        copy.url, copy.contact = update.url or copy.url, update.contact or copy.contact
        # Of one life there is one zone, and only snapshots tell it.
        copy.zone = update.zone or (copy.zone if update.incarnation == copy.incarnation else "")
        self._members.learn_peer(owner_of(copy.endpoint), copy.contact, now)
        self._members.touched.add(copy.endpoint)
        self._tempo.stir(now)
        self._apply(copy, update.incarnation, arrival, verdict, now)

    def _reject_size(self, update: Update) -> None:
        reason = f"more than {self._max_keys} keys of one endpoint, or more than its owner or all may have"
        self._reject(update.endpoint, "too_many_keys", reason)

    def _too_dense(self, update: Update) -> bool:
        """Whether a range has more keys than the keys of a whole set of `max_keys` put there by chance.

        Keys are hashes: so a key of a large set takes three bytes and more, and the work of a datagram is bounded by
        its length. The densest code would hold two bits a key.
        """
        n = int.from_bytes(update.added[:COUNT_BYTES], "little")
        span = max(0, (update.upper or KEY_LIMIT) - update.lower)
        # A count that the code's length belies is refused by its decoder.
        return DENSE_KEYS + 2 * span // self._per_key < n <= 8 * len(update.added)

    def _note(self, copy: Copy) -> None:
        n = len(copy.keys) + (copy.assembly.size if copy.assembly is not None else 0)
        self._members.holdings.note(copy.endpoint, owner_of(copy.endpoint), n)

    def _assemble(self, copy: Copy, update: Update, delta: KeyDelta, now: float) -> Arrival | None:
        """Return the whole change if this part completes it. A transfer under way keeps its place until it stalls."""
        if update.whole:
            codes = [(update.added, update.removed)]
            versions = (update.since, update.version)
            return Arrival(Change(*versions, delta, update.checksum, update.anchor_stride, codes=codes))
        a = copy.assembly
        if a is not None and not a.is_of(update):
            if a.incarnation >= update.incarnation and now - a.touched_at < STALLED_S:
                self._counters["parts_of_another_transfer"] += 1
                return None
            a = None
        if a is None:
            a = Assembly(update, now)
        copy.assembly = a
        self._tempo.stir(now)
        arrival = a.offer(update.lower, update.upper or KEY_LIMIT, delta, now, copy.keys.keys)
        if arrival is not None:
            copy.assembly = None
        elif a.size > 2 * self._max_keys or not self._members.holdings.fits(
            copy.endpoint, owner_of(copy.endpoint), len(copy.keys) + a.size
        ):
            copy.assembly = None
            self._reject_size(update)
        return arrival

    def _apply(self, copy: Copy, incarnation: int, arrival: Arrival, verdict: Verdict, now: float) -> None:
        keys, before = copy.keys, copy.keys.keys
        change = arrival.change
        step = change.delta
        if verdict is Verdict.REPLACE:
            step = arrival.step_from(before)
        elif not keys.fits(step):
            self._members.discard(copy, now)
            return
        if verdict is Verdict.REPLACE and (incarnation != copy.incarnation or not keys.version):
            keys.replace(change.version, change.delta.added, change.anchor_stride, now, arrival.total)
            if incarnation != copy.incarnation:
                copy.incarnation, copy.heartbeat, copy.revision = incarnation, 0, 0
            self._emit(ReplicaChanged(copy.endpoint, "replaced"))
        else:
            # A snapshot of the same life is a step too: without it this node could pass on nothing but snapshots.
            codes = change.codes[0] if change.codes and verdict is Verdict.APPLY else None
            whole = change.delta.added if verdict is Verdict.REPLACE else None
            keys.advance(change.version, step, change.anchor_stride, now, codes, whole)
        a = copy.assembly
        if a is not None and (a.version <= change.version or a.since not in (0, change.version)):
            copy.assembly = None
        if copy.keys.checksum != change.checksum:
            # What the index has of it is what was held before.
            copy.keys.replace(copy.keys.version, before)
            self._members.discard(copy, now)
            return
        self._on_update(copy.endpoint, *step)


_COUNTERS = {verdict: f"updates_{verdict.value.replace(' ', '_')}" for verdict in Verdict}
