"""What is wrong with a stream, by what it has brought: one sentence each, for a log and for a doctor.

| seen in `FollowerStats` | means |
|---|---|
| `silent` | the engine answers, and nothing of it comes |
| `mixed` of `MIXED_FROM` and more | several engines under one topic on one bound socket |
| `foreign_topics` | other engines publish there too: what they send is dropped |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

MIXED_FROM: Final = 3
"""Restarts beside a second publisher that prove a mixture. One comes of an engine whose host died and came back: its
old connection lives on until its heartbeats are missed."""

_TOPICS_NAMED: Final = 4


class Trouble(NamedTuple):
    """What is wrong with a stream and what to change; `kind` is one word. `harmless` ones lose nothing."""

    kind: str
    what: str
    change: str
    harmless: bool = False


def troubles(stats: Mapping[str, Any]) -> list[Trouble]:
    """Return what a stream's `FollowerStats`, as a mapping, show to be wrong; O(foreign topics)."""
    found = []
    if stats.get("silent"):
        what = "the engine has served many long prompts since its last cache event"
        found.append(Trouble("silent", what, "look whether its events are on, and go to this endpoint"))
    if stats.get("mixed", 0) >= MIXED_FROM:
        what = f"{stats.get('publishers', 0)} engines publish to one socket under one topic, and their events get mixed"
        found.append(Trouble("mixed", what, "give every engine a topic or a socket of its own"))
    topics = stats.get("foreign_topics") or {}
    if topics:
        named = ", ".join(f"{topic!r} ({topics[topic]})" for topic in sorted(topics)[:_TOPICS_NAMED])
        what = f"messages of other topics come too and are dropped: {named}"
        found.append(Trouble("foreign topics", what, "name the engine's whole topic if its own is among them", True))
    return found
