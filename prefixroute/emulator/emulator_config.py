"""The settings of an emulated engine, with the names and the defaults of vLLM where vLLM has them.

Rule: a wrong figure or an unknown field raises UsageError here, before anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from prefixroute.emulator.scheduler import Limits
from prefixroute.emulator.service_times import ServiceModel
from prefixroute.errors import UsageError


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`, field by field.

    `endpoint` is bound when it holds ``*`` or ``::`` or begins with ``ipc://`` or ``inproc://``; else the
    engine connects to it and the consumer must bind. `replay_endpoint` is always bound. `buffer_steps`
    batches can be replayed. `max_queue_size` is accepted and has no effect: publishing never blocks here.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more")

    @classmethod
    def from_json(cls, text: str) -> KvEventsConfig:
        """Read the JSON that vLLM takes; UsageError names the field that is wrong."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(f"kv events config: {error}") from None

    @property
    def publishes(self) -> bool:
        """Events are wanted and go to ZeroMQ."""
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one emulated engine.

    `capacity_blocks` are the blocks that can be used (vLLM's own count holds one more, the null block).
    `max_model_len` 0 means as much as the cache holds. `lora_modules` are names of adapters that requests may
    name as their model. With `any_model` a request may name any model. `hash_seed` changes all block hashes,
    as PYTHONHASHSEED does in vLLM; `byte_hashes` puts whole digests on the wire instead of ints. Without
    `prefix_caching` the cache keeps no block and publishes no event. Another `tokenizer_seed` stands for
    another tokenizer, another `weights_seed` for another revision of the model, which answers differently.
    """

    model: str = "m"
    block_size: int = 16
    capacity_blocks: int = 400
    max_model_len: int = 0
    service: ServiceModel = field(default_factory=ServiceModel)
    limits: Limits = field(default_factory=Limits)
    default_max_tokens: int = 16
    lora_modules: tuple[str, ...] = ()
    any_model: bool = False
    hash_seed: str = ""
    byte_hashes: bool = False
    prefix_caching: bool = True
    tokenizer_seed: int = 0
    weights_seed: int = 0
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)

    def __post_init__(self) -> None:
        for name in ("block_size", "capacity_blocks", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.model:
            raise UsageError("model must be a name, not empty")
        if not 0 <= self.max_model_len <= self.cache_tokens:
            raise UsageError(
                f"max_model_len must be at most capacity_blocks * block_size = {self.cache_tokens} "
                f"(0 means that), not {self.max_model_len}"
            )

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds when it is full."""
        return self.capacity_blocks * self.block_size

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return self.max_model_len or self.cache_tokens
