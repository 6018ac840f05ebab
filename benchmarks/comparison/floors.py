"""The floors: a C program that hashes and matches as the core does, and the least that Python's own xxhash needs.

Rules:
1. `floor/floor.c` is built here, with `cc -O2`, into the user's cache directory; the wheel does not carry it.
2. Before a figure is believed, its hash is compared with python's xxhash, and its answers with the index's.
3. Without a compiler or Python's headers there is no floor: `load` says why, and nothing else fails.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from prefixroute.keys.chain import STRIDE, ChainSpec, TokenChain, pack_tokens
from prefixroute.routing.index import DEEPEST, MergedIndex

SOURCE = Path(__file__).parent / "floor.c"
LENGTHS = (17, 32, 33, 64, 65, 100, 128, 129, 192, 240, 241, 256, 300, 1024, 1025, 2000, 2048, 2080, 4096, 5000)


class NoFloor(Exception):  # noqa: N818 - said to people as a reason
    """The floor cannot be built here; the text says why."""


def load(cache: Path | None = None) -> Any:
    """Build the floor if need be, check its hash, and return the module. Raises `NoFloor`."""
    if sys.byteorder != "little":
        raise NoFloor("the floor is for little-endian machines")
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefixroute-bench"
    tag = hashlib.sha256(SOURCE.read_bytes() + sys.version.encode()).hexdigest()[:16]
    built = cache / f"floor-{tag}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not built.exists():
        _build(built)
    spec = importlib.util.spec_from_loader("floor", importlib.machinery.ExtensionFileLoader("floor", str(built)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng = random.Random(5)
    for n in LENGTHS:
        data, seed = rng.randbytes(n), rng.getrandbits(64)
        if module.hash(data, seed) != xxh3_64_intdigest(data, seed):
            raise NoFloor(f"its hash of {n} bytes is not xxhash's: floor.c is wrong for this machine")
    return module


def _build(built: Path) -> None:
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        raise NoFloor(f"no Python.h in {include}")
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            out = Path(scratch) / "floor.so"
            command = [
                os.environ.get("CC", "cc"),
                "-O2",
                "-shared",
                "-fPIC",
                f"-I{include}",
                str(SOURCE),
                "-o",
                str(out),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoFloor(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
            out.replace(built)
    except OSError as error:
        raise NoFloor(f"cannot build: {error}") from None


class Floor:
    """The floor's index, with the keys of endpoints as a merged index has them."""

    def __init__(self, module: Any, spec: ChainSpec, root: int, endpoints: int, keys: int) -> None:
        self._search = module.search
        self._hold = module.hold
        self._table = module.table(keys, (endpoints + 63) // 64)
        self._args = (root, spec.mix, spec.block_tokens, DEEPEST)

    def hold(self, endpoint: int, wire_keys: Iterable[int]) -> None:
        """Give an endpoint, by its number, wire keys."""
        self._hold(self._table, wire_keys, endpoint)

    def search(self, tokens: Any) -> list[tuple[int, bytes]]:
        """The deepest strata of a prompt: a list of ints, or a buffer of u32. O(depth / 32) hashes, as in the index."""
        found: list[tuple[int, bytes]] = self._search(self._table, tokens, *self._args)
        return found

    def agrees(self, index: MergedIndex, chain: TokenChain, tokens: Any, numbers: dict[str, int]) -> bool:
        """Whether the floor's answer is the index's, endpoints named by `numbers`."""
        ours = [(s.depth, sum(1 << numbers[name] for name in index.names(s.mask))) for s in index.search(chain)]
        return ours == [(depth, int.from_bytes(mask, "little")) for depth, mask in self.search(tokens)]


def pure_hash(spec: ChainSpec, root: int) -> Callable[[Any], int]:
    """Return the least that a full match takes from Python: pack the prompt, then hash it stride by stride."""
    width, mix = spec.block_tokens * 4 * STRIDE, spec.mix

    def chained(tokens: Any) -> int:
        packed = array("I", tokens).tobytes() if isinstance(tokens, list) else pack_tokens(tokens)
        key = root
        for at in range(0, len(packed), width):
            key = xxh3_64_intdigest(packed[at : at + width], key ^ mix)
        return key

    return chained
