"""The strided chain: 64-bit keys of a prompt's prefixes, in the form a search asks for and in streaming form.

Definition (S = 32 blocks, one canonical block = `block_tokens` tokens as u32 little-endian):

    b(d)   = S * ((d - 1) // S)                                the last multiple of S below d
    key(0) = root key of the namespace
    key(d) = xxh3_64(blocks b(d)+1 .. d, seed = key(b(d)) ^ mix)

Rules:
1. One definition, two forms that agree bit for bit: `TokenChain` hashes only the depths that are asked for,
   `ChainCursor` streams block by block and can start at any depth.
2. A block in which content items (images, audio) start is followed by a 32-byte digest of each, in order. No
   token sequence imitates one: eight ids of a real vocabulary (< 2**20) hit given 32 bytes with chance 2**-96.
   Keys are chained, so blocks that an item overlaps further on carry its id as well.
3. What travels is the upper 48 bits (`wire_key`): sorting full keys sorts wire keys.

S = 32 costs at most 2 KiB of hashing a probe, about 0.15 us, and 111 ns a block when streaming; 16 and 64 were
within noise of it for searches.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from ..errors import UsageError
from ..events import DEFAULT_NAMESPACE, ContentSpan, Namespace
from .chain_memo import SPAN, ChainMemo

STRIDE = 32
ANCHOR_STRIDES = (1, 2, 4, 8, 16, 32)
"""Powers of two that divide the chain's stride, so that of any two strides the larger one's anchors are both's."""

WIRE_BITS = 48
TOKEN_BYTES = 4
TOKEN_LIMIT = 2**32


class ChainSpec(NamedTuple):
    """What the chain's arithmetic needs of a domain: block length in tokens, and the secret's 64-bit mix."""

    block_tokens: int
    mix: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's packed tokens."""
        return self.block_tokens * TOKEN_BYTES


def wire_key(key: int) -> int:
    """Return the 48 bits of `key` that travel and that the index holds."""
    return key >> 16


def reusable_depth(n_tokens: int, unit_tokens: int, block_tokens: int) -> int:
    """Return how many blocks of a prompt an engine keeps if it keeps whole units only; `unit_tokens` 0 is a block."""
    return (n_tokens - n_tokens % (unit_tokens or block_tokens)) // block_tokens


def content_digest(content_id: str, offset: int) -> bytes:
    """Return the 32 bytes that stand in the chain for an item starting `offset` tokens into its block."""
    return blake2b(
        content_id.encode("utf-8", "surrogatepass"), digest_size=32, salt=offset.to_bytes(8, "little")
    ).digest()


def block_extras(contents: Iterable[ContentSpan], block_tokens: int) -> dict[int, bytes]:
    """Return block index -> digests of the items that start in it, in order of start, then id."""
    extras: dict[int, bytes] = {}
    for item in sorted(contents, key=lambda item: (item.start, item.content_id)):
        block, offset = divmod(item.start, block_tokens)
        extras[block] = extras.get(block, b"") + content_digest(item.content_id, offset)
    return extras


def pack_tokens(tokens: Any) -> bytes:
    """Pack token ids as u32 little-endian, 5.5 ns an id from a list and a copy from a u32 buffer.

    Takes any sequence of ints, or any one-dimensional buffer of integers, contiguous or not. Raises `UsageError`
    that says what to pass for text, bytes, floats, and ids outside 0 .. 2**32 - 1.
    """
    if isinstance(tokens, (list, tuple)):
        return _pack_sequence(tokens)
    if type(tokens) is array and tokens.typecode == "I" and sys.byteorder == "little":
        return tokens.tobytes()
    if isinstance(tokens, (str, bytes, bytearray)):
        raise UsageError(
            f"tokens must be token ids, not {type(tokens).__name__}: tokenise text first, and wrap packed ids as "
            "numpy.frombuffer(data, dtype='<u4')"
        )
    try:
        view = np.asarray(tokens if hasattr(tokens, "__array__") else memoryview(tokens))
    except (TypeError, ValueError, NotImplementedError):
        if isinstance(tokens, Sequence):
            return _pack_sequence(tokens)
        raise UsageError(f"tokens must be a sequence or a buffer of integers, not {type(tokens).__name__}") from None
    return _pack_buffer(view, bare_bytes=isinstance(tokens, memoryview) and tokens.format in ("B", "b", "c"))


def _pack_sequence(tokens: Sequence[int]) -> bytes:
    # The fastest by a third, `struct.pack` next: on lists that are not in the processor's cache.
    try:
        packed = array("I", tokens)
    except OverflowError:
        raise UsageError("token ids must be in 0 .. 2**32 - 1") from None
    except TypeError:
        raise UsageError("tokens must be integers: pass the tokenizer's ids") from None
    if sys.byteorder == "big":  # pragma: no cover - the wire is little-endian
        packed.byteswap()
    return packed.tobytes()


def _pack_buffer(view: np.ndarray[Any, Any], bare_bytes: bool) -> bytes:
    if bare_bytes:
        raise UsageError("a bare byte buffer is ambiguous: pass numpy.frombuffer(data, dtype='<u4')")
    if view.ndim != 1:
        raise UsageError(f"tokens must be one-dimensional, not of shape {view.shape}: pass one prompt at a time")
    if view.dtype.kind not in "iu":
        raise UsageError(f"tokens must be integers, not {view.dtype}: pass the tokenizer's ids")
    wide = view.dtype.itemsize > TOKEN_BYTES or view.dtype.kind == "i"
    if wide and view.size and (int(view.min()) < 0 or int(view.max()) >= TOKEN_LIMIT):
        raise UsageError("token ids must be in 0 .. 2**32 - 1")
    return view.astype("<u4", copy=False).tobytes()


class TokenChain:
    """A prompt prepared for routing: packed at most once, hashed only at the depths that are asked for.

    `depth` is the number of full blocks. Make it with `Node.chain`. `key(1)` packs only the first block, so a
    prompt that nobody holds costs about a microsecond; any other depth costs one hash of at most 32 blocks and the
    boundaries below it, each hashed once. A list is read when its tokens are first needed, so it must not change. Its
    first block is looked at with the first key; what is wrong behind it raises `UsageError` when it is met, or, once a
    node has taken the prompt, becomes its `fault` and raises no more.
    """

    __slots__ = (
        "_bounds",
        "_first",
        "_memo",
        "_mix",
        "_packed",
        "_tokens",
        "_width",
        "depth",
        "extras",
        "fault",
        "n_tokens",
        "namespace",
        "root",
        "spec",
    )

    def __init__(
        self,
        spec: ChainSpec,
        root: int,
        tokens: Any,
        contents: Sequence[ContentSpan] = (),
        namespace: Namespace = DEFAULT_NAMESPACE,
        memo: ChainMemo | None = None,
    ) -> None:
        self.spec = spec
        self.root = root
        self._memo = memo
        self.namespace = namespace
        self.fault: str | None = None
        """Once a node has taken the prompt: what is wrong with its tokens, "" for nothing that has shown."""
        self._width = spec.block_tokens * TOKEN_BYTES
        self._mix = spec.mix
        self._packed: bytes | None = None
        if isinstance(tokens, list):
            self._tokens: Any = tokens
            self.n_tokens = len(tokens)
            if self.n_tokens < spec.block_tokens:
                # Nothing is ever hashed of it, so what is in it is looked at here.
                self._packed = _pack_sequence(tokens)
        else:
            self._tokens = None
            self._packed = pack_tokens(tokens)
            self.n_tokens = len(self._packed) // TOKEN_BYTES
        self.depth = self.n_tokens // spec.block_tokens
        self._bounds = [root]
        self._first = 0
        self.extras: dict[int, bytes] = {}
        """Block index -> digests of the content items that start in it."""
        if contents:
            for item in contents if isinstance(contents, Sequence) else (contents,):
                sound = isinstance(item, ContentSpan) and isinstance(item.content_id, str)
                if not sound or not isinstance(item.start, int):
                    raise UsageError(f"contents must be a list of ContentSpan(content_id, start), not {item!r:.60}")
                if not 0 <= item.start < max(self.n_tokens, 1):
                    raise UsageError(f"content {item.content_id!r} starts at {item.start}, outside the prompt")
            self.extras = block_extras(contents, spec.block_tokens)

    @property
    def packed(self) -> bytes:
        """The prompt's tokens as u32 little-endian, packed on first use."""
        if self._packed is None:
            try:
                self._packed = _pack_sequence(self._tokens)
            except UsageError as error:
                if self.fault is None:
                    raise  # To who passed them; once it is taken, whoever needs them is somebody else.
                self.fault, self._packed = str(error), b""
            self._tokens = None
        return self._packed

    def key(self, depth: int) -> int:
        """Return the 64-bit key of the first `depth` blocks, 0 <= depth <= self.depth."""
        if depth == 1:
            if not self._first:
                self._first = self._first_key()
            return self._first
        bounds, stride = self._bounds, depth // STRIDE
        if len(bounds) <= stride:
            self._bound(stride)
        if depth % STRIDE == 0:
            return bounds[stride]
        packed = self._packed
        if packed is None or self.extras:
            return self._hash(stride, depth)
        # As `_hash` does, without the call: a search asks for ten to twenty keys.
        width = self._width
        return xxh3_64_intdigest(packed[stride * STRIDE * width : depth * width], bounds[stride] ^ self._mix)

    def _bound(self, stride: int) -> None:
        """Hash the keys at the strides up to `stride`: 0.3 us each."""
        bounds, mix = self._bounds, self._mix
        if self.extras:
            while len(bounds) <= stride:
                bounds.append(self._hash(len(bounds) - 1, len(bounds) * STRIDE))
            return
        packed, size, key = self.packed, STRIDE * self._width, bounds[-1]
        if self._memo is not None and stride >= len(bounds) + SPAN:
            if len(bounds) == 1:
                bounds.append(xxh3_64_intdigest(packed[:size], key ^ mix))
            known = self._memo.recall(bounds[1], packed, stride)
            bounds += known[len(bounds) :]
            key = bounds[-1]
        for at in range((len(bounds) - 1) * size, stride * size, size):
            key = xxh3_64_intdigest(packed[at : at + size], key ^ mix)
            bounds.append(key)

    def remember(self) -> None:
        """Keep the keys at the strides for the next turn of the conversation, if the chain was made with a memo.

        O(tokens) where they were not asked for, as for a prompt that nobody held. A prompt that was not even packed is
        left out.
        """
        if self._memo is None or self._packed is None or self.extras or self.fault or self.depth < SPAN * STRIDE:
            return
        self._bound(self.depth // STRIDE)
        self._memo.keep(self._bounds, self._packed)

    def shared(self, other: TokenChain) -> int:
        """Return how many leading blocks two prompts of one domain share. O(log depth) keys of each."""
        shorter = min(self.depth, other.depth)
        if self.key(shorter) == other.key(shorter):
            # The same prompt again, or one that goes on: as common as a fork.
            return shorter

        def differs(depth: int) -> bool:
            return self.key(depth) != other.key(depth)

        lower = STRIDE * bisect_left(range(STRIDE, shorter + 1, STRIDE), True, key=differs)
        return lower + bisect_left(range(lower + 1, min(shorter, lower + STRIDE) + 1), True, key=differs)

    def block(self, index: int) -> bytes:
        """Return what block `index` (from 0) contributes to the chain: its tokens, then its items' digests."""
        size = self._width
        return self.packed[index * size : (index + 1) * size] + self.extras.get(index, b"")

    def _first_key(self) -> int:
        if self._packed is None:
            data = _pack_sequence(self._tokens[: self.spec.block_tokens])
        else:
            data = self._packed[: self._width]
        return xxh3_64_intdigest(data + self.extras.get(0, b""), self.root ^ self._mix)

    def _hash(self, stride: int, depth: int) -> int:
        lower = stride * STRIDE
        if self.extras:
            data = b"".join(map(self.block, range(lower, depth)))
        else:
            data = self.packed[lower * self._width : depth * self._width]
        return xxh3_64_intdigest(data, self._bounds[stride] ^ self._mix)


class ChainCursor:
    """The chain in streaming form: append blocks, get keys, 0.1 us a block.

    It starts at `depth`, given the key at the stride's lower boundary and the `blocks` since that boundary. With none
    since, `depth` is a multiple of 32, as at the root, and `boundary_key` is its own key.
    """

    __slots__ = ("_state", "depth", "key", "spec")

    def __init__(self, spec: ChainSpec, boundary_key: int, depth: int = 0, blocks: bytes = b"") -> None:
        self.spec = spec
        self.depth = depth
        state = xxh3_64(blocks, seed=boundary_key ^ spec.mix) if blocks else None
        self._state: Any = state
        self.key = state.intdigest() if state is not None else boundary_key

    def push(self, block: bytes) -> int:
        """Append one block (its tokens, then its items' digests) and return the key at the new depth."""
        return self.extend([block])[0]

    def extend(self, blocks: Sequence[bytes]) -> list[int]:
        """Append blocks and return the key at each new depth."""
        keys: list[int] = []
        at = 0
        while at < len(blocks):
            if self.depth % STRIDE == 0:
                self._state = xxh3_64(seed=self.key ^ self.spec.mix)
            update, digest = self._state.update, self._state.intdigest
            part = blocks[at : at + STRIDE - self.depth % STRIDE]
            for block in part:
                update(block)
                keys.append(digest())
            at += len(part)
            self.depth += len(part)
            self.key = keys[-1]
        return keys
