"""Attach the engine beside a node: its data-parallel ranks, their cache events, and their load. Needs no sidecar.

An `Attachment` does the work that every server around a `Node` has with a vLLM or SGLang: it finds the engine's ranks
and makes an endpoint of each, follows their events over ZeroMQ or a tap, asks for their load, follows a restart to
other ports or ranks, and repairs a residency whose stream has lost events.

    async with Driver(node, transport, clock=time.monotonic) as driver, httpx.AsyncClient() as client:
        config = EngineConfig(url="http://127.0.0.1:8000", kind="vllm")
        engine = Attachment(node, config, url="http://10.0.0.1:9000", now=driver.now())  # url: where peers forward to
        engine.connect(client, driver)
        tasks = [asyncio.create_task(work) for work in engine.work()]
        decision = node.route(tokens, driver.now())
        if decision.target in engine.endpoints:
            headers, body = engine.aimed(decision.target, headers, body)  # names the rank, where there are several
            reply = await client.post(config.url + "/v1/completions", headers=headers, content=body)
            engine.answered(decision.target, reply.status_code, decision.prompt_tokens)

Needs ``pip install 'prefixroute[vllm,sglang]'``. The files:

| file | is |
|---|---|
| `engine_config.py` | `EngineConfig`: the settings of one engine |
| `attachment.py` | `Attachment`: endpoints, events and load of one engine |
| `ranks.py` | asks which ranks there are and where they publish, and asks again when that may have changed |
| `kinds.py` | what differs between vLLM and SGLang |
| `resets.py` | calls that empty the cache count at once |
| `repairs.py` | after a gap: requests that make the engine report the blocks that they reuse |
"""

from __future__ import annotations

from .attachment import Attachment
from .engine_config import ENGINE_KINDS, EngineConfig
from .kinds import KINDS, EngineKind

__all__ = ["ENGINE_KINDS", "KINDS", "Attachment", "EngineConfig", "EngineKind"]
