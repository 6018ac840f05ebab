"""``prefixroute plan SUBJECT``: what can be planned."""

from __future__ import annotations

from prefixroute.subjects import Subject, Subjects

_SUBJECTS = (
    Subject("place", "which server should hold which blocks of a model that fits none of them", "place_command"),
    Subject("prefill", "which prompts a faster cluster should prefill, and how to divide the nodes", "prefill_command"),
)

SUBJECTS = Subjects("prefixroute.plan", _SUBJECTS)
