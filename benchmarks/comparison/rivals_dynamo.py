"""NVIDIA Dynamo from Python: its selection service, fed as by vLLM engines over loopback, and its bare radix tree.

Rules:
1. The service learns prompts from ZeroMQ publishers, one a worker that holds any, and is waited for.
2. Prepared hashes are what `select` takes beside tokens: those of the blocks, and chained ones.
3. The tree takes events as JSON. They are encoded outside the timers; the hashes of a stored prompt's blocks, which
   its publisher would make, are inside.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import struct
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from comparison.contest import Run, calls
from comparison.worlds import BLOCK, CASES, World

SCOPE = {"model_name": "m", "routing_group": "default"}
CHAIN_SEED = 1337
READY_S = 120.0


def _llm() -> Any:
    os.environ.setdefault("DYN_LOG", "error")
    return importlib.import_module("dynamo.llm")


def chained(local: Sequence[int]) -> list[int]:
    """Return the chained hashes of blocks, given each block's own."""
    chain: list[int] = []
    for value in local:
        chain.append(xxh3_64_intdigest(struct.pack("<QQ", chain[-1], value), CHAIN_SEED) if chain else value)
    return chain


def _signed(hashes: Sequence[int]) -> list[int]:
    return [value - (1 << 64) if value >> 63 else value for value in hashes]


# --- the service -------------------------------------------------------------------------------------------


class Service:
    """`SelectionService` with a worker for each endpoint."""

    def __init__(self, world: World) -> None:
        self._llm, zmq = _llm(), importlib.import_module("zmq")
        self._ids = itertools.count()
        self._loop = _loop()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._zmq = zmq
        self._service = self._llm.SelectionService(indexer_threads=2)
        self._requests: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for case in CASES:
            lists = world.prompts[case]
            self._requests[case, "list"] = [{**SCOPE, "token_ids": tokens} for tokens in lists]
            self._requests[case, "buffer"] = [{**SCOPE, "token_ids": array("I", tokens)} for tokens in lists]
            self._requests[case, "prepared"] = [self._hashed(tokens) for tokens in lists]
        try:
            self._loop.run_until_complete(self._learn(world))
        except BaseException:
            self.close()
            raise

    def _hashed(self, tokens: list[int]) -> dict[str, Any]:
        local = self._llm.compute_block_hash_for_seq(tokens, BLOCK)
        hashes = {"block_hashes": _signed(local), "sequence_hashes": _signed(chained(local))}
        return {**SCOPE, **hashes, "isl_tokens": len(tokens)}

    async def _learn(self, world: World) -> None:
        sockets = {}
        for i in range(world.endpoints):
            worker = {**SCOPE, "worker_id": i + 1, "endpoint": "http://127.0.0.1:9", "block_size": BLOCK}
            worker |= {"data_parallel_start_rank": 0, "data_parallel_size": 1, "max_num_batched_tokens": 8192}
            worker |= {"total_kv_blocks": 1_000_000}
            if world.held[i]:
                sockets[i] = self._context.socket(self._zmq.PUB)
                port = sockets[i].bind_to_random_port("tcp://127.0.0.1")
                worker["kv_events_endpoints"] = {0: f"tcp://127.0.0.1:{port}"}
            await self._service.upsert_worker(worker)
        # Publishers do not keep what nobody hears: all must be subscribed to first, which nothing tells.
        await asyncio.sleep(1.5 + world.endpoints / 400)
        for i, socket in sockets.items():
            events = [
                ["BlockStored", _signed(chained(self._llm.compute_block_hash_for_seq(t, BLOCK))), None, t, BLOCK, None]
                for t in world.held[i]
                if len(t) >= BLOCK
            ]
            batch = msgspec.msgpack.encode([time.time(), events, 0])
            socket.send_multipart([b"", struct.pack(">q", 0), batch])
            await asyncio.sleep(0)
        until = time.monotonic() + READY_S
        for i, prompts in world.held.items():
            while prompts and (await self._blocks(prompts[-1])).get(i + 1, 0) < len(prompts[-1]) // BLOCK:
                if time.monotonic() > until:
                    raise TimeoutError(f"worker {i + 1}: its events do not show in the index")
                await asyncio.sleep(0.01)

    async def _blocks(self, tokens: list[int]) -> dict[int, int]:
        reply = await self._service.overlap_scores({**SCOPE, "token_ids": tokens})
        return {worker["worker_id"]: worker["device_blocks"] for worker in reply["workers"]}

    def depth(self, case: str, i: int) -> int:
        """Blocks that the best worker holds."""
        tokens = self._requests[case, "list"][i]["token_ids"]
        return max(self._loop.run_until_complete(self._blocks(tokens)).values(), default=0)

    def runs(self, what: str, case: str, form: str) -> dict[str, Run]:
        """Its `select` of any form, and reserving as well."""
        if what != "decide":
            return {}
        requests = self._requests[case, form]
        return {
            "dynamo select": self._awaited(self._service.select, requests),
            "dynamo select, reserve": self._reserving(requests),
        }

    def _awaited(self, call: Callable[[Any], Awaitable[Any]], inputs: Sequence[Any]) -> Run:
        async def several(n: int) -> int:
            start = time.perf_counter_ns()
            for i in range(n):
                await call(inputs[i % len(inputs)])
            return time.perf_counter_ns() - start

        return lambda n: self._loop.run_until_complete(several(n))

    def _reserving(self, requests: Sequence[dict[str, Any]]) -> Run:
        async def several(n: int) -> int:
            taken = 0
            for i in range(n):
                name = f"s{next(self._ids)}"
                request = {**requests[i % len(requests)], "selection_id": name}
                start = time.perf_counter_ns()
                await self._service.select_and_reserve(request)
                taken += time.perf_counter_ns() - start
                await self._service.free_reservation(name)
            return taken

        return lambda n: self._loop.run_until_complete(several(n))

    def close(self) -> None:
        """Stop the service and its publishers."""
        self._service.shutdown()
        self._context.destroy(0)
        self._loop.close()


def _loop() -> asyncio.AbstractEventLoop:
    try:
        loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    return loop


# --- the tree ----------------------------------------------------------------------------------------------


def _event(number: int, data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}, separators=(",", ":")).encode()


def _stored(number: int, local: Sequence[int]) -> bytes:
    blocks = [{"block_hash": e, "tokens_hash": t} for e, t in zip(chained(local), local, strict=True)]
    return _event(number, {"stored": {"parent_hash": None, "blocks": blocks}})


class Tree:
    """`RadixTree` and the block hash that goes with it."""

    def __init__(self, world: World) -> None:
        llm = _llm()
        self._hash: Callable[[Any, int], list[int]] = llm.compute_block_hash_for_seq
        self._tree = llm.RadixTree()
        numbers = itertools.count(1)
        for i, prompts in world.held.items():
            for tokens in prompts:
                if len(tokens) >= BLOCK:
                    self._tree.apply_event(i, _stored(next(numbers), self._hash(tokens, BLOCK)))
        self._lists = world.prompts
        self._buffers = {case: [array("I", t) for t in world.prompts[case]] for case in CASES}
        self._hashes = {case: [self._hash(t, BLOCK) for t in world.prompts[case]] for case in CASES}

    def depth(self, case: str, i: int) -> int:
        """Blocks that the best worker holds."""
        return max(self._tree.find_matches(self._hashes[case][i]).scores.values(), default=0)

    def runs(self, what: str, case: str, form: str) -> dict[str, Run]:
        """A match: the hashes, unless they are prepared, then the tree."""
        if what != "match":
            return {}
        find, hashed = self._tree.find_matches, self._hash
        if form == "prepared":
            return {"dynamo tree": calls(find, self._hashes[case])}
        inputs: Sequence[Any] = self._lists[case] if form == "list" else self._buffers[case]
        return {"dynamo tree": calls(lambda tokens: find(hashed(tokens, BLOCK)), inputs)}

    def close(self) -> None:
        """Nothing runs."""


class TreeChurn:
    """The tree, and prompts that come and go."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        llm = _llm()
        self._hash = llm.compute_block_hash_for_seq
        self._tree = llm.RadixTree()
        self._prompts = prompts
        local = [self._hash(tokens, BLOCK) for tokens in prompts]
        self._stores = [_stored(2 * i, one) for i, one in enumerate(local)]
        self._removals = [
            _event(2 * i + 1, {"removed": {"block_hashes": chained(one)[::-1]}}) for i, one in enumerate(local)
        ]

    def store(self, i: int) -> None:
        """Hash a prompt's blocks, and take the event that tells of them."""
        self._hash(self._prompts[i], BLOCK)
        self._tree.apply_event(0, self._stores[i])

    def remove(self, i: int) -> None:
        """Take the event that a prompt's blocks are gone."""
        self._tree.apply_event(0, self._removals[i])
