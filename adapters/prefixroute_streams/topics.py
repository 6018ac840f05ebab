"""Which messages of a socket are this stream's, by their whole topic.

ZeroMQ filters by the first bytes of a topic, so who asks for ``kv@n1`` is sent ``kv@n10@m`` too (kthena#1527).

| topic | wanted "" | wanted "kv@n1" | wanted "kv@n1@m" |
|---|---|---|---|
| ``kv@n1@m``, first | taken, and fixed | taken, and fixed | taken |
| ``kv@n1@x``, after it | foreign | foreign | foreign |
| ``kv@n10@m`` | foreign | foreign | foreign |

Rules:
1. A wanted topic stands for itself, and for what continues it after one of `SEPARATORS`.
2. One engine publishes under one topic: the first that is taken is the stream's, until its publisher is gone.
3. What is foreign is counted by topic. The topics are the other side's, so only `MOST_TOPICS` are told apart.
"""

from __future__ import annotations

from typing import Final

SEPARATORS: Final = frozenset(b"@/:")
"""What ends a name within a topic: llm-d's are ``kv@POD@MODEL``, and a pod may carry a port."""

MOST_TOPICS: Final = 64

OTHER: Final = "other"
"""What foreign topics beyond `MOST_TOPICS` are counted as."""


class TopicFilter:
    """Tells one stream's messages from others on the same socket. `foreign` counts the others by topic."""

    def __init__(self, wanted: str) -> None:
        self.foreign: dict[str, int] = {}
        self._wanted = wanted.encode()
        self._taken: bytes | None = None

    def admits(self, topic: bytes) -> bool:
        """Whether a message with this topic is the stream's; one that is not is counted. O(1)."""
        if self._taken is None and matches(self._wanted, topic):
            self._taken = topic
        if topic == self._taken:
            return True
        name = topic.decode("utf-8", "backslashreplace")
        if name not in self.foreign and len(self.foreign) >= MOST_TOPICS:
            name = OTHER
        self.foreign[name] = self.foreign.get(name, 0) + 1
        return False

    def forget(self) -> None:
        """Take the next topic that matches: another publisher comes, perhaps with another one."""
        self._taken = None


def matches(wanted: bytes, topic: bytes) -> bool:
    """Whether a topic is the wanted one, or continues it after a separator (rule 1)."""
    if not topic.startswith(wanted):
        return False
    rest = topic[len(wanted) :]
    return not wanted or not rest or rest[0] in SEPARATORS or wanted[-1] in SEPARATORS
