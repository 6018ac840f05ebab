"""Names of nodes, endpoints, zones and tenants, and addresses: how they are made, and which are refused.

An endpoint is named "node/name", so neither part has a slash.

| name | bound | why |
|---|---|---|
| node, and endpoint within its node | 1 to 40 characters, no slash | both travel in every vector entry |
| zone | at most 40 bytes, not "*" | it travels in snapshots; "*" stands for all other zones in rules |
| tenant, and group of tenants | at most 128 characters | they are labels of metrics, and travel in a header |
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from ..errors import UsageError

ANY: Final = "*"
"""In a rule: every zone that no other rule names."""

MAX_NAME_CHARACTERS: Final = 40
MAX_ZONE_BYTES: Final = 40
MAX_TENANT_CHARACTERS: Final = 128


def owner_of(endpoint: str) -> str:
    """Return the node of an endpoint named "node/name"; "" if its name has another form."""
    node, _, name = endpoint.partition("/")
    return node if name else ""


def checked_name(text: str) -> str:
    """Return a node's name, or an endpoint's within its node. Raises `UsageError` for one that cannot be."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME_CHARACTERS or "/" in text:
        raise UsageError(f"a name has 1 to {MAX_NAME_CHARACTERS} characters and no slash, not {text!r}")
    return text


def checked_zone(zone: str) -> str:
    """Return the label of a node's zone. Raises `UsageError` for one that cannot be."""
    try:
        fits = isinstance(zone, str) and len(zone.encode()) <= MAX_ZONE_BYTES and zone != ANY
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise UsageError(f"a zone is a label of at most {MAX_ZONE_BYTES} bytes, and not {ANY!r}; got {zone!r}")
    return zone


def checked_tenant(name: str) -> str:
    """Return the name of a tenant or a group. Raises `UsageError` for one that cannot be; "" is no name, but can be."""
    if not isinstance(name, str) or len(name) > MAX_TENANT_CHARACTERS:
        raise UsageError(f"a tenant's name is a text of at most {MAX_TENANT_CHARACTERS} characters")
    return name


def checked_address(address: Hashable) -> Hashable:
    """Return a transport's address, which is opaque here. Raises `UsageError` for one that is not hashable."""
    try:
        hash(address)
    except TypeError:
        raise UsageError(f"an address must be hashable, as a tuple (host, port), not {address!r}") from None
    return address
