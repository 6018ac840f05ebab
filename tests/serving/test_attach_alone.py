"""An engine attached to a bare `Node` through the public names of `prefixroute_serving.attach`: no sidecar anywhere."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx
from prefixroute_serving.attach import Attachment, EngineConfig
from sidecar_pair import MODEL, PREFIX, engine_config, events_over, listen, served, until

from prefixroute import Domain, Node
from prefixroute.aio import Driver, UdpTransport
from prefixroute.emulator import EmulatedEngine
from prefixroute.emulator.tokenizer import encode


def test_a_bare_node_knows_what_its_engine_holds_and_how_loaded_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        listener = listen()
        config = engine_config(events_over(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"))
        async with EmulatedEngine(config) as emulated, served(emulated.app, listener):
            node = Node("n", Domain(model=MODEL, tokenizer="emulator"), rng=random.Random(1), now=time.monotonic())
            transport = await UdpTransport.open("127.0.0.1", 0)
            async with Driver(node, transport, clock=time.monotonic) as driver, httpx.AsyncClient() as client:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                engine = Attachment(node, EngineConfig(url=url, load_probe_s=0.05), "http://me", driver.now())
                engine.connect(client, driver)
                tasks = [asyncio.create_task(work) for work in engine.work()]
                try:
                    await serve_one_prompt(node, engine, driver, client)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


async def serve_one_prompt(node: Node, engine: Attachment, driver: Driver, client: httpx.AsyncClient) -> None:
    assert engine.endpoints == {"n/0": 0}
    await until(lambda: bool(engine.stats()) and engine.stats()["0"]["connected"])
    tokens = encode(PREFIX)
    cold = node.route(tokens, driver.now())
    assert (cold.target, cold.matched_tokens) == ("n/0", 0)
    body = json.dumps({"model": MODEL, "prompt": PREFIX, "max_tokens": 1}).encode()
    headers, body = engine.aimed(cold.target, [("content-type", "application/json")], body)
    reply = await client.post(f"{engine.config.url}/v1/completions", headers=dict(headers), content=body)
    engine.answered(cold.target, reply.status_code, cold.prompt_tokens)
    assert reply.status_code == 200
    await until(lambda: node.residency("n/0").live_blocks == len(tokens) // 16)
    await until(lambda: node.load("n/0", driver.now()).capacity_tokens > 0)
    assert node.route(tokens, driver.now()).matched_tokens == len(tokens) // 16 * 16

    before = engine.before_call("/reset_prefix_cache")
    assert before is not None
    reply = await client.post(f"{engine.config.url}/reset_prefix_cache")
    engine.called("/reset_prefix_cache", {}, b"", reply.content, before)
    assert node.residency("n/0").live_blocks == 0


def test_attaching_imports_nothing_of_the_sidecar() -> None:
    script = "import sys, json, prefixroute_serving.attach; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    serving = {name for name in loaded if name.startswith("prefixroute_serving.")}
    assert all(name.startswith("prefixroute_serving.attach") for name in serving)
    assert not loaded & {"starlette", "uvicorn", "httptools", "matplotlib", "prefixroute_lan4"}
