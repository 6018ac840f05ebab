"""Which prefixes are shared most, and how skewed the sharing is.

Rules:
1. A prefix ends where a request's match ended, at the deepest block that an earlier request had. Where many matches
   end, the requests share a text: a system prompt, a document, the head of a conversation.
2. At most `limit` prefixes are followed. The prefix that saves least is replaced by a new one, which takes over its
   count as error (space-saving; Metwally et al., ICDT 2005); so the top prefixes are never missed.
3. Texts are kept only when the user asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

FOLLOWED = 2048
"""The most prefixes that are followed."""

EXCERPT = 160
"""Characters that are shown of a text's beginning, and of its end."""

_T95 = 1.96


class Followed:
    """A prefix: how many requests began with it, how many ended their match there, and where it came first."""

    __slots__ = ("ended", "error", "first", "parent", "requests", "text", "tokens")

    def __init__(self, tokens: int, requests: int, error: int, parent: int | None, first: str, text: str) -> None:
        self.tokens = tokens
        self.requests = requests
        self.ended = 1
        self.error = error
        self.parent = parent
        self.first = first
        self.text = text

    @property
    def saved_tokens(self) -> int:
        """Tokens that this prefix saves in an unbounded cache."""
        return self.tokens * (self.requests - 1)


class TopPrefixes:
    """The prefixes that save most tokens in a stream of matches. Memory O(limit)."""

    def __init__(self, limit: int = FOLLOWED) -> None:
        self.limit = limit
        self._followed: dict[int, Followed] = {}

    def add(self, keys: Sequence[int], matched: int, block_tokens: int, first: str, text: str = "") -> None:
        """Note a request whose first `matched` blocks, with the text `text`, an earlier request had."""
        followed = self._followed
        parent = None
        if followed:
            # This loop goes over all keys of a log, so it runs in C.
            for key in filter(followed.__contains__, keys):
                followed[key].requests += 1
                parent = key
        if not matched:
            return
        key = keys[matched - 1]
        if key in followed:
            followed[key].ended += 1
            return
        error = self._make_room() if len(followed) >= self.limit else 0
        if parent is not None and parent not in followed:
            parent = None
        shown = text if len(text) <= 2 * EXCERPT else f"{text[:EXCERPT]} [...] {text[-EXCERPT:]}"
        shown = shown.encode("utf-8", "replace").decode()
        # The request that had the prefix first counts as well: there are two by now.
        followed[key] = Followed(matched * block_tokens, 2 + error, error, parent, first, shown)

    def _make_room(self) -> int:
        """Drop the tenth of the prefixes that saves least; return the largest request count among them."""
        order = sorted(self._followed, key=lambda key: self._followed[key].requests)
        error = 0
        for key in order[: max(1, self.limit // 10)]:
            error = self._followed.pop(key).requests
        return error

    def top(self, n: int) -> list[Followed]:
        """Return up to `n` prefixes by saved tokens, without those of which a longer one has 0.9 of the requests."""
        order = sorted(self._followed.values(), key=lambda one: (-one.saved_tokens, one.first))
        covered = {
            id(self._followed[one.parent])
            for one in order
            if one.parent in self._followed and one.requests >= 0.9 * self._followed[one.parent].requests
        }
        return [one for one in order if id(one) not in covered and one.requests > one.error + 1][:n]

    def ends(self) -> list[int]:
        """Return by prefix how many requests' matches ended there, the first request included."""
        return [one.ended + 1 for one in self._followed.values()]


class Zipf(NamedTuple):
    """A fitted exponent with its 95 % interval, and how many prefixes and requests it is fitted to."""

    exponent: float
    low: float
    high: float
    prefixes: int
    requests: int


def fit_zipf(counts: Sequence[int]) -> Zipf | None:
    """Fit the exponent s of shares k ** -s to counts by rank, by maximum likelihood; None for fewer than three ranks.

    The interval covers only the chance of the sample, not how well a power law describes the counts. O(n) a step.
    """
    ordered = np.sort(np.asarray(counts, dtype=float))[::-1]
    n, total = len(ordered), float(ordered.sum())
    if n < 3 or total <= n:
        return None
    logs = np.log(np.arange(1, n + 1))
    wanted = float((ordered * logs).sum()) / total
    low, high = -1.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        if _moments(logs, middle)[0] > wanted:
            low = middle
        else:
            high = middle
    exponent = (low + high) / 2
    half = _T95 / sqrt(max(total * _moments(logs, exponent)[1], 1e-12))
    return Zipf(max(exponent, 0.0), max(exponent - half, 0.0), exponent + half, n, int(total))


def _moments(logs: np.ndarray[tuple[int], np.dtype[np.float64]], exponent: float) -> tuple[float, float]:
    """Return mean and variance of the logarithm of the rank."""
    weights = np.exp(-exponent * logs)
    weights /= weights.sum()
    mean = float((weights * logs).sum())
    return mean, float((weights * (logs - mean) ** 2).sum())
