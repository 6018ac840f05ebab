"""The settings of a node's engine: one structure, which is the table ``engine`` of a sidecar's JSON.

Rules:
1. An unknown field is an error, so that a misspelt field is not silently ignored.
2. A wrong value is refused when the structure is made, with a `ValueError` that names the field.
"""

from __future__ import annotations

import msgspec
from prefixroute_inproc import is_tap, sources_of_tap
from prefixroute_zmq import endpoint_of_rank

ENGINE_KINDS = ("vllm", "sglang")
"""The values of `EngineConfig.kind`: the adapter that reads events and load."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine beside a node: its address, and the facts that it cannot report itself. Only `url` is required.

    `events`, `replay`, `topic` and `bind` are `endpoint`, `replay_endpoint`, `topic` and `bind` of the engine's own
    ``--kv-events-config``, word for word, since they decide who binds. They are those of rank 0; `ranks` is the number
    of data-parallel ranks. ``tap://`` and an absolute path as `events` is the engine's PREFIXROUTE_TAP, see
    docs/in-process.md. Without `events` the engine is asked (vLLM >= 0.31, SGLang where it publishes over tcp).
    `prefill_tokens_per_s` is the engine's speed where it is known; 0 lets the node learn it from answers.
    `tokenizer_file` is a copy of the engine's ``tokenizer.json``, or the folder of it, to tokenize prompts here instead
    of asking the engine. `load_probe_s` is the seconds between two load probes; an engine in trouble is probed every
    half second.
    """

    url: str
    kind: str = "vllm"
    events: str = ""
    replay: str = ""
    topic: str = ""
    bind: bool | None = None
    ranks: int = 1
    prefill_tokens_per_s: float = 0.0
    tokenizer_file: str = ""
    load_probe_s: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in ENGINE_KINDS:
            raise ValueError(f"kind must be one of {', '.join(ENGINE_KINDS)}, not {self.kind!r}")
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {self.ranks}")
        if is_tap(self.events):
            sources_of_tap(self.events, self.ranks)
            return
        for endpoint in filter(None, (self.events, self.replay)):
            endpoint_of_rank(endpoint, self.ranks - 1)
