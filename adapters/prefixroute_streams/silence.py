"""Whether a stream should have brought something by now.

A prompt that leaves a long part uncached fills blocks, so its engine must tell of it. Where many such prompts were
served and nothing has come since, the engine does not publish, publishes elsewhere, or its stream broke off.

Rule: what counts is the time since the last message, not whether there ever was one: a publisher that dies takes its
events with it, while its engine goes on to answer.
"""

from __future__ import annotations

import math
from typing import Final

LONG_PROMPT_TOKENS: Final = 1024
"""Uncached tokens of a prompt that count: as many fill a block of nearly any engine (vllm.md: 16 to 128 tokens)."""

SILENT_AFTER: Final = 8
"""Long prompts without an event after which a stream counts as silent (dynamo#11984, smg#1652)."""


class Silence:
    """Counts the long prompts since a stream's last message, which came at `last_message_at` (its follower's clock)."""

    def __init__(self, after: int) -> None:
        self.last_message_at = -math.inf
        self._after = after
        self._served = 0

    def heard(self, now: float) -> None:
        """Note a message."""
        self.last_message_at = now
        self._served = 0

    def finished(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Note a prompt that the engine has answered, of which so many tokens were cached or held to be."""
        if prompt_tokens - cached_tokens >= LONG_PROMPT_TOKENS:
            self._served += 1

    @property
    def silent(self) -> bool:
        """Whether something should have come."""
        return self._served >= self._after
