"""Who may share a cached prefix with whom: a tenant's name becomes a namespace.

Rules:
1. A tenant is alone unless a group is declared: sharing is only ever declared by name, never inferred.
2. A tenant is in one group at most, and shares with that group only. The group ``"*"`` is everybody who is in no other
   group, unknown tenants and requests without a tenant included. It must be declared without members: `{"*": ()}`.
3. Salts are keyed with the domain's secret, so nobody can guess one from a name. Salts of tenants and of groups are of
   different kinds: a group and a tenant of the same name have different salts.
4. A client's own salt can only narrow: it is hashed together with its tenant's name, so that even the members of one
   group do not share under it.
5. Which tenant a request is of is the trusted caller's word. This file believes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..errors import UsageError
from ..events import Namespace
from .domain import Domain, keyed_digest
from .names import checked_tenant

EVERYBODY = "*"
"""The group of all tenants that are in no other group, where it is declared."""

_SALT_BYTES = 16
_MEMO = 4096
# BLAKE2b's `person`: salts of two kinds never collide, whatever the names.
_OF_TENANT, _OF_GROUP, _NARROWED = "tenant-salt", "group-salt", "narrowed-salt"


class Tenants:
    """Turns tenants into namespaces, alike on every node of a domain.

    `groups` maps a group's name to the tenants that share within it. A tenant that is in no group, known or not, is on
    its own; "" stands for requests that name no tenant, which together are one more tenant. Raises `UsageError` for a
    domain without a secret, since its salts could be computed by anybody, for a tenant in two groups, and for names
    that are empty or longer than `MAX_TENANT_CHARACTERS`.
    """

    def __init__(self, domain: Domain, groups: Mapping[str, Iterable[str]] | None = None) -> None:
        if not domain.secret:
            raise UsageError("tenants need a domain with a secret: without one everybody can compute their salts")
        self._domain = domain
        self._group: dict[str, str] = {}
        self._shared = False
        for group, members in (groups or {}).items():
            self._declare(group, members)
        self._own = lru_cache(_MEMO)(self._derive)

    def _declare(self, group: str, members: Iterable[str]) -> None:
        if isinstance(members, str):
            raise UsageError(f"the group {group!r} needs a list of tenants, not one text")
        listed = [checked_tenant(tenant) for tenant in members]
        if group == EVERYBODY:
            if listed:
                raise UsageError(f"the group {EVERYBODY!r} has no list: it is everybody who is in no other group")
            self._shared = True
            return
        if not checked_tenant(group):
            raise UsageError("a group needs a name")
        for tenant in listed:
            if not tenant:
                raise UsageError(f"the group {group!r} lists a tenant without a name: requests without one never share")
            other = self._group.setdefault(tenant, group)
            if other != group:
                raise UsageError(f"{tenant!r} is in the groups {other!r} and {group!r}: a tenant is in one at most")

    def group(self, tenant: str) -> str:
        """Return the group that a tenant shares with, "" if none."""
        return self._group.get(tenant, EVERYBODY if self._shared else "")

    def namespace(self, tenant: str, lora: str = "", salt: str = "") -> Namespace:
        """Return where a tenant's prompts are cached; `salt` is the client's own, and narrows it.

        The namespace's salt is 32 hex digits, fit for an engine's `cache_salt`. O(1): some 1 us.
        Raises `UsageError` for a name that is too long.
        """
        if not salt:
            return Namespace(lora, self._own(tenant))
        # Not memoised: a client could fill the memo with texts of its own.
        return Namespace(lora, self._hex(_NARROWED, checked_tenant(tenant), salt))

    def _derive(self, tenant: str) -> str:
        group = self.group(checked_tenant(tenant))
        return self._hex(_OF_GROUP, group) if group else self._hex(_OF_TENANT, tenant)

    def _hex(self, purpose: str, *parts: str) -> str:
        # A header's or an engine's words may hold half a surrogate pair.
        words = (part.encode("utf-8", "surrogatepass") for part in parts)
        return keyed_digest(self._domain.secret, purpose, self._domain.fingerprint, *words, size=_SALT_BYTES).hex()
