"""This library's side of a comparison: a node that learnt the world by gossip, and one whose engine comes and goes."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from prefixroute_vllm import decode_batch

from comparison.contest import Run, calls
from comparison.floors import Floor, pure_hash
from comparison.worlds import BLOCK, CASES, DOMAIN, World, asker, endpoint_name
from prefixroute import Namespace, Node, Outcome, TokenChain
from prefixroute.keys.chain import ChainSpec, wire_key
from prefixroute.residency.tree import RadixTree
from prefixroute.routing.index import MergedIndex

NOW = 1e6
"""When prompts are routed: long after the world was learnt, so that nothing is fresh."""

SPEC = ChainSpec(BLOCK, DOMAIN.mix)
ROOT = DOMAIN.root_key(Namespace())


class Ours:
    """A node that knows the world. *match* is the search of its index, *decide* all of `Node.route`."""

    def __init__(self, world: World) -> None:
        self.node = asker(world)
        self.index: MergedIndex = self.node._table.index
        self.prompts: dict[str, dict[str, Sequence[Any]]] = {
            "list": dict(world.prompts),
            "buffer": {case: [array("I", tokens) for tokens in world.prompts[case]] for case in CASES},
            "prepared": {case: [self.node.chain(tokens) for tokens in world.prompts[case]] for case in CASES},
        }
        for case in CASES:
            for i in range(len(world.prompts[case])):
                if (depth := self.depth(case, i)) != world.depths[case]:
                    raise AssertionError(f"{case}: {depth} blocks are found of {world.depths[case]}")

    def depth(self, case: str, i: int) -> int:
        """Blocks that the best endpoint holds, by the decision's own candidates."""
        decision = self.node.route(self.prompts["list"][case][i], NOW)
        self.node.report(decision, Outcome.cancelled(), NOW)
        return max(candidate.depth for candidate in decision.candidates)

    def runs(self, what: str, case: str, form: str) -> dict[str, Run]:
        """Match or decide, from any form of prompt."""
        inputs = self.prompts[form][case]
        if what == "decide":
            return {"ours": self._deciding(inputs)}
        search, chain = self.index.search, self.node.chain
        if form == "prepared":
            return {"ours": calls(search, inputs)}
        return {"ours": calls(lambda tokens: search(chain(tokens)), inputs)}

    def _deciding(self, inputs: Sequence[Any]) -> Run:
        """Each prompt is cancelled before it comes again: else it would be expected at its target."""
        node, clock = self.node, time.perf_counter_ns

        def run(n: int) -> int:
            taken = 0
            for i in range(n):
                prompt = inputs[i % len(inputs)]
                start = clock()
                decision = node.route(prompt, NOW)
                taken += clock() - start
                node.report(decision, Outcome.cancelled(), NOW)
            return taken

        return run

    def close(self) -> None:
        """Nothing runs."""


class Floors:
    """The C floor, if it was built, with the same keys as a node's index; and the hashing that Python cannot spare."""

    def __init__(self, module: Any | None, world: World, ours: Ours) -> None:
        self._prompts = ours.prompts
        self._floor: Floor | None = None
        if module is None:
            return
        numbers = {endpoint_name(i): i for i in range(world.endpoints)}
        keys = {i: node_keys(prompts) for i, prompts in world.held.items()}
        floor = Floor(module, SPEC, ROOT, world.endpoints, sum(map(len, keys.values())))
        for i, held in keys.items():
            floor.hold(i, held)
        for case in CASES:
            for tokens in world.prompts[case]:
                if not floor.agrees(ours.index, TokenChain(SPEC, ROOT, tokens), tokens, numbers):
                    raise AssertionError(f"{case}: the floor and the index do not agree")
        self._floor = floor

    def runs(self, what: str, case: str, form: str) -> dict[str, Run]:
        """A match from tokens."""
        if what != "match" or form == "prepared":
            return {}
        inputs = self._prompts[form][case]
        found = {"python hash": calls(pure_hash(SPEC, ROOT), inputs)}
        return found if self._floor is None else {"floor": calls(self._floor.search, inputs), **found}


def node_keys(prompts: Sequence[list[int]]) -> set[int]:
    """The wire keys of all blocks of prompts."""
    chains = [TokenChain(SPEC, ROOT, tokens) for tokens in prompts]
    return {wire_key(chain.key(depth)) for chain in chains for depth in range(1, chain.depth + 1)}


class OursChurn:
    """A node whose engine's events come as bytes, as vLLM sends them; decoding and publication marks included."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._node = Node("n0", DOMAIN, rng=random.Random(1), now=0.0)
        self._endpoint = self._node.add_endpoint("0", incarnation=1, now=0.0)
        rng = random.Random(2)
        handles = [[rng.getrandbits(64) for _ in range(len(tokens) // BLOCK)] for tokens in prompts]
        self._stores = [_stored(tokens, names) for tokens, names in zip(prompts, handles, strict=True)]
        self._removals = [_removed(names) for names in handles]

    def store(self, i: int) -> None:
        """Take the batch that tells of a prompt's blocks."""
        self._node.apply(self._endpoint, decode_batch(self._stores[i]), 1.0)

    def remove(self, i: int) -> None:
        """Take the batch that tells that they are gone."""
        self._node.apply(self._endpoint, decode_batch(self._removals[i]), 1.0)


def _stored(tokens: Sequence[int], handles: Sequence[int]) -> bytes:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": handles,
        "parent_block_hash": None,
        "token_ids": tokens,
    }
    event |= {"block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None}
    return msgspec.msgpack.encode([1.5, [event], 0])


def _removed(handles: Sequence[int]) -> bytes:
    events = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"} for name in reversed(handles)]
    return msgspec.msgpack.encode([1.5, events, 0])


# --- memory ------------------------------------------------------------------------------------------------


def allocated(make: Callable[[], object]) -> int:
    """Return the bytes that Python's allocations of what `make` returns take."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        del kept
    finally:
        tracemalloc.stop()
    return used


def tree_bytes(prompts: int, blocks: int) -> float:
    """Bytes per block of the radix tree beside an engine, which holds the tokens as well."""
    rng = random.Random(3)
    packed = [rng.randbytes(blocks * BLOCK * 4) for _ in range(prompts)]

    def make() -> RadixTree:
        tree = RadixTree(SPEC)
        tree.plant(ROOT)
        for data in packed:
            tree.store(ROOT, 0, [data[at : at + BLOCK * 4] for at in range(0, len(data), BLOCK * 4)], "gpu")
        tree.take_changes()
        return tree

    return allocated(make) / (prompts * blocks)


def index_bytes(keys: int, endpoints: int) -> float:
    """Bytes per distinct key of the merged index, each held by one endpoint, without its mask's own."""
    per = keys // endpoints

    def make() -> MergedIndex:
        rng, index = random.Random(4), MergedIndex()
        for i in range(endpoints):
            index.join(endpoint_name(i))
            index.update(endpoint_name(i), (wire_key(rng.getrandbits(64)) for _ in range(per)), ())
        return index

    return allocated(make) / (per * endpoints)
