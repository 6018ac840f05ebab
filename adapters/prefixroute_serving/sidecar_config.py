"""A sidecar's configuration: one JSON file a node.

Rules:
1. An unknown field is an error, so that a misspelt field is not silently ignored.
2. Everything that must be equal on all nodes stands under ``domain``; nodes whose domains differ refuse each other.
3. A promise that cannot be kept is refused when the configuration is read, not when a request comes.
4. The engine's settings are `EngineConfig`, in `attach`, which needs no sidecar.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prefixroute import Domain, NodeSettings, PushBackSettings, Tenants, ZoneRule, Zones
from prefixroute.errors import UsageError
from prefixroute.policy import POLICIES as POLICY_TYPES
from prefixroute.policy import Policy

from .attach.engine_config import EngineConfig

DEFAULT_POLICY = "default"
POLICIES = (DEFAULT_POLICY, *POLICY_TYPES)
"""The values of `SidecarConfig.policy`."""

GOOD_SECRET_BYTES = 16
"""The least length of a secret: whoever hears one datagram could guess a shorter secret."""

IGNORE, NARROW, TRUST = "ignore", "narrow", "trust"
"""The values of `TenantsConfig.body_salt`."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class HostPort(_Strict, frozen=True, kw_only=True):
    """A host and a port."""

    host: str = "127.0.0.1"
    port: int

    @property
    def pair(self) -> tuple[str, int]:
        """Return host and port as a socket address."""
        return (self.host, self.port)


class PeerConfig(_Strict, frozen=True, kw_only=True):
    """Another node: its name and where its gossip arrives. Its HTTP address comes with its gossip."""

    node: str
    gossip: HostPort


class DomainConfig(_Strict, frozen=True, kw_only=True):
    """The settings that must be equal on all nodes; `block_size` is in tokens.

    `secret` keys prefix hashes, and authenticates unless `secrets` are given. `model` is the engine's name of its
    model; `revision` tells apart weights that engines serve under one name.
    """

    model: str
    tokenizer: str
    revision: str = ""
    block_size: int = 16
    secret: str = ""


class TimeoutConfig(_Strict, frozen=True, kw_only=True):
    """How long to wait for another node, in seconds.

    `connect_s` is for a connection, `stream_s` for the next (or first) bytes of a stream, `whole_s` for an answer that
    is not streamed. The local engine is never given up for slowness.
    """

    connect_s: float = 1.0
    stream_s: float = 30.0
    whole_s: float = 300.0


class PushBackConfig(_Strict, frozen=True, kw_only=True):
    """Seconds of queued prefill at which this node begins to push back, and at which it ends.

    `enter_s` should be about the wait that is too long for a request here. On slow engines the default is only a few
    prompts.
    """

    enter_s: float = 4.0
    leave_s: float = 2.0

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> PushBackSettings:
        """Return the node's settings; UsageError, a ValueError, unless `leave_s` is below `enter_s`."""
        return PushBackSettings(self.enter_s, self.leave_s)


class ZoneRuleConfig(_Strict, frozen=True, kw_only=True, rename={"source": "from"}):
    """A rule for forwards between two zones: ``always``, ``never``, or ``above`` a saving in ms; "*" is any zone.

    Rules from other zones than this node's have no effect here, so that all nodes can have the same list.
    """

    source: str
    to: str
    forward: str
    saving_ms: float = 0.0

    def __post_init__(self) -> None:
        self.rule()

    def rule(self) -> ZoneRule:
        """Return the node's rule; UsageError, a ValueError, for an unknown word or an impossible saving."""
        return ZoneRule(self.forward, self.saving_ms / 1000)


class TenantsConfig(_Strict, frozen=True, kw_only=True):
    """Who may share a cache, and how tenants take turns: docs/tenants.md.

    `header` is the header in which the trusted caller names the tenant; with `required` a request without it is
    refused. `groups` are lists of tenants that share. `body_salt` decides how a client's own `cache_salt` is used. With
    ``trust`` and no header only that salt tells tenants apart. Without `fair` all tenants stand in one line. With it,
    the engine gets a window of work ahead: `window_s` seconds at its speed, and `window_tokens` at least. `weights` are
    shares, and `max_held` bounds the requests that wait before each rank.
    """

    header: str = ""
    groups: dict[str, tuple[str, ...]] = {}
    required: bool = False
    body_salt: str = IGNORE
    fair: bool = True
    window_s: float = 0.25
    window_tokens: int = 2048
    weights: dict[str, float] = {}
    max_held: int = 4096

    def __post_init__(self) -> None:
        if self.body_salt not in (IGNORE, NARROW, TRUST):
            raise ValueError(f"body_salt must be {IGNORE}, {NARROW} or {TRUST}, not {self.body_salt!r}")
        if not self.header and (self.body_salt != TRUST or self.groups or self.required):
            raise ValueError("tenants need a header that names them; only body_salt 'trust' alone does without")
        if self.header.lower().startswith("x-prefixroute-"):
            raise ValueError("the header of tenants must not be one of prefixroute's own")
        if self.window_s < 0 or self.window_tokens < 1 or self.max_held < 2:
            raise ValueError("tenants need window_s >= 0, window_tokens >= 1 and max_held >= 2")
        if any(weight <= 0 for weight in self.weights.values()):
            raise ValueError("the weights of tenants must be above 0")


class SidecarConfig(_Strict, frozen=True, kw_only=True):
    """One node: its name, where it listens, its peers and its engine.

    Other sidecars reach this one at `url`, by default ``http://HOST:PORT`` of `http`. With `learn_peers` one peer is
    enough: the node learns the other nodes from it, and they learn this node, by the address in `gossip`. `zone` is
    this node's zone, `zones` are the rules between zones (docs/zones.md).

    `secrets` authenticate the messages between nodes: the first one signs, signatures under any of them are accepted;
    the default is the domain's secret. SIGHUP makes a running sidecar read them anew, see docs/security.md. Prompts may
    be sent only to `forward_hosts`, whatever address a peer advertises; the default is any host, over http or https.
    """

    node: str
    http: HostPort
    gossip: HostPort
    engine: EngineConfig
    domain: DomainConfig
    peers: tuple[PeerConfig, ...] = ()
    learn_peers: bool = False
    policy: str = "default"
    tenants: TenantsConfig | None = None
    url: str = ""
    secrets: tuple[str, ...] = ()
    forward_hosts: tuple[str, ...] = ()
    timeouts: TimeoutConfig = TimeoutConfig()
    push_back: PushBackConfig = PushBackConfig()
    zone: str = ""
    zones: tuple[ZoneRuleConfig, ...] = ()

    def __post_init__(self) -> None:
        pairs = [(rule.source, rule.to) for rule in self.zones]
        for source, to in pairs:
            if pairs.count((source, to)) > 1:
                raise ValueError(f"two rules of zones are from {source!r} to {to!r}")
        NodeSettings(zone=self.zone, zones=self.zone_rules)
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.node in {peer.node for peer in self.peers}:
            raise ValueError(f"{self.node!r} is listed among its own peers")
        check_tenants(self.prefix_domain, self.tenants)
        given = self.secret_bytes
        if len(given) > 4 or len(set(given)) < len(given) or max(map(len, given)) > 64:
            raise ValueError("secrets must be at most four, all different, of at most 64 bytes")

    @property
    def tells_tenants(self) -> bool:
        """Whether callers name a tenant, by which requests are told apart."""
        return self.tenants is not None and bool(self.tenants.header)

    @property
    def secret_bytes(self) -> tuple[bytes, ...]:
        """The secrets that authenticate, as bytes; the first one signs."""
        return tuple(secret.encode() for secret in self.secrets or (self.domain.secret,))

    @property
    def public_url(self) -> str:
        """The URL to which peers send their forwards."""
        return self.url or f"http://{self.http.host}:{self.http.port}"

    @property
    def node_settings(self) -> NodeSettings:
        """The node's settings: gossip and push-back."""
        contact = f"{self.gossip.host}:{self.gossip.port}"
        return NodeSettings(
            push_back=self.push_back.settings(),
            learn_peers=self.learn_peers,
            contact=contact,
            zone=self.zone,
            zones=self.zone_rules,
        )

    @property
    def zone_rules(self) -> Zones:
        """The node's rules for forwards between zones."""
        return Zones({(rule.source, rule.to): rule.rule() for rule in self.zones})

    @property
    def prefix_domain(self) -> Domain:
        """The domain that this node serves."""
        spec = self.domain
        return Domain(
            model=f"{spec.model}@{spec.revision}" if spec.revision else spec.model,
            tokenizer=spec.tokenizer,
            block_size=spec.block_size,
            secret=spec.secret.encode(),
        )


def check_tenants(domain: Domain, tenants: TenantsConfig | None) -> None:
    """Raise `UsageError` for tenants that a domain cannot keep apart: it has no secret, or groups overlap."""
    if tenants is not None and tenants.header:
        Tenants(domain, tenants.groups)


def make_policy(name: str) -> Policy | None:
    """Return the policy with a name of POLICIES; None for the node's own default."""
    return None if name == DEFAULT_POLICY else POLICY_TYPES[name]()


def load_config(path: Path) -> SidecarConfig:
    """Read a configuration file; UsageError names the file and the offending field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SidecarConfig)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}") from error


def dump_config(config: SidecarConfig, path: Path) -> None:
    """Write a configuration file that `load_config` reads back."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
