"""``prefixroute doctor CONFIG...``: it examines running nodes and says what to change, a finding a line.

Rules:
1. The doctor only asks, over HTTP, as any client may; its probes are served like other prompts. Nothing is changed.
2. Give the configurations of all nodes where you have them. For a peer without a configuration the doctor checks only
   what the peer's sidecar answers, and finds that sidecar by the addresses that other nodes have heard.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final

import httpx
import msgspec

from prefixroute import __version__
from prefixroute.errors import UsageError

from ..sidecar_config import SidecarConfig, load_config
from .engine_checks import check_engine, check_events, read_facts
from .findings import FAULT, OK, WARNING, Asker, Finding, Visit, failed, fault, visit
from .hit_checks import check_predictions, check_tokens
from .peer_checks import (
    believe,
    check_clock,
    check_domains,
    check_models,
    check_tenancy,
    check_tokenizers,
    check_udp,
    check_zones,
)

HERE: Final = "here"
"""The node name in findings about the doctor's own environment."""

_TIMEOUT_S: Final = 60.0
_REQUIRED: Final = re.compile(r"^([\w.-]+)>=([\d.]+)(?:\s*;.*)?$")


def run_options(options: Namespace) -> int:
    """Examine what the command line's `options` name; exit code 1 when there is a fault."""
    configs = [load_config(path) for path in options.configs]
    if len({config.node for config in configs}) < len(configs):
        raise UsageError("two of the configurations are of one node")
    findings = asyncio.run(_run(configs, options.patience))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(findings)), indent=2).decode())
    else:
        for finding in findings:
            print(finding.line())
        print(_summary(findings))
    return int(failed(findings))


async def _run(configs: Sequence[SidecarConfig], patience_s: float) -> list[Finding]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return [*check_packages(), *await examine(configs, client, patience_s)]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as plain JSON values."""
    return {"healthy": not failed(findings), "findings": [finding._asdict() for finding in findings]}


def _summary(findings: Sequence[Finding]) -> str:
    counts = [f"{sum(finding.state == state for finding in findings)} {state}" for state in (FAULT, WARNING, OK)]
    return ", ".join(counts)


async def examine(configs: Sequence[SidecarConfig], client: httpx.AsyncClient, patience_s: float) -> list[Finding]:
    """Examine the nodes of these configurations and their peers; `patience_s` is how long an event may take."""
    ask, challenge = Asker(client, _TIMEOUT_S), secrets.token_hex(16)
    visits = [await visit(ask, config.node, config.public_url, config, challenge) for config in configs]
    found: list[Finding] = []
    for one in visits:
        found += await _examine_node(ask, one, patience_s)
    peers, unknown = await _peers(ask, visits, challenge)
    found += unknown
    able = [one for one in (*visits, *peers) if one.told]
    for one in able:
        found += check_clock(one)
    if not able:
        return found
    first, others = able[0], able[1:]
    models = {one.node: _model(one) for one in able}
    found += check_domains(first, others, challenge)
    given = [one for one in able if one.config is not None]
    found += [*check_tenancy(given[0], given[1:]), *check_zones(given)] if given else []
    if others:
        read = await check_tokenizers(ask, first, others, models)
        found += read
        # An engine with another tokenizer answers differently whatever its weights are, so it is not compared.
        alike = {finding.node for finding in read if finding.state == OK}
        found += await check_models(ask, first, [other for other in others if other.node in alike], models)
    for one in able:
        for peer in one.config.peers if one.config else ():
            other = next((other for other in able if other.node == peer.node), None)
            if one.config is not None and other is not None and believe(one, other):
                full = one.config.node_settings.datagram_bytes
                found.append(await check_udp(ask, one, peer.node, full, patience_s))
    return found


def _model(one: Visit) -> str:
    """Return the engine's name of its model: the domain's model name without the revision behind it."""
    return one.config.domain.model if one.config else str(one.told["domain"]["model"]).partition("@")[0]


async def _examine_node(ask: Asker, one: Visit, patience_s: float) -> list[Finding]:
    """Make all checks that need no other node."""
    config = one.config
    assert config is not None
    facts = await read_facts(ask, config.engine)
    found = check_engine(one.node, config.engine, facts)
    if not one.stats:
        what = f"no sidecar answers at {one.url}"
        return [*found, fault(one.node, "sidecar", what, "start it, or correct http and url in its configuration")]
    if not one.told:
        what = "the sidecar does not know GET /prefixroute/domain"
        found.append(Finding(WARNING, one.node, "sidecar", what, f"upgrade it to {__version__}"))
    if facts.alive:
        probed = await check_predictions(
            ask, one, config.engine, config.domain.model, config.domain.block_size, facts, patience_s
        )
        # The stats are read again, to see the effect of the probes on the stream.
        latest = await ask.get(f"{one.url}/prefixroute/stats")
        found += check_events(one.node, config.engine, facts, one._replace(stats=latest.body).streams)
        found += check_tokens(one._replace(stats=latest.body))
        known = {finding.check for finding in found if finding.state == FAULT}
        # A fault that a flag has explained already is not reported again by its effect.
        found += [finding for finding in probed if finding.state != FAULT or finding.check not in known]
    return found


async def _peers(ask: Asker, visits: Sequence[Visit], challenge: str) -> tuple[list[Visit], list[Finding]]:
    """Visit the peers whose configuration was not given, as far as other nodes have heard of them."""
    known = {one.node for one in visits}
    found, peers = [], []
    for one in visits:
        for peer in _peers_of(one):
            if peer in known:
                continue
            known.add(peer)
            url = _url_of(one, peer)
            told = await visit(ask, peer, url, None, challenge) if url else None
            if told is None or not told.told:
                what = f"{peer} has not been heard of" if told is None else f"{peer} does not answer at {url}"
                fix = f"start it, and give its configuration to the doctor as well to learn why {one.node} refuses it"
                found.append(fault(one.node, "peer", what, fix))
            else:
                peers.append(told)
    return peers, found


def _peers_of(one: Visit) -> list[str]:
    """Return a node's peers, including those that it has learnt."""
    configured = [peer.node for peer in one.config.peers] if one.config else []
    state = one.stats.get("state")
    learnt = state.get("peers", ()) if isinstance(state, dict) else ()
    return list(dict.fromkeys([*configured, *learnt]))


def _url_of(one: Visit, peer: str) -> str:
    """Return the URL of a peer's sidecar, from the peer's gossip; "" when none has come."""
    state = one.stats.get("state")
    rows = state.get("endpoints", ()) if isinstance(state, dict) else ()
    return next((row["url"] for row in rows if row["endpoint"].partition("/")[0] == peer and row["url"]), "")


def check_packages() -> list[Finding]:
    """Check that the packages installed here are new enough."""
    old = []
    try:
        required = metadata.requires("prefixroute") or []
    except metadata.PackageNotFoundError:
        return [Finding(WARNING, HERE, "packages", "prefixroute is not installed: its requirements are not known")]
    for match in filter(None, map(_REQUIRED.match, required)):
        try:
            version = metadata.version(match[1])
        except metadata.PackageNotFoundError:
            continue
        if _numbers(version) < _numbers(match[2]):
            old.append(f"{match[1]} {version} < {match[2]}")
    if old:
        return [fault(HERE, "packages", ", ".join(sorted(set(old))), "pip install -U 'prefixroute[demo]'")]
    return [Finding(OK, HERE, "packages", f"prefixroute {__version__} and what it needs")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
