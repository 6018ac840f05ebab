"""The example of an engine without events: its cache, its adapter under the contract, two nodes with it, and the guide.

Nothing sleeps for a fixed time: the engine's time is scaled to nothing, and what comes over a socket is asked for again
and again, until a deadline that only a failure meets. The one program that takes its own time may take long.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path

import httpx
import pytest
from engine import SlotCache, SlotsEngine
from prefixroute_slots import BLOCK, SlotsWatcher, decode, decode_load
from run import AttachedEngine, ServedPrompt, ask, join, open_site

from prefixroute import (
    BlocksCleared,
    BlocksStored,
    DecodeError,
    Domain,
    EngineBatch,
    LoadReport,
    Node,
    NodeSettings,
    Outcome,
    Residency,
    StreamGap,
)
from prefixroute.cli import main
from prefixroute.testing import AdapterContract

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_engine"
GUIDE = ROOT / "docs" / "write-an-adapter.md"
PATIENT = NodeSettings(suspect_after_s=60.0, forget_after_s=600.0)


def answer(engine: SlotsEngine) -> bytes:
    return json.dumps(engine.state()).encode()


def prompts(seed: int, n: int) -> list[list[int]]:
    """Prompts of a few subjects, some of them one another's beginnings, most no multiple of a block."""
    rng = random.Random(seed)
    subjects = [[rng.randrange(32000) for _ in range(160)] for _ in range(3)]
    return [
        rng.choice(subjects)[: rng.randint(1, 160)] + [rng.randrange(4) for _ in range(rng.randrange(60))]
        for _ in range(n)
    ]


@cache
def recording(seed: int, slots: int = 2) -> tuple[bytes, ...]:
    """What the engine's page says before, and after each of thirty prompts."""

    async def serve() -> tuple[bytes, ...]:
        engine = SlotsEngine(slots, time_scale=0)
        pages = [answer(engine)]
        for prompt in prompts(seed, 30):
            await engine.generate(prompt, max_tokens=5)
            pages.append(answer(engine))
        return tuple(pages)

    return asyncio.run(serve())


class TestSlotsContract(AdapterContract):
    def decode(self, payload: bytes) -> EngineBatch:
        return decode(payload)

    def recordings(self) -> Sequence[Sequence[bytes]]:
        return [recording(1), recording(2, slots=4)]


class _NeverClears(TestSlotsContract):
    """Takes whole states for news."""

    def decode(self, payload: bytes) -> EngineBatch:
        batch = super().decode(payload)
        return EngineBatch(batch.events[1:])


def test_the_contract_finds_an_adapter_that_drops_nothing() -> None:
    with pytest.raises(AssertionError, match="evicts"):
        _NeverClears().test_reads_its_recordings_whole()


# --- the engine --------------------------------------------------------------------------------------------


def test_a_conversation_stays_in_its_slot_and_another_prompt_gets_a_copy_of_the_prefix() -> None:
    cache = SlotCache(3)
    first = list(range(100))
    slot, cached = cache.take(first)
    assert cached == 0
    cache.put(slot, first)
    assert cache.take([*first, 7, 8]) == (slot, 100)
    cache.put(slot, [*first, 7, 8])

    other, cached = cache.take([*first[:50], 9])
    assert other != slot and cached == 50
    assert cache.tokens[slot] == [*first, 7, 8] and cache.tokens[other] == first[:50]


def test_the_last_token_is_never_reused() -> None:
    cache = SlotCache(2)
    prompt = list(range(64))
    cache.put(cache.take(prompt).slot, prompt)
    assert cache.take(prompt).cached_tokens == 63


def test_the_slot_used_least_recently_is_lost() -> None:
    cache = SlotCache(2)
    for start in (0, 1000, 2000):
        prompt = list(range(start, start + 32))
        cache.put(cache.take(prompt).slot, prompt)
    assert sorted(tokens[0] for tokens in cache.tokens) == [1000, 2000]


def test_generate_refuses_what_it_cannot_serve() -> None:
    async def main() -> None:
        engine = SlotsEngine(slot_tokens=64, time_scale=0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(engine.app), base_url="http://engine") as client:
            bad = ([], [1 << 32], [-1], [True], ["a"], 5, None, [1] * 60)
            for tokens in bad:
                assert (await client.post("/generate", json={"tokens": tokens, "max_tokens": 5})).status_code == 400
            for body in (b"", b"[]", b"{}", b'{"tokens": [1], "max_tokens": 0}', b'{"tokens": [1], "max_tokens": ""}'):
                assert (await client.post("/generate", content=body)).status_code == 400
            reply = await client.post("/generate", json={"tokens": [1] * 59, "max_tokens": 5})
            assert (reply.status_code, len(reply.json()["tokens"])) == (200, 5)

    asyncio.run(main())


# --- the decoder -------------------------------------------------------------------------------------------


def test_an_answer_becomes_the_whole_state() -> None:
    page = json.dumps({"slots": [{"id": 0, "tokens": list(range(40))}, {"id": 1, "tokens": list(range(16))}]})
    cleared, first, second = decode(page.encode()).events
    assert cleared == BlocksCleared(None)
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert (len(first.handles), list(first.tokens), first.block_size) == (2, list(range(32)), BLOCK)
    assert second.handles == first.handles[:1], "the same tokens, the same handle"


def test_handles_tell_blocks_apart_by_all_that_is_before_them() -> None:
    page = json.dumps({"slots": [{"tokens": [first] + [5] * 31} for first in (1, 2)]})
    _, one, two = decode(page.encode()).events
    assert isinstance(one, BlocksStored) and isinstance(two, BlocksStored)
    assert not set(one.handles) & set(two.handles)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"[]",
        b"{}",
        b'{"slots": 1}',
        b'{"slots": [{}]}',
        b'{"slots": [{"tokens": [-1]}]}',
        b'{"slots": [{"tokens": [4294967296]}]}',
        b'{"slots": [{"tokens": [1.5]}]}',
        b'{"slots": [{"tokens": [true]}]}',
        b'{"slots": [], "running": -1}',
        b'{"slots": [], "tokens_per_s": 1e300}',
        b'{"slots": [], "more": ' + b"[" * 100_000,
    ],
)
def test_what_is_no_such_answer_is_refused(page: bytes) -> None:
    for read in (decode, decode_load):
        with pytest.raises(DecodeError) as caught:
            read(page)
        assert caught.value.kind == "malformed"


def test_an_answer_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixroute_slots.MAX_ANSWER_BYTES", 20)
    with pytest.raises(DecodeError, match="21 bytes"):
        decode(b'{"slots": []}' + b" " * 8)


def test_a_state_that_is_told_again_changes_nothing() -> None:
    residency = Residency(AdapterContract.domain)
    for page in recording(1):
        residency.apply(decode(page))
        residency.take_changes()
        residency.apply(decode(page))
        assert residency.take_changes() == (set(), set())


def test_a_lost_answer_heals_with_the_next_one() -> None:
    pages = recording(1)
    for lost in range(1, len(pages) - 1):
        residency, truth = Residency(AdapterContract.domain), Residency(AdapterContract.domain)
        residency.apply(decode(pages[lost - 1]))
        residency.apply(EngineBatch((StreamGap(),)))
        assert residency.partial or not residency.live_blocks
        residency.apply(decode(pages[lost + 1]))
        truth.apply(decode(pages[lost + 1]))
        assert sorted(residency.keys()) == sorted(truth.keys())
        assert not residency.partial and residency.confidence == 1.0


def test_an_estimate_is_never_high_and_less_than_a_block_low() -> None:
    node = Node("n", Domain("m", "t"), rng=random.Random(1), now=0.0)
    endpoint = node.add_endpoint("0", url="", incarnation=1, now=0.0)
    engine, now = SlotsEngine(3, time_scale=0), 0.0
    low = []
    for prompt in prompts(3, 200):
        node.apply(endpoint, decode(answer(engine)), now)
        now += 1.0
        decision, taken = node.route(prompt, now), engine.cache.take(prompt)
        engine.cache.put(taken.slot, prompt)
        node.report(decision, Outcome.served(taken.cached_tokens), now)
        low.append(taken.cached_tokens - decision.matched_tokens)
    assert min(low) == 0 and BLOCK // 2 < max(low) < BLOCK


# --- the watcher -------------------------------------------------------------------------------------------


def test_the_watcher_tells_what_is_new_and_doubts_an_engine_that_does_not_answer() -> None:
    engine = SlotsEngine(2, time_scale=0)
    out: list[object] = []
    up = True

    async def reply(request: httpx.Request) -> httpx.Response:
        if not up:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=answer(engine))

    async def main() -> None:
        nonlocal up
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            watcher = SlotsWatcher("http://engine/", out.append, out.append, client)
            assert await watcher.poll()
            load = LoadReport(prefill_tokens_per_s=4000.0, capacity_tokens=8192)
            assert out == [EngineBatch((BlocksCleared(None),)), load]
            assert await watcher.poll()
            assert len(out) == 2, "nothing is new"

            await engine.generate(list(range(40)), 1)
            assert await watcher.poll()
            assert out[2:] == [decode(answer(engine))]

            up = False
            assert [await watcher.poll() for _ in range(3)] == [False] * 3
            assert out[3:] == [EngineBatch((StreamGap(),))]
            up = True
            assert await watcher.poll()
            assert out[4:] == [decode(answer(engine))], "told again, though it is as it was: it ends the doubt"
            assert (watcher.polls, watcher.failures) == (7, 3)

    asyncio.run(main())


@pytest.mark.parametrize("response", [httpx.Response(500), httpx.Response(200, text="no slots here")])
def test_the_watcher_takes_a_strange_answer_for_none(response: httpx.Response) -> None:
    async def main() -> None:
        transport = httpx.MockTransport(lambda request: response)
        async with httpx.AsyncClient(transport=transport) as client:
            out: list[object] = []
            assert not await SlotsWatcher("http://engine", out.append, out.append, client).poll()
            assert out == []

    asyncio.run(main())


def test_load_tells_who_runs_who_waits_and_what_is_left_to_compute() -> None:
    async def main() -> None:
        engine = SlotsEngine(2, tokens_per_s=1.0)
        tasks = [asyncio.create_task(engine.generate(list(range(at, at + 100)), 1)) for at in (0, 1000, 2000)]
        await until(lambda: decode_load(answer(engine)).running == 1)
        load = decode_load(answer(engine))
        assert (load.waiting, load.queued_tokens, load.capacity_tokens) == (2, 300, 8192)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        load = decode_load(answer(engine))
        assert (load.running, load.waiting, load.queued_tokens) == (0, 0, 0)

    asyncio.run(main())


# --- all of it ---------------------------------------------------------------------------------------------


async def until(what: Callable[[], bool]) -> None:
    """Ask until something is so; the test's own time limit ends a vain wait."""
    while not what():
        await asyncio.sleep(0.002)


def blocks(site: AttachedEngine, endpoint: str) -> int:
    """How many blocks a site believes an endpoint to hold."""
    return next((row.blocks for row in site.node.stats(site.driver.now()).endpoints if row.endpoint == endpoint), 0)


async def served(site: AttachedEngine, prompt: list[int]) -> ServedPrompt:
    result = await ask(site, prompt)
    await site.watcher.poll()
    return result


def test_the_second_node_forwards_to_the_holder_and_hears_when_it_holds_it_no_more() -> None:
    rng = random.Random(4)
    system, other = ([rng.randrange(32000) for _ in range(1024)] for _ in range(2))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            first, second = [
                await open_site(name, SlotsEngine(1, tokens_per_s=10.0, time_scale=0), stack, PATIENT)
                for name in ("node-1", "node-2")
            ]
            for site in (first, second):
                assert await site.watcher.poll()
            join(first, second)
            cold = await served(first, system + [1] * 32)
            assert (cold.decision.target, cold.cached_tokens) == (first.endpoint, 0)
            await until(lambda: blocks(second, first.endpoint) == 66)

            warm = await ask(second, system + [2] * 32)
            await first.watcher.poll()
            assert warm.decision.target == first.endpoint and not warm.decision.local
            assert warm.decision.matched_tokens == warm.cached_tokens == 1024
            assert "longer cached prefix" in second.node.explain(warm.decision).text()

            # The engine's only slot goes to another prompt; what was there is gone from every view.
            await first.client.post(first.node.endpoint_url(first.endpoint) + "/generate", json={"tokens": other})
            await first.watcher.poll()
            await until(lambda: blocks(second, first.endpoint) == 64)
            told, believed = (site.node.digests()[first.endpoint].keys.tolist() for site in (first, second))
            assert believed == told
            assert second.node.route([*other, 3], second.driver.now()).matched_tokens == 1024

    asyncio.run(main())


@pytest.mark.timeout(300)
def test_the_program_ends_with_everything_as_predicted() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE / "run.py")], capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2096 tokens -> node-1/0 (longer cached prefix); 2048 cached there" in done.stdout
    assert "predicted 2048 cached tokens, the engine had 2048: right" in done.stdout


def test_an_installed_adapter_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = re.search(r'^slots = "(.*)"$', (EXAMPLE / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    info = tmp_path / "site" / "prefixroute_slots-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prefixroute-slots\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[prefixroute.engines]\nslots = {declared[1]}\n")
    monkeypatch.syspath_prepend(str(info.parent))
    pages = tmp_path / "recorded"
    pages.mkdir()
    for number, page in enumerate(recording(1)):
        (pages / f"{number:05}.msgpack").write_bytes(page)

    assert main(["replay", "--engine", "slots", "--json", "-", str(pages)]) == 0
    report = json.loads(capsys.readouterr().out)
    truth = Residency(AdapterContract.domain)
    truth.apply(decode(recording(1)[-1]))
    assert report["undecodable"] == report["unknown_events"] == 0 and not report["partial"]
    assert report["canonical_blocks"] == truth.canonical_blocks > 0


def test_the_guide_s_python_runs() -> None:
    sources = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert sources
    for source in sources:
        names: dict[str, object] = {"__name__": __name__}
        exec(compile(source, str(GUIDE), "exec", dont_inherit=True), names)
        for kit in [kit for kit in names.values() if isinstance(kit, type) and issubclass(kit, AdapterContract)]:
            for check in [name for name in dir(kit) if name.startswith("test_") and kit is not AdapterContract]:
                getattr(kit(), check)()


def test_the_guide_s_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", GUIDE.read_text() + (EXAMPLE / "README.md").read_text()):
        assert (GUIDE.parent / target).exists() or (EXAMPLE / target).exists(), target
