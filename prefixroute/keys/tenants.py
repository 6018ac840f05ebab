"""Who may share a cached prefix with whom: a tenant's name becomes a namespace.

Rules:
1. A tenant is alone unless a group is declared. Sharing is said by name, never found out.
2. A tenant is in one group at most, and shares with that group only. The group ``"*"`` is everybody who is in no other
   group, unknown tenants and the nameless included; it has to be declared, with no members: `{"*": ()}`.
3. Salts are keyed with the domain's secret, and the kinds of their owners are kept apart: nobody guesses one from a
   name, and a group that is called as a tenant is has another salt.
4. What a client adds can only narrow: it is hashed together with its own tenant's name, so that even the members of one
   group do not meet under it.
5. Who calls is the trusted caller's word. This file believes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..errors import UsageError
from ..events import Namespace
from .domain import Domain, keyed_digest

MAX_NAME_CHARS = 128
"""Of a tenant's or group's name: they are labels of metrics, and travel in a header."""

EVERYBODY = "*"
"""The group of all who are in no other one, where it is declared."""

_SALT_BYTES = 16
_MEMO = 4096
# Each is BLAKE2b's `person`: salts of two kinds never meet, whatever the names.
_OF_TENANT, _OF_GROUP, _NARROWED = "tenant-salt", "group-salt", "narrowed-salt"


class Tenants:
    """Turns tenants into namespaces, alike on every node of a domain.

    `groups` maps a group's name to the tenants that share within it. A tenant that is in no group, known or not, is on
    its own; "" stands for requests that name no tenant, together one tenant more. Raises `UsageError` for a domain
    without a secret, since its salts could be computed by anybody, for a tenant in two groups, and for names that are
    empty or longer than `MAX_NAME_CHARS`.
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
        listed = [checked_name(tenant) for tenant in members]
        if group == EVERYBODY:
            if listed:
                raise UsageError(f"the group {EVERYBODY!r} has no list: it is everybody who is in no other group")
            self._shared = True
            return
        if not checked_name(group):
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
        # A client's texts are remembered by nobody.
        return Namespace(lora, self._hex(_NARROWED, checked_name(tenant), salt))

    def _derive(self, tenant: str) -> str:
        group = self.group(checked_name(tenant))
        return self._hex(_OF_GROUP, group) if group else self._hex(_OF_TENANT, tenant)

    def _hex(self, purpose: str, *parts: str) -> str:
        # A header's or an engine's words may hold half a surrogate pair.
        words = (part.encode("utf-8", "surrogatepass") for part in parts)
        return keyed_digest(self._domain.secret, purpose, self._domain.fingerprint, *words, size=_SALT_BYTES).hex()


def checked_name(name: str) -> str:
    """Return a tenant's name as it is. Raises `UsageError` for one that cannot be used."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
        raise UsageError(f"a tenant's name is a text of at most {MAX_NAME_CHARS} characters")
    return name
