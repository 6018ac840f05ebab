"""Checks that an engine is configured so that its cache can be followed: version, flags, event sockets, who binds.

Rules:
1. The engine's answers are compared with the sidecar's configuration and with the events that the sidecar received.
2. The sidecar is asked whether the stream is connected: only the sidecar can see that both sides, or neither, bind an
   address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx
from prefixroute_inproc import is_tap
from prefixroute_sglang import discovery as sglang
from prefixroute_streams import EventSource
from prefixroute_streams.engine_http import parse_samples
from prefixroute_streams.topics import matches
from prefixroute_streams.trouble import troubles
from prefixroute_vllm import discovery as vllm
from prefixroute_zmq.address import Address, live_address, sources_of_ranks

from ..attach import KINDS, EngineConfig
from .findings import OK, WARNING, Asker, Finding, fault

OLDEST: Final[Mapping[str, tuple[int, int]]] = {"vllm": (0, 9), "sglang": (0, 5)}
"""The oldest version whose events the adapters read."""

CACHED_FLAG: Final[Mapping[str, str]] = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}
"""By kind of engine: the option with which it reports cached tokens."""

CACHING_FLAG: Final[Mapping[str, str]] = {
    "vllm": "start it with --enable-prefix-caching",
    "sglang": "start it without --disable-radix-cache",
}
"""By kind of engine: what to do so that it keeps prefixes."""

_CONFIG_INFO: Final = "vllm:cache_config_info"
_VERSION: Final = re.compile(r"(\d{1,4})\.(\d{1,4})")


class EngineFacts(NamedTuple):
    """An engine's facts about itself; a fact that it does not report is "", 0 or None.

    `sources` are its event sockets by rank; the mapping is empty when the engine reports that it publishes nothing.
    """

    alive: bool
    version: str = ""
    block_size: int = 0
    prefix_caching: bool | None = None
    max_tokens: int = 0
    sources: Mapping[int, EventSource] | None = None


async def read_facts(ask: Asker, config: EngineConfig) -> EngineFacts:
    """Ask an engine for its facts; no answer of the engine makes this raise."""
    if not (await ask.get(f"{config.url}/health")).good:
        return EngineFacts(False)
    models = (await ask.get(f"{config.url}/v1/models")).body.get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    longest = first.get("max_model_len")
    facts = EngineFacts(True, max_tokens=longest if isinstance(longest, int) else 0)
    return await (_of_sglang if config.kind == "sglang" else _of_vllm)(ask, config, facts)


async def _of_vllm(ask: Asker, config: EngineConfig, facts: EngineFacts) -> EngineFacts:
    version = (await ask.get(f"{config.url}/version")).body.get("version")
    page = await ask.get(f"{config.url}/metrics")
    labels = next((sample.labels for sample in parse_samples(page.text, {_CONFIG_INFO})), {})
    return facts._replace(
        version=version if isinstance(version, str) else "",
        block_size=_whole(labels.get("block_size")),
        prefix_caching=_flag(labels.get("enable_prefix_caching")),
        sources=_by_rank(await vllm.describe(config.url, timeout_s=ask.timeout_s, client=ask.client)),
    )


async def _of_sglang(ask: Asker, config: EngineConfig, facts: EngineFacts) -> EngineFacts:
    told: Mapping[str, Any] = {}
    for path in ("/server_info", "/get_server_info"):
        told = told or (await ask.get(config.url + path)).body
    off = told.get("disable_radix_cache")
    published = await sglang.describe(config.url, timeout_s=ask.timeout_s, client=ask.client)
    return facts._replace(
        version=str(told.get("version", "")),
        block_size=_whole(told.get("page_size")),
        prefix_caching=not off if isinstance(off, bool) else None,
        sources=_by_rank(published.events if published is not None else None),
    )


def _by_rank(sources: Sequence[EventSource] | None) -> Mapping[int, EventSource] | None:
    """Return the sources that an engine reports, by rank; None when it does not know the question.

    They come from `describe`. `discover` would also connect to each address to find out who binds it, and a socket that
    the sidecar binds would take that for an engine that came and went.
    """
    return None if sources is None else {source.rank: source for source in sources}


def check_engine(node: str, config: EngineConfig, facts: EngineFacts) -> list[Finding]:
    """Check that the engine answers, has a known version, and keeps prefixes."""
    if not facts.alive:
        what = f"{config.kind} at {config.url} does not answer"
        return [fault(node, "engine", what, "start it, or correct engine.url")]
    found = [_version(node, config, facts)]
    if facts.prefix_caching is False:
        found.append(fault(node, "prefix caching", "the engine keeps no prefix", CACHING_FLAG[config.kind]))
    return found


def _version(node: str, config: EngineConfig, facts: EngineFacts) -> Finding:
    match = _VERSION.match(facts.version)
    if match is None:
        return Finding(WARNING, node, "engine", f"{config.kind} does not tell its version")
    if (int(match[1]), int(match[2])) < OLDEST[config.kind]:
        oldest = ".".join(map(str, OLDEST[config.kind]))
        return fault(node, "engine", f"{config.kind} {facts.version} is too old", f"use {oldest} or later")
    unit = f", blocks of {facts.block_size} tokens" if facts.block_size else ""
    return Finding(OK, node, "engine", f"{config.kind} {facts.version}{unit}")


# --- events ------------------------------------------------------------------------------------------------


def check_events(
    node: str, config: EngineConfig, facts: EngineFacts, streams: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Check that events are on, reach the sidecar, and can be replayed; `streams` is the sidecar's state of them."""
    if facts.sources is not None and not facts.sources and not config.events:
        return [fault(node, "events", "the engine publishes no KV-cache events", KINDS[config.kind].how_to_publish)]
    if facts.sources is not None and not facts.sources and not is_tap(config.events) and config.kind == "vllm":
        what = "the engine publishes no KV-cache events, though engine.events says where"
        return [fault(node, "events", what, KINDS[config.kind].how_to_publish)]
    sources = followed(config, facts)
    if not sources:
        what = "the engine does not tell where it publishes, and the configuration does not either"
        return [fault(node, "events", what, "give engine.events, word for word as in the engine's --kv-events-config")]
    found = []
    for rank, source in sorted(sources.items()):
        told = (facts.sources or {}).get(rank)
        found += _check_stream(node, config, source, told, streams.get(str(rank)))
    return found


def followed(config: EngineConfig, facts: EngineFacts) -> Mapping[int, EventSource]:
    """Return the sources from which the sidecar takes events, by rank."""
    if not config.events:
        return facts.sources or {}
    if is_tap(config.events):
        return {rank: EventSource(config.events, rank=rank) for rank in range(config.ranks)}
    host = httpx.URL(config.url).host
    sources = sources_of_ranks(config.events, config.replay or None, config.topic, config.ranks, host)
    return {source.rank: source._replace(bind=config.bind) for source in sources}


def _check_stream(
    node: str,
    config: EngineConfig,
    source: EventSource,
    told: EventSource | None,
    stream: Mapping[str, Any] | None,
) -> list[Finding]:
    where = f"rank {source.rank}, {source.endpoint}"
    if stream is None:
        return [fault(node, "events", f"the sidecar does not follow {where}", "see the sidecar's log, and restart it")]
    found = []
    if not stream.get("connected"):
        found.append(_unconnected(node, config, source, told))
    else:
        found.append(Finding(OK, node, "events", f"{where}: connected, {stream.get('batches', 0)} batches"))
    if told is not None and not matches(source.topic.encode(), told.topic.encode()):
        what = f"{where}: the sidecar wants topic {source.topic!r}, the engine publishes under {told.topic!r}"
        found.append(fault(node, "events", what, "make engine.topic what the engine's --kv-events-config says"))
    if stream.get("decode_errors"):
        what = f"{where}: messages that cannot be read: {stream['decode_errors']}"
        found.append(fault(node, "events", what, "upgrade prefixroute, or correct engine.kind"))
    for trouble in troubles(stream):
        what = f"{where}: {trouble.what}"
        found.append(
            Finding(WARNING, node, "events", what) if trouble.harmless else fault(node, "events", what, trouble.change)
        )
    return found if is_tap(source.endpoint) else [*found, _check_replay(node, config, source, told, stream)]


def _unconnected(node: str, config: EngineConfig, source: EventSource, told: EventSource | None) -> Finding:
    """Return the finding that says why a stream has no engine at its other end."""
    if is_tap(source.endpoint):
        fix = "start the engine with PREFIXROUTE_TAP set to this address"
        return fault(node, "events", f"nobody serves {source.endpoint}", fix)
    ours, theirs = _ends(config, source), _ends(config, told._replace(bind=None)) if told else None
    if theirs is not None and theirs.bind and not ours.bind:
        what = f"both sides connect: the engine to {told and told.endpoint}, the sidecar to {ours.address}"
        fix = "give the engine an endpoint with * (tcp://*:PORT), or make engine.events the same, without engine.bind"
        return fault(node, "events", what, fix)
    if theirs is not None and ours.bind and not theirs.bind:
        what = f"both sides bind: the engine {told and told.endpoint}, the sidecar {ours.address}"
        return fault(node, "events", what, "make engine.events what the engine's --kv-events-config says")
    if theirs is not None and theirs.address != ours.address:
        what = f"the engine publishes at {theirs.address}, the sidecar looks at {ours.address}"
        return fault(node, "events", what, "correct engine.events, or leave it out so that the engine is asked")
    what = f"nobody is at the other end of {ours.address}"
    if ours.bind:
        return fault(node, "events", f"{what}, which the sidecar binds", "let the engine connect to this very address")
    fix = "bind it in the engine (an endpoint with *), and make engine.events the same"
    return fault(node, "events", what, fix)


def _ends(config: EngineConfig, source: EventSource) -> Address:
    """Return the consumer's end of a source."""
    hosts = KINDS[config.kind].follower.engine.binding_hosts
    return live_address(source.endpoint, source.host, hosts, source.bind)


def _check_replay(
    node: str, config: EngineConfig, source: EventSource, told: EventSource | None, stream: Mapping[str, Any]
) -> Finding:
    if source.replay_endpoint is None:
        costs = "what is lost, or came before the sidecar, stays unknown"
        if told is not None and told.replay_endpoint is not None:
            fix = f"set engine.replay to {told.replay_endpoint}"
            return fault(node, "replay", f"the configuration names no replay endpoint: {costs}", fix)
        return fault(node, "replay", f"the engine has no replay endpoint: {costs}", KINDS[config.kind].how_to_publish)
    timeouts = stream.get("replay_timeouts", 0)
    if timeouts:
        what = f"{timeouts} of {stream.get('replays', 0)} replays from {source.replay_endpoint} had no answer"
        return fault(node, "replay", what, "make engine.replay the engine's replay_endpoint, and open its port")
    return Finding(OK, node, "replay", f"{source.replay_endpoint}, {stream.get('replays', 0)} asked for")


def _flag(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")


def _whole(value: object) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
