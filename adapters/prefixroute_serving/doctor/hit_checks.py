"""Checks that a node predicts what its engine reuses: a new prompt twice, and once for another tenant or salt.

Rules:
1. A probe is a text that nobody has sent before. This node's own engine serves it.
2. The doctor listens to the stream beside the sidecar (`listen`). Where the stream cannot be heard from here, the
   sidecar's prediction is the only evidence.
3. Where tenants are told apart, the doctor acts as the trusted caller and sends its probes for two tenants of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from prefixroute import EVERYBODY, Tenants
from prefixroute.events import FULL_ATTENTION_KINDS

from ..attach import EngineConfig
from ..headers import HOP_HEADER, MATCHED_HEADER
from .engine_checks import CACHED_FLAG, CACHING_FLAG, EngineFacts
from .findings import FAULT, OK, WARNING, Asker, Finding, HttpAnswer, Visit, fault
from .listen import Listener, listening, replayed, until

_PROBE_TOKENS: Final = 512
_PROBE_BLOCKS: Final = 4
_POLL_S: Final = 0.02
TENANT: Final = "prefixroute-doctor"
"""The tenant that the doctor's probes name, where tenants are told apart."""
_OTHER_TENANT: Final = "prefixroute-doctor-2"


class ServedProbe(NamedTuple):
    """An answered probe: the tokens that the node predicted and the engine reused; None when not reported."""

    answer: HttpAnswer
    predicted: int | None
    cached: int | None


async def check_predictions(
    ask: Asker, visit: Visit, config: EngineConfig, model: str, block: int, facts: EngineFacts, patience_s: float
) -> list[Finding]:
    """Send the probes to a node and judge the results; `block` is the domain's block size in tokens."""
    text, tokens = await _fresh(ask, config, model, facts)
    if not tokens:
        what = "the engine's POST /tokenize does not answer"
        return [fault(visit.node, "prediction", what, "texts are routed by load alone: use an engine that has it")]
    async with listening(config, facts, patience_s) as listener:
        before = await _streams(ask, visit)
        first = await _serve(ask, visit, model, text)
        if not first.answer.good:
            what = f"a prompt of {len(tokens)} tokens was answered with status {first.answer.status}"
            return [
                fault(visit.node, "prediction", what, "look at the engine's log; domain.model must be its model's name")
            ]
        hears = listener.hears
        heard = hears and await until(lambda: bool(listener.stored(tokens)), patience_s)
        await _until_applied(ask, visit, before, patience_s)
        if not hears:
            since = {int(rank): row["last_seq"] or 0 for rank, row in before.items() if row["connected"]}
            hears = await replayed(config, facts, since, listener, patience_s)
            heard = bool(listener.stored(tokens))
        second = await _serve(ask, visit, model, text)
        # This runs before the salted probe, which has the same tokens.
        salted = _salt_of(visit)
        stream = judge_stream(visit.node, facts, listener, tokens, heard, salted) if hears else []
        salt = "" if caller_of(visit) else secrets.token_hex(8)
        other = await _serve(ask, visit, model, text, salt, _OTHER_TENANT)
    found = judge_hits(visit.node, config, facts, second, max(block, facts.block_size))
    if second.cached:
        found += [*stream, *_judge_salt(visit, other)]
    return found


def caller_of(visit: Visit, tenant: str = TENANT) -> list[tuple[str, str]]:
    """Return the headers with which a trusted caller names a tenant; none where tenants are not told apart."""
    tenants = visit.config.tenants if visit.config is not None else None
    return [(tenants.header, tenant)] if tenants is not None and tenants.header else []


def _salt_of(visit: Visit) -> str:
    """Return the salt under which the engine is to cache the doctor's prompts."""
    config = visit.config
    if config is None or config.tenants is None or not config.tenants.header:
        return ""
    return Tenants(config.prefix_domain, config.tenants.groups).namespace(TENANT).salt


async def _fresh(ask: Asker, config: EngineConfig, model: str, facts: EngineFacts) -> tuple[str, list[int]]:
    """Return a new prompt of some blocks, and its tokens; no tokens when the engine does not report them."""
    wanted = max(_PROBE_TOKENS, _PROBE_BLOCKS * facts.block_size)
    if facts.max_tokens:
        wanted = min(wanted, facts.max_tokens // 2)
    name, words = secrets.token_hex(8), max(1, wanted // 3)
    while True:
        text = f"{name} " + " ".join(f"probe {n}" for n in range(words))
        told = (await ask.post(f"{config.url}/tokenize", {"model": model, "prompt": text})).body.get("tokens")
        tokens = told if isinstance(told, list) else []
        if len(tokens) <= max(wanted * 3 // 2, 16) or words == 1:
            return text, tokens
        words //= 2


async def _serve(ask: Asker, visit: Visit, model: str, text: str, salt: str = "", tenant: str = TENANT) -> ServedProbe:
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
    body |= {"cache_salt": salt} if salt else {}
    answer = await ask.post(f"{visit.url}/v1/completions", body, [(HOP_HEADER, "1"), *caller_of(visit, tenant)])
    matched = answer.headers.get(MATCHED_HEADER, "")
    details: Any = answer.body.get("usage")
    details = details.get("prompt_tokens_details") if isinstance(details, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return ServedProbe(
        answer, int(matched) if matched.isdecimal() else None, cached if isinstance(cached, int) else None
    )


async def _streams(ask: Asker, visit: Visit) -> Mapping[str, Any]:
    """Return the present state of the sidecar's streams, by rank."""
    streams = (await ask.get(f"{visit.url}/prefixroute/stats")).body.get("engine_events")
    return streams if isinstance(streams, dict) else {}


async def _until_applied(ask: Asker, visit: Visit, before: Mapping[str, Any], patience_s: float) -> None:
    """Wait until the sidecar has applied another batch."""
    deadline, old = time.monotonic() + patience_s, _batches(before)
    while _batches(await _streams(ask, visit)) == old and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


def _batches(streams: Mapping[str, Any]) -> int:
    return sum(row.get("batches", 0) for row in streams.values())


def judge_hits(node: str, config: EngineConfig, facts: EngineFacts, second: ServedProbe, grain: int) -> list[Finding]:
    """Judge the second of two equal prompts; a difference of up to one `grain`, in tokens, is allowed."""
    predicted, cached = second.predicted, second.cached
    if cached is None:
        what = "the engine does not report cached tokens, so predictions are never corrected"
        return [Finding(WARNING, node, "prediction", what, f"start it with {CACHED_FLAG[config.kind]}")]
    if not cached:
        what = "a prompt that was sent twice was computed twice"
        if facts.prefix_caching:
            # The engine's flag says that it keeps prefixes: a busy fleet may have evicted this prompt, or a hybrid
            # model's unit of reuse may be longer than the prompt.
            fix = "repeat this when the engine is idle; else its cache is too small to help"
            return [Finding(WARNING, node, "prefix caching", what, fix)]
        return [fault(node, "prefix caching", what, CACHING_FLAG[config.kind])]
    what = f"of a prompt sent twice {cached} tokens were cached, {predicted} were predicted"
    if predicted is None or abs(predicted - cached) > grain:
        fix = "see the other findings of this node: its events do not come, or tell other tokens or another salt"
        return [fault(node, "prediction", what, fix)]
    return [Finding(OK, node, "prediction", what)]


def judge_stream(
    node: str, facts: EngineFacts, listener: Listener, tokens: Sequence[int], heard: bool, salt: str = ""
) -> list[Finding]:
    """Judge the stores of a prompt that the engine cached under `salt`; `heard` tells whether any store was heard."""
    if not heard:
        if not listener.roots:
            what = "no event came of a prompt that the engine cached"
            return [fault(node, "events", what, "restart the engine; if that does not help, its publisher is broken")]
        what = "the engine stores other tokens than its POST /tokenize tells"
        fix = "serve prompts and /tokenize from the same engine and tokenizer"
        return [fault(node, "tokenizer", what, fix), *_parting(node, tokens, listener)]
    found = []
    for event in listener.stored(tokens):
        if salt and event.namespace.salt != salt:
            what = "the engine caches a tenant's prompts under another salt than the sidecar's"
            fix = "let cache_salt through to the engine, or use one that knows it: tenants share a cache"
            found.append(fault(node, "salt", what, fix))
        elif event.namespace.salt != salt:
            what = "the engine salts prompts that were sent without a salt: what it caches is never matched"
            fix = "send cache_salt through the sidecar: no gateway between sidecar and engine may add it"
            found.append(fault(node, "salt", what, fix))
        if event.group_kind not in FULL_ATTENTION_KINDS:
            continue  # windows and states keep less than every block
        if facts.block_size and event.block_size != facts.block_size:
            what = f"events tell blocks of {event.block_size} tokens, the engine's own figure is {facts.block_size}"
            # With hybrid models and context parallelism an engine block is larger.
            state = FAULT if event.block_size % facts.block_size else WARNING
            fix = "make engine.events the sockets of the engine that engine.url names"
            found.append(Finding(state, node, "block size", what, fix))
        if len(event.handles) * event.block_size != len(event.tokens):
            what = f"{len(event.handles)} hashes of {event.block_size} tokens come with {len(event.tokens)} tokens"
            found.append(fault(node, "block size", what, "upgrade the engine: its events cannot be mapped to tokens"))
        if len(set(event.handles)) < len(event.handles):
            found.append(fault(node, "hashes", "different blocks have one hash", "use another prefix-caching hash"))
    return list(dict.fromkeys(found)) or [Finding(OK, node, "block size", "events, blocks and hashes agree")]


def _parting(node: str, tokens: Sequence[int], listener: Listener) -> list[Finding]:
    """Where the probe parts from what was stored that is most like it."""
    wanted = set(tokens)
    stored = max((event.tokens for event in listener.roots), key=lambda told: len(wanted.intersection(told)))
    pairs = enumerate(zip(tokens, stored, strict=False))
    first = next(((at, ours, theirs) for at, (ours, theirs) in pairs if ours != theirs), None)
    return [] if first is None else [_differs(node, "the engine", "/tokenize", *first)]


def check_tokens(visit: Visit) -> list[Finding]:
    """Whether the node has found that its engine stores prompts as other tokens than the node hashes."""
    found = []
    for row in visit.rows:
        differs = row.get("differs")
        if isinstance(differs, dict):
            first = [differs.get(name) for name in ("position", "ours", "theirs")]
            found.append(_differs(visit.node, f"the engine of {row.get('endpoint')}", "the node", *first))
    return found


def _differs(node: str, engine: str, whose: str, position: object, ours: object, theirs: object) -> Finding:
    what = f"prompts never match: at position {position} {engine} stores token {theirs}, where {whose} has {ours}"
    return fault(
        node, "tokens", what, "use one tokenizer and chat template, and begin prompts as the engine does, once"
    )


def _judge_salt(visit: Visit, other: ServedProbe) -> list[Finding]:
    node, tenants = visit.node, visit.config.tenants if visit.config is not None else None
    if tenants is not None and EVERYBODY in tenants.groups:
        return [Finding(OK, node, "salt", "all tenants share a cache, as the configuration says")]
    if not other.answer.good or other.cached is None:
        return [Finding(WARNING, node, "salt", "the engine refused cache_salt", "tenants cannot be kept apart here")]
    whose = "tenant" if caller_of(visit) else "cache_salt"
    if other.cached:
        what = f"under another {whose} {other.cached} tokens were cached all the same: tenants share a cache"
        return [fault(node, "salt", what, "let cache_salt through to the engine, or use one that knows it")]
    return [Finding(OK, node, "salt", f"another {whose} shares nothing")]
