"""Two prefix trees in Python: gorgo-lb's, and the one of Ray Serve LLM's prefix-aware router.

Rules:
1. Of Ray's wheel one file is loaded, with stand-ins for what it imports of Ray: all of Ray would bring an engine along.
2. Ray's tree holds text. A token is four characters, so that a block of 16 tokens is 64.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.contest import Run, calls
from comparison.worlds import BLOCK, CASES, World, endpoint_name

CHARACTERS = 4
"""Of a token."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SOURCE = "llm/_internal/serve/routing_policies/prefix_aware/prefix_tree.py"


class Gorgo:
    """Its trie, and its own policy over it: every endpoint idle and equally near."""

    def __init__(self, world: World) -> None:
        gorgo = importlib.import_module("gorgo")
        self._trie = gorgo.RadixTrie()
        self._names = [endpoint_name(i) for i in range(world.endpoints)]
        for i, prompts in world.held.items():
            for tokens in prompts:
                self._trie.insert(tokens, self._names[i])
        self._inputs: dict[str, dict[str, Sequence[Any]]] = {
            "list": dict(world.prompts),
            "buffer": {case: [array("I", tokens) for tokens in world.prompts[case]] for case in CASES},
        }
        idle = {"num_running_reqs": 0, "num_queue_reqs": 0, "num_used_tokens": 0, "latency": 0.001}
        metrics = {name: gorgo.ReplicaSnapshot(**idle, network_rtt=0.001) for name in self._names}
        nothing = dict.fromkeys(self._names, 0)
        store, policy, context = gorgo.make_default_store(), gorgo.get_policy("gorgo").fn, gorgo.RouteContext

        def decide(tokens: Any) -> Any:
            n = len(tokens)
            return policy(context(self._names, metrics, nothing, nothing, nothing, self._trie, tokens, n, store))

        self._decide = decide

    def depth(self, case: str, i: int) -> int:
        """Blocks that the best endpoint holds."""
        lengths = self._trie.cached_prefix_lengths(self._inputs["list"][case][i], self._names)
        return int(max(lengths.values())) // BLOCK

    def runs(self, what: str, case: str, form: str) -> dict[str, Run]:
        """Match and decide, from tokens."""
        if form not in self._inputs:
            return {}
        if what == "decide":
            return {"gorgo": calls(self._decide, self._inputs[form][case])}
        lengths, names = self._trie.cached_prefix_lengths, self._names
        return {"gorgo": calls(lambda tokens: lengths(tokens, names), self._inputs[form][case])}

    def close(self) -> None:
        """Nothing runs."""


class GorgoChurn:
    """The trie, and prompts that come. What one endpoint alone evicts cannot be told to it."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._trie = importlib.import_module("gorgo").RadixTrie()
        self._prompts = prompts

    def store(self, i: int) -> None:
        """Insert a prompt."""
        self._trie.insert(self._prompts[i], "n0/0")


def _prefix_tree() -> Any:
    """Load the tree's class out of the installed wheel."""
    found = importlib.util.find_spec("ray")
    if found is None or not found.submodule_search_locations:
        raise ImportError("ray is not installed")
    ray = types.ModuleType("ray")
    ray.remote = lambda cls: cls  # type: ignore[attr-defined]
    constants = types.ModuleType("ray.serve._private.constants")
    constants.SERVE_LOGGER_NAME = "ray.serve"  # type: ignore[attr-defined]
    stand_ins = {"ray": ray, "ray.serve": types.ModuleType("ray.serve"), constants.__name__: constants}
    stand_ins["ray.serve._private"] = types.ModuleType("ray.serve._private")
    source = Path(next(iter(found.submodule_search_locations))) / _SOURCE
    spec = importlib.util.spec_from_file_location("ray_prefix_tree", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in (*stand_ins, spec.name)}
    sys.modules.update(stand_ins | {spec.name: module})
    try:
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module.PrefixTree()


def text(tokens: Sequence[int]) -> str:
    """Write tokens as characters, four each."""
    d, n = _DIGITS, len(_DIGITS)
    return "".join(d[t % n] + d[t // n % n] + d[t // n**2 % n] + d[t // n**3 % n] for t in tokens)


class Ray:
    """The tree of characters."""

    def __init__(self, world: World) -> None:
        self._tree, clock = _prefix_tree(), itertools.count(1)
        self._names = [endpoint_name(i) for i in range(world.endpoints)]
        self._tree.add_tenants(self._names, 0)
        for i, prompts in world.held.items():
            for tokens in prompts:
                if tokens:
                    self._tree.insert(text(tokens), self._names[i], next(clock))
        self._texts = {case: [text(tokens) for tokens in world.prompts[case]] for case in CASES}

    def depth(self, case: str, i: int) -> int:
        """Blocks of text that were matched."""
        return len(self._tree.prefix_match(self._texts[case][i], self._names)[0]) // (BLOCK * CHARACTERS)

    def runs(self, what: str, case: str, form: str) -> dict[str, Run]:
        """A match of text, which stands beside that of a list."""
        if what != "match" or form != "list":
            return {}
        match, names = self._tree.prefix_match, self._names
        return {"ray": calls(lambda prompt: match(prompt, names), self._texts[case])}

    def close(self) -> None:
        """Nothing runs."""


class RayChurn:
    """The tree of characters, and prompts that come and go."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._tree, self._clock = _prefix_tree(), itertools.count(1)
        self._tree.add_tenants(["n0/0"], 0)
        self._texts = [text(tokens) for tokens in prompts]

    def store(self, i: int) -> None:
        """Insert a prompt's text."""
        self._tree.insert(self._texts[i], "n0/0", next(self._clock))

    def remove(self, i: int) -> None:
        """Evict what was used least recently: prompts go in the order in which they came."""
        self._tree.evict_tenant_by_lru("n0/0", len(self._texts[i]))
