"""Proofs that a node of the fleet wrote something: tags keyed with the fleet's secrets, which may be two at a time.

Rule: the first secret makes the tags, a tag under any secret is accepted, and an empty secret makes no tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest

from prefixroute import Domain

_TAG_BYTES = 16


class Seals:
    """Tags for one `purpose` (at most 16 bytes) in one domain; by default under the domain's own secret. O(bytes)."""

    def __init__(self, domain: Domain, purpose: bytes, secrets: Sequence[bytes] = ()) -> None:
        self._fingerprint = domain.fingerprint
        self._purpose = purpose
        self.set_secrets(secrets or (domain.secret,))

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """From now on, seal with the first of `secrets`, and accept tags under any of them."""
        self._keyed = [
            blake2b(self._fingerprint, key=secret, digest_size=_TAG_BYTES, person=self._purpose)
            for secret in secrets
            if secret
        ]

    def __bool__(self) -> bool:
        """Whether there is a secret to seal with."""
        return bool(self._keyed)

    def seal(self, *parts: bytes) -> str:
        """Return the tag of these parts together, in hex; IndexError without a secret.

        The parts are joined without separators: where that matters, the caller must include their lengths.
        """
        return _tag(self._keyed[0], parts)

    def proves(self, tag: str, *parts: bytes) -> bool:
        """Return whether `tag`, which may be forged, is the tag of these parts under one of the secrets."""
        return any(compare_digest(_tag(keyed, parts).encode(), tag.encode()) for keyed in self._keyed)


def _tag(keyed: blake2b, parts: Sequence[bytes]) -> str:
    tag = keyed.copy()
    for part in parts:
        tag.update(part)
    return tag.hexdigest()
