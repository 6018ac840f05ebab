"""The `tenants` of a sidecar's configuration: who names a tenant, who shares, what a client's salt counts for, turns.

Rule: what cannot be kept is refused when the configuration is read, not when a request comes.
"""

from __future__ import annotations

import msgspec

from prefixroute import Domain, Tenants

IGNORE, NARROW, TRUST = "ignore", "narrow", "trust"
"""Words for `TenantsConfig.body_salt`."""


class TenantsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may share a cache, and how tenants take turns: docs/tenants.md.

    `header` is where the trusted caller names the tenant; with `required` a request without it is refused. `groups` are
    lists of tenants that share. `body_salt` says what a client's own `cache_salt` counts for. With ``trust`` and no
    header nobody is told apart but by that salt. Without `fair` all tenants stand in one line; a window of `window_s`
    at the engine's speed, and of `window_tokens` at least, is given to the engine ahead, `weights` are shares, and
    `max_held` bounds the requests that wait before each rank.
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


def check_tenants(domain: Domain, tenants: TenantsConfig | None) -> None:
    """Raise `UsageError` for tenants that a domain cannot keep apart: it has no secret, or groups overlap."""
    if tenants is not None and tenants.header:
        Tenants(domain, tenants.groups)
