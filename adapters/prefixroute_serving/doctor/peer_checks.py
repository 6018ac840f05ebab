"""Checks between nodes: domain and secret, tokenizer and model must be equal; and UDP must reach the other node.

Rules:
1. Every node is compared with the first one, so that a finding names a node, a field and both values.
2. Nodes with different secrets return no echo, which says nothing about the path: they are not asked for echoes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..headers import HOP_HEADER
from ..introspection import MIN_BYTES, check, readable
from .findings import OK, WARNING, Asker, Finding, Visit, fault
from .hit_checks import caller_of

PROBE_TEXT: Final = (
    "The doctor's probe: naïve café, 3.14159 + 2,718 = ?\n\tdef f(x): return x ** 2  # квадрат\n"
    "日本語のテキスト  🙂 https://example.org/a?b=c&d=%20 ISO-8601: 2001-02-03T04:05:06Z"
)
"""A sample text: tokenizers that cut it differently are not the same."""

PROMPTS: Final = ("The capital of France is", "1, 2, 3, 4,", "def add(a, b):\n    return", "Once upon a time")
_ANSWER_TOKENS: Final = 8

_LOST: Final = 0.2
_COUNT: Final = 10
STEP_S: Final = 1.0
"""Seconds: a larger step of the wall clock is reported."""


_SET_BY: Final = {"model": "domain.model and domain.revision"}
"""The setting of a domain's field, where it has another name than the field."""


def check_domains(first: Visit, others: Sequence[Visit], challenge: str) -> list[Finding]:
    """Compare the domains field by field, and the secrets by their answers to the challenge."""
    found = [finding for visit in (first, *others) for finding in _as_configured(visit, challenge)]
    for other in others:
        if not first.told or not other.told:
            continue
        differing = _differing(first, other)
        found += differing or [
            Finding(OK, other.node, "domain", f"equal to {first.node}'s in every field and the secret")
        ]
    return found


def check_tenancy(first: Visit, others: Sequence[Visit]) -> list[Finding]:
    """Check that the given configurations tell tenants apart in the same way; no finding if none of them does."""
    found, ours = [], _tenancy(first)
    for other in others:
        theirs = _tenancy(other)
        differing = [name for name in (ours or theirs or {}) if (ours or {}).get(name) != (theirs or {}).get(name)]
        if differing:
            what = f"tenants differ from {first.node}'s in {', '.join(differing)}"
            fix = "make `tenants` equal on all nodes: what differs is cached apart, or shared against your will"
            found.append(fault(other.node, "tenants", what, fix))
        elif ours:
            found.append(Finding(OK, other.node, "tenants", f"told apart as at {first.node}"))
    return found


def _tenancy(visit: Visit) -> dict[str, object] | None:
    """Return the settings that decide which tenants share a cache; None where they are not known."""
    tenants = visit.config.tenants if visit.config is not None else None
    if tenants is None:
        return None
    groups = {name: sorted(members) for name, members in tenants.groups.items()}
    header = tenants.header.lower()
    return {"header": header, "groups": groups, "body_salt": tenants.body_salt, "required": tenants.required}


def check_zones(given: Sequence[Visit]) -> list[Finding]:
    """Check the rules between zones: all nodes have the same list, and with a rule "never" every peer has a zone."""
    found: list[Finding] = []
    for visit in given:
        config = visit.config
        if config is None or not config.zones:
            continue
        if config.zones != (given[0].config.zones if given[0].config is not None else ()):
            what = f"its rules between zones are not {given[0].node}'s"
            found.append(Finding(WARNING, visit.node, "zones", what, "each node goes by its own: make `zones` equal"))
        nameless = _without_zone(visit) if any(rule.forward == "never" for rule in config.zones) else []
        if nameless:
            what = f"no zone is known of {', '.join(nameless)}, and a rule says never"
            fix = "nothing is forwarded there: set their `zone`, and upgrade those that know of none"
            found.append(Finding(WARNING, visit.node, "zones", what, fix))
        elif not any(finding.node == visit.node for finding in found):
            found.append(Finding(OK, visit.node, "zones", f"zone {config.zone}, rules: {len(config.zones)}"))
    return found


def _without_zone(visit: Visit) -> list[str]:
    """Return the peers of which a node knows endpoints but no zone."""
    state = visit.stats.get("state")
    rows = state.get("endpoints", ()) if isinstance(state, dict) else ()
    return sorted({row["endpoint"].partition("/")[0] for row in rows if not row["local"] and not row.get("zone")})


def same_secret(one: Visit, other: Visit) -> bool:
    """Return whether both nodes gave the same answer to the challenge."""
    return bool(one.told) and bool(other.told) and one.told["check"] == other.told["check"]


def believe(one: Visit, other: Visit) -> bool:
    """Return whether each node accepts the other's signatures; the first of a node's answers is its signature."""
    if not one.told or not other.told:
        return False
    ours, theirs = _accepts(one), _accepts(other)
    return ours[0] in theirs and theirs[0] in ours


def _accepts(visit: Visit) -> list[str]:
    # An older version has one secret for everything.
    return visit.told.get("accepts") or [visit.told["check"]]


def _differing(first: Visit, other: Visit) -> list[Finding]:
    ours, theirs = first.told["domain"], other.told["domain"]
    found = [
        fault(
            other.node,
            "domain",
            f"{name} is {theirs.get(name)!r} here and {ours.get(name)!r} at {first.node}",
            f"make {_SET_BY.get(name, f'domain.{name}')} equal in both configurations and restart the sidecar: "
            "they refuse each other",
        )
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if not same_secret(first, other):
        what = f"the secret differs from {first.node}'s"
        found.append(fault(other.node, "secret", what, "give both the same domain.secret and restart the sidecar"))
    elif not believe(first, other):
        what = f"{first.node} and it do not take what the other signs"
        fix = "give both the other's signing secret in secrets first, and let it sign only then"
        found.append(fault(other.node, "secrets", what, fix))
    if other.told["version"] != first.told["version"]:
        what = f"prefixroute {other.told['version']} here, {first.told['version']} at {first.node}"
        found.append(Finding(WARNING, other.node, "version", what, "upgrade the older one"))
    return found


def _as_configured(visit: Visit, challenge: str) -> list[Finding]:
    """Report a configuration file that was changed after the sidecar had read it."""
    if visit.config is None or not visit.told:
        return []
    domain = visit.config.prefix_domain
    running, written = visit.told["domain"], readable(domain)
    changed = [name for name in written if running.get(name) != written[name]]
    changed += [] if visit.told["check"] == check(domain.secret, challenge) else ["secret"]
    accepts = [check(secret, challenge) for secret in visit.config.secret_bytes]
    if visit.told.get("accepts", accepts) != accepts and "secret" not in changed:
        changed.append("secrets")
    if not changed:
        return []
    what = f"the running sidecar has another {', '.join(changed)} than its configuration file"
    fix = "send the sidecar a SIGHUP" if changed == ["secrets"] else "restart the sidecar"
    return [fault(visit.node, "domain", what, fix)]


def check_clock(visit: Visit) -> list[Finding]:
    """Report steps of a node's wall clock since its sidecar started."""
    stepped = visit.told.get("clock_stepped_s", 0.0)
    if abs(stepped) <= STEP_S:
        return [Finding(OK, visit.node, "clock", "no step since the sidecar began")]
    what = f"the wall clock stepped by {stepped:+.1f} s since the sidecar began, or the machine slept"
    return [
        Finding(WARNING, visit.node, "clock", what, "let a time service slew the clock; do not suspend the machine")
    ]


async def check_tokenizers(ask: Asker, first: Visit, others: Sequence[Visit], models: dict[str, str]) -> list[Finding]:
    """Check that the engines tokenize one text alike; `models` has the model's name by node."""
    ours = await _tokens(ask, first, models[first.node])
    if ours is None:
        what = "the engine's POST /tokenize does not answer"
        return [fault(first.node, "tokenizer", what, "texts are routed by load alone: use an engine that has it")]
    found = []
    for other in others:
        theirs = await _tokens(ask, other, models[other.node])
        if theirs is None:
            what = "the engine's POST /tokenize does not answer"
            found.append(
                fault(other.node, "tokenizer", what, "texts are routed by load alone: use an engine that has it")
            )
        elif theirs != ours:
            at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            where = f"from token {at} on" if at is not None else f"{len(theirs)} tokens, not {len(ours)}"
            what = f"the engine reads the probe text otherwise than {first.node}'s ({where})"
            fix = "start both engines with the same tokenizer files, and name them in domain.tokenizer"
            found.append(fault(other.node, "tokenizer", what, fix))
        else:
            found.append(Finding(OK, other.node, "tokenizer", f"reads the probe text as {first.node}'s does"))
    return found


async def _tokens(ask: Asker, visit: Visit, model: str) -> list[int] | None:
    answer = await ask.post(f"{visit.url}/tokenize", {"model": model, "prompt": PROBE_TEXT})
    tokens = answer.body.get("tokens")
    return tokens if answer.good and isinstance(tokens, list) else None


async def check_models(ask: Asker, first: Visit, others: Sequence[Visit], models: dict[str, str]) -> list[Finding]:
    """Check that the engines give the same greedy answer: models of the same name may have different weights."""
    ours = await _answers(ask, first, models[first.node])
    found = []
    for other in others:
        theirs = await _answers(ask, other, models[other.node])
        if ours is None or theirs is None:
            found.append(Finding(WARNING, other.node, "model", "the engines' answers could not be compared"))
            continue
        equal = sum(one == two for one, two in zip(ours, theirs, strict=True))
        what = f"{equal} of {len(PROMPTS)} greedy answers are {first.node}'s"
        if equal == len(PROMPTS):
            found.append(Finding(OK, other.node, "model", what))
        elif equal:
            fix = "kernels may round otherwise; else compare revision and quantisation"
            found.append(Finding(WARNING, other.node, "model", what, fix))
        else:
            fix = "serve the same revision and quantisation on both (--revision, --quantization, the files themselves)"
            found.append(fault(other.node, "model", what, fix))
    return found


async def _answers(ask: Asker, visit: Visit, model: str) -> list[str] | None:
    texts = []
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0}
        answer = await ask.post(f"{visit.url}/v1/completions", body, [(HOP_HEADER, "1"), *caller_of(visit)])
        try:
            text = answer.body["choices"][0]["text"]
        except (LookupError, TypeError):
            return None
        texts.append(str(text))
    return texts


async def check_udp(ask: Asker, visit: Visit, peer: str, full: int, patience_s: float) -> Finding:
    """Check which echoes come back from a peer's gossip address: of small datagrams, and of gossip's full size."""
    small = await _share(ask, visit, peer, MIN_BYTES, patience_s)
    if small is None:
        return Finding(WARNING, visit.node, "udp", f"{peer} could not be probed", "upgrade the sidecar")
    if not small:
        what = f"no datagram of {_COUNT} came back from {peer}"
        return fault(
            visit.node, "udp", what, f"correct {peer}'s gossip address, or open its UDP port in both directions"
        )
    large = await _share(ask, visit, peer, full, patience_s) or 0.0
    if not large and small >= 1 - _LOST:
        passes = await _largest(ask, visit, peer, full, patience_s)
        what = f"datagrams of {full} bytes do not come back from {peer}, those of up to {passes} do"
        return fault(visit.node, "udp", what, f"raise the MTU of the path to {full + 28} bytes or more")
    lost = 1 - min(small, large)
    what = f"{lost:.0%} of datagrams to {peer} and back are lost, up to {full} bytes"
    if lost > _LOST:
        return fault(visit.node, "udp", what, "look for an overloaded link or small socket buffers (net.core.rmem_max)")
    return Finding(OK, visit.node, "udp", what)


async def _largest(ask: Asker, visit: Visit, peer: str, full: int, patience_s: float) -> int:
    """Return the largest size in bytes, to within 16, of a datagram that comes back."""
    passes, fails = MIN_BYTES, full
    while fails - passes > 16:
        middle = (passes + fails) // 2
        if await _share(ask, visit, peer, middle, patience_s, 2):
            passes = middle
        else:
            fails = middle
    return passes


async def _share(
    ask: Asker, visit: Visit, peer: str, size: int, patience_s: float, count: int = _COUNT
) -> float | None:
    """Return the share of echoes that come back, 0 to 1; None when the sidecar does not know the question."""
    asked = {"peer": peer, "bytes": size, "count": count, "patience_s": patience_s}
    answer = await ask.get(f"{visit.url}/prefixroute/udp", **asked)
    sent, answered = answer.body.get("sent"), answer.body.get("answered")
    if not answer.good or not isinstance(sent, int) or not isinstance(answered, int) or not sent:
        return None
    return answered / sent
