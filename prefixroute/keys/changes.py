"""Net changes of a set of keys: what came and what went since somebody last looked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Changes(NamedTuple):
    """Keys that entered a set and keys that left it, net: a key that came and went again is in neither."""

    added: set[int]
    removed: set[int]

    def gain(self, key: int) -> None:
        """Note that `key` entered the set."""
        if key in self.removed:
            self.removed.remove(key)
        else:
            self.added.add(key)

    def lose(self, key: int) -> None:
        """Note that `key` left the set."""
        if key in self.added:
            self.added.remove(key)
        else:
            self.removed.add(key)

    def gain_all(self, keys: Iterable[int]) -> None:
        """Note that `keys`, each once, entered the set."""
        if not self.removed:
            self.added.update(keys)
            return
        entered = set(keys)
        back = entered & self.removed
        self.removed.difference_update(back)
        self.added.update(entered - back)

    def lose_all(self, keys: Iterable[int]) -> None:
        """Note that `keys`, each once, left the set."""
        if not self.added:
            self.removed.update(keys)
            return
        left = set(keys)
        back = left & self.added
        self.added.difference_update(back)
        self.removed.update(left - back)
