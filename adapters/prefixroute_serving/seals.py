"""Proofs that a node of the fleet wrote something: tags keyed with the fleet's secrets, which may be two at a time.

Rule: the first secret seals, each is good, and an empty one seals nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest

from prefixroute import Domain

_TAG_BYTES = 16


class Seals:
    """Seals for one `purpose`, at most 16 bytes, of one domain; by default with the domain's own secret. O(bytes)."""

    def __init__(self, domain: Domain, purpose: bytes, secrets: Sequence[bytes] = ()) -> None:
        self._fingerprint = domain.fingerprint
        self._purpose = purpose
        self.set_secrets(secrets or (domain.secret,))

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Seal with the first of `secrets` from now on, and take what is sealed with any."""
        self._keyed = [
            blake2b(self._fingerprint, key=secret, digest_size=_TAG_BYTES, person=self._purpose)
            for secret in secrets
            if secret
        ]

    def __bool__(self) -> bool:
        """Whether there is a secret to seal with."""
        return bool(self._keyed)

    def seal(self, *parts: bytes) -> str:
        """The tag of these parts, in hex. Where one ends is the caller's to make plain; IndexError without a secret."""
        return _tag(self._keyed[0], parts)

    def proves(self, tag: str, *parts: bytes) -> bool:
        """Whether `tag`, anybody's word, is a seal of these parts."""
        return any(compare_digest(_tag(keyed, parts).encode(), tag.encode()) for keyed in self._keyed)


def _tag(keyed: blake2b, parts: Sequence[bytes]) -> str:
    tag = keyed.copy()
    for part in parts:
        tag.update(part)
    return tag.hexdigest()
