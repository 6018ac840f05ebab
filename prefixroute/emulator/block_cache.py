"""The emulated engine's prefix cache: vLLM's block pool, block for block, without any tensor.

Rules:
1. A block is full or it is not cached. A hit is a run of full blocks from the root within the first n - 1
   tokens of a prompt of n: the last token is always computed, so that there is something to sample from.
2. Nothing is deduplicated. A block that is computed although an equal one is cached becomes a second copy
   with the same digest; each copy is stored once and removed once.
3. Blocks of running sequences cannot be evicted. A finished sequence gives back its tail first, so children
   are evicted before their parents. Eviction happens when a block is taken, never before: least recently
   given back first, and free blocks that hold nothing before any that do.
4. Room is reserved at admission for the whole sequence, and taken block by block. So no running sequence ever
   waits for a block or is preempted; a sequence that does not fit yet is not admitted.

A block's digest covers its parent's digest, its tokens, the adapter's name in every block and the cache salt
in the first. It is this emulator's own and says nothing about the hashes of any other engine.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixroute.emulator.vllm_wire import (
    FULL_ATTENTION,
    GPU_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    wire_handle,
)
from prefixroute.errors import UsageError
from prefixroute.events import Handle


class CacheScope(NamedTuple):
    """The properties that separate equal prompts in the cache: an adapter (name and number), and a cache salt."""

    lora_name: str | None = None
    lora_id: int | None = None
    salt: str | None = None


NO_SCOPE = CacheScope()
"""The model itself, unsalted."""


class CacheStats(NamedTuple):
    """Counts of one moment: blocks, and prompt tokens looked up and found since the start."""

    capacity: int
    in_use: int
    cached: int
    queried_tokens: int
    hit_tokens: int


@dataclass(eq=False, slots=True)
class Lease:
    """The blocks of one running sequence. Made by `BlockCache.admit`, ended by `BlockCache.release`."""

    scope: CacheScope
    tokens: array[int]
    total_blocks: int
    cached_tokens: int
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    filled: int = 0
    released: bool = False


def _packed(tokens: Sequence[int]) -> array[int]:
    try:
        return array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise UsageError(f"token ids must be ints of 0 to 2**32 - 1: {error}") from None


class BlockCache:
    """An exact prefix cache of `capacity` blocks of `block_size` tokens.

    Every operation costs time in proportion to the blocks that it touches, whatever the capacity. Without `caching`
    blocks are used and forgotten.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int = 16,
        *,
        hash_seed: str = "",
        int_hashes: bool = True,
        caching: bool = True,
    ) -> None:
        if capacity < 1 or block_size < 1:
            raise UsageError(f"capacity and block size must be at least 1, not {capacity} blocks of {block_size}")
        self.capacity = capacity
        self.block_size = block_size
        self.resets = 0
        self._int_hashes = int_hashes
        self._caching = caching
        self._root = hashlib.sha256(b"prefixroute emulator\0" + hash_seed.encode()).digest()
        self._references = [0] * capacity
        self._digest_of: list[bytes | None] = [None] * capacity
        self._empty = list(range(capacity - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._copies: dict[bytes, dict[int, None]] = {}
        self._promised = 0
        self._leases: set[Lease] = set()
        self._events: list[CacheEvent] = []
        self._queried_tokens = 0
        self._hit_tokens = 0

    # --- life of a sequence --------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def admit(self, prompt: Sequence[int], scope: CacheScope = NO_SCOPE, *, decode_tokens: int = 0) -> Lease | None:
        """Start a sequence: find its cached prefix, hold it, and reserve room for the rest.

        `decode_tokens` are the tokens that will be computed after the prompt. None means that there is no
        room now; try again after a release. Raises UsageError when it could never fit.
        """
        if not len(prompt):
            raise UsageError("a prompt needs at least one token")
        total = self.blocks_for(len(prompt) + decode_tokens)
        if total > self.capacity:
            raise UsageError(f"the sequence needs {total} blocks, the cache has {self.capacity}")
        lease = Lease(scope, _packed(prompt), total, 0)
        hit = self._longest_hit(lease)
        idle_hits = sum(not self._references[block] for block in hit)
        if self._free_blocks - idle_hits - self._promised < total - len(hit):
            return None
        for block in hit:
            self._evictable.pop(block, None)
            self._references[block] += 1
        lease.blocks = hit
        lease.filled = len(hit)
        lease.cached_tokens = len(hit) * self.block_size
        self._promised += total - len(hit)
        self._leases.add(lease)
        self._queried_tokens += len(prompt)
        self._hit_tokens += lease.cached_tokens
        return lease

    def grow(self, lease: Lease, tokens: int) -> None:
        """Take the blocks that the sequence's first `tokens` tokens need, before they are computed."""
        wanted = self.blocks_for(tokens)
        if lease.released or wanted > lease.total_blocks:
            raise UsageError(f"{wanted} blocks were not promised to this sequence")
        while len(lease.blocks) < wanted:
            lease.blocks.append(self._take_block())
            self._promised -= 1

    def append(self, lease: Lease, token: int) -> None:
        """Add a generated token to the sequence."""
        lease.tokens.append(token)

    def fill(self, lease: Lease, computed: int) -> None:
        """Note that the first `computed` tokens are computed, and cache every block that is now full."""
        full = computed // self.block_size
        if lease.released or full > len(lease.blocks) or computed > len(lease.tokens):
            raise UsageError("a sequence can only fill blocks that it has grown to")
        first = lease.filled
        if full <= first or not self._caching:
            return
        self._extend_digests(lease, full)
        for index in range(first, full):
            block, digest = lease.blocks[index], lease.digests[index]
            self._digest_of[block] = digest
            self._copies.setdefault(digest, {})[block] = None
        lease.filled = full
        self._events.append(self._stored(lease, first, full))

    def release(self, lease: Lease) -> None:
        """End the sequence; what it cached stays until its room is needed. Ending it twice is harmless."""
        if lease.released:
            return
        lease.released = True
        self._leases.remove(lease)
        self._promised -= lease.total_blocks - len(lease.blocks)
        for block in reversed(lease.blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._digest_of[block] is None:
                self._empty.append(block)
            else:
                self._evictable[block] = None

    # --- the whole cache -----------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget every cached block; refused, with False, while a sequence holds one."""
        if self._free_blocks != self.capacity:
            return False
        self._empty.extend(self._evictable)
        self._evictable.clear()
        self._copies.clear()
        self._digest_of = [None] * self.capacity
        self._events.append(AllBlocksCleared())
        self.resets += 1
        return True

    def take_events(self) -> list[CacheEvent]:
        """Every event since the last call, in the order in which things happened."""
        events, self._events = self._events, []
        return events

    def stats(self) -> CacheStats:
        """Counts of this moment."""
        cached = sum(len(copies) for copies in self._copies.values())
        in_use = self.capacity - self._free_blocks
        return CacheStats(self.capacity, in_use, cached, self._queried_tokens, self._hit_tokens)

    def usage(self) -> float:
        """Share of the blocks that running sequences hold; blocks that are merely cached count as free."""
        return (self.capacity - self._free_blocks) / self.capacity

    def contents(self) -> Counter[Handle]:
        """The true content: how many copies of each handle are cached."""
        return Counter({wire_handle(digest, self._int_hashes): len(copies) for digest, copies in self._copies.items()})

    def match(self, prompt: Sequence[int], scope: CacheScope = NO_SCOPE) -> int:
        """Tokens of this prompt that a sequence admitted now would find cached; nothing changes."""
        return len(self._longest_hit(Lease(scope, _packed(prompt), 0, 0))) * self.block_size

    # --- inside --------------------------------------------------------------------------------------------

    @property
    def _free_blocks(self) -> int:
        return len(self._empty) + len(self._evictable)

    def _longest_hit(self, lease: Lease) -> list[int]:
        hit: list[int] = []
        for index in range(max(0, len(lease.tokens) - 1) // self.block_size):
            self._extend_digests(lease, index + 1)
            copies = self._copies.get(lease.digests[index])
            if not copies:
                break
            hit.append(next(iter(copies)))
        return hit

    def _take_block(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            digest = self._digest_of[block]
            assert digest is not None
            self._digest_of[block] = None
            copies = self._copies[digest]
            del copies[block]
            if not copies:
                del self._copies[digest]
            handle = wire_handle(digest, self._int_hashes)
            self._events.append(BlockRemoved((handle,), GPU_MEDIUM, group_idx=0))
        self._references[block] = 1
        return block

    def _extend_digests(self, lease: Lease, count: int) -> None:
        for index in range(len(lease.digests), count):
            parent = lease.digests[index - 1] if index else self._root
            span = lease.tokens[index * self.block_size : (index + 1) * self.block_size]
            state = hashlib.sha256(parent)
            for key in self._extra_keys(lease.scope, index):
                raw = key.encode("utf-8", "surrogatepass")
                state.update(len(raw).to_bytes(4, "little") + raw)
            # The marker ends the keys: without it a key could be mistaken for tokens.
            state.update(b"\xff\xff\xff\xff")
            state.update(span.tobytes())
            lease.digests.append(state.digest())

    @staticmethod
    def _extra_keys(scope: CacheScope, index: int) -> tuple[str, ...]:
        salt = scope.salt if index == 0 else None
        return tuple(key for key in (scope.lora_name, salt) if key is not None)

    def _stored(self, lease: Lease, first: int, full: int) -> BlockStored:
        handles = tuple(wire_handle(digest, self._int_hashes) for digest in lease.digests[first:full])
        parent = wire_handle(lease.digests[first - 1], self._int_hashes) if first else None
        return BlockStored(
            block_hashes=handles,
            parent_block_hash=parent,
            token_ids=tuple(lease.tokens[first * self.block_size : full * self.block_size]),
            block_size=self.block_size,
            lora_id=lease.scope.lora_id,
            medium=GPU_MEDIUM,
            lora_name=lease.scope.lora_name,
            extra_keys=tuple(self._extra_keys(lease.scope, index) or None for index in range(first, full)),
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

    def _check(self) -> None:
        """Every invariant, O(capacity + held blocks). For tests."""
        held = Counter(block for lease in self._leases for block in lease.blocks)
        assert self._references == [held[block] for block in range(self.capacity)]
        free = [*self._empty, *self._evictable]
        assert sorted(free) == [block for block in range(self.capacity) if not held[block]]
        assert all(self._digest_of[block] is None for block in self._empty)
        assert all(self._digest_of[block] is not None for block in self._evictable)
        assert all(self._copies.values())
        listed = {block: digest for digest, copies in self._copies.items() for block in copies}
        assert listed == {b: digest for b, digest in enumerate(self._digest_of) if digest is not None}
        assert sum(map(len, self._copies.values())) == len(listed)
        promised = sum(lease.total_blocks - len(lease.blocks) for lease in self._leases)
        assert promised == self._promised <= self._free_blocks
        for lease in self._leases:
            assert lease.filled <= len(lease.blocks) <= lease.total_blocks
            filled = lease.blocks[: lease.filled]
            assert [self._digest_of[block] for block in filled] == lease.digests[: lease.filled]
            assert all(self._digest_of[block] is None for block in lease.blocks[lease.filled :])
            assert len(set(lease.blocks)) == len(lease.blocks)
