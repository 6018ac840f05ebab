"""The engines that the live suite starts: each group once, as small as its scenarios allow."""

from __future__ import annotations

import pytest
from live_engines import EngineShape

VLLM = EngineShape("vllm", block=32, blocks=100, lora=True)
SGLANG = EngineShape("sglang", block=16, blocks=200)
SGLANG_1 = EngineShape("sglang", block=1, blocks=3200)

# One request computes and a few wait, so that a burst is refused; a client that asks one by one never notices.
_VLLM_BUSY = ("--max-num-seqs", "1", "--max-num-queued-reqs", "2")
_SGLANG_BUSY = ("--max-running-requests", "1", "--max-queued-requests", "1")

VLLM_NODE = EngineShape("vllm", block=32, blocks=200, extra=_VLLM_BUSY)
SGLANG_NODE = EngineShape("sglang", block=16, blocks=400, extra=_SGLANG_BUSY)
SGLANG_NODE_1 = EngineShape("sglang", block=1, blocks=6400, extra=_SGLANG_BUSY)

RANKS = EngineShape("vllm", block=32, blocks=100, ranks=2)
HYBRID = EngineShape("vllm", block=32, blocks=200, preset="hyb", extra=("--max-model-len", "2048"))


def on(*groups: tuple[EngineShape, ...]) -> pytest.MarkDecorator:
    """Run a test on each of these groups of engines."""
    ids = ["+".join(shape.label for shape in group) for group in groups]
    return pytest.mark.parametrize("engines", groups, ids=ids, indirect=True)


each_engine = on((VLLM,), (SGLANG,), (SGLANG_1,))
each_kind = on((VLLM,), (SGLANG,))
with_adapter = on((VLLM,))
each_pair = on((VLLM_NODE, VLLM_NODE), (VLLM_NODE, SGLANG_NODE), (VLLM_NODE, SGLANG_NODE_1))
unlike_pairs = on((VLLM_NODE, VLLM_NODE), (VLLM_NODE, SGLANG_NODE))
