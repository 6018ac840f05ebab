"""The acceptance table which says which change applies to which copy.

An endpoint's set is written by its owner only, so the pair (incarnation, version) orders all its states. The pair of a
copy only grows, in lexicographic order. So every loss, repetition, reordering and restart is one question: does this
change apply to the pair that the copy has? The table answers it, and the result is the same for every order of arrival.

| incarnation | reach | snapshot | delta |
|---|---|---|---|
| nothing | any | replace | want a snapshot |
| older | any | drop | drop |
| newer | any | replace | want a snapshot |
| same | past | duplicate | duplicate |
| same | next | replace | apply |
| same | overlap | replace | want the delta since mine |
| same | ahead | replace | want the delta since mine |

*incarnation* compares the arriving one with the copy's. *reach* compares the change's versions, from and to, with the
copy's version v: past, to <= v; next, from = v; overlap, from < v < to; ahead, from > v. After a change the checksums
are compared; when they differ the copy is discarded, and a snapshot is wanted.
"""

from __future__ import annotations

from enum import Enum

_SNAPSHOT, _DELTA = True, False


class Order(Enum):
    """How the arriving incarnation compares with the copy's."""

    NOTHING = "nothing"
    OLDER = "older"
    SAME = "same"
    NEWER = "newer"


class Reach(Enum):
    """How a change's versions compare with the copy's."""

    PAST = "past"
    NEXT = "next"
    OVERLAP = "overlap"
    AHEAD = "ahead"


class Verdict(Enum):
    """What becomes of a change. All of them are normal; those that are not applied are only counted."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    APPLY = "apply"
    REPLACE = "replace"
    WANT_DELTA = "want delta"
    WANT_SNAPSHOT = "want snapshot"


TABLE: dict[tuple[Order, Reach | None, bool], Verdict] = {
    (Order.NOTHING, None, _SNAPSHOT): Verdict.REPLACE,
    (Order.NOTHING, None, _DELTA): Verdict.WANT_SNAPSHOT,
    (Order.OLDER, None, _SNAPSHOT): Verdict.DROP,
    (Order.OLDER, None, _DELTA): Verdict.DROP,
    (Order.NEWER, None, _SNAPSHOT): Verdict.REPLACE,
    (Order.NEWER, None, _DELTA): Verdict.WANT_SNAPSHOT,
    (Order.SAME, Reach.PAST, _SNAPSHOT): Verdict.DUPLICATE,
    (Order.SAME, Reach.PAST, _DELTA): Verdict.DUPLICATE,
    (Order.SAME, Reach.NEXT, _SNAPSHOT): Verdict.REPLACE,
    (Order.SAME, Reach.NEXT, _DELTA): Verdict.APPLY,
    (Order.SAME, Reach.OVERLAP, _SNAPSHOT): Verdict.REPLACE,
    (Order.SAME, Reach.OVERLAP, _DELTA): Verdict.WANT_DELTA,
    (Order.SAME, Reach.AHEAD, _SNAPSHOT): Verdict.REPLACE,
    (Order.SAME, Reach.AHEAD, _DELTA): Verdict.WANT_DELTA,
}


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
