"""Identity: what must be equal for two nodes' keys to be comparable.

Rules:
1. A domain's fingerprint travels in every datagram; its readable fields travel on first contact, so that a
   mismatch can name the field that differs.
2. Root keys are keyed with the cluster secret: nobody without it can compute or forge a key.
3. Two namespaces share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

from ..errors import UsageError
from ..events import Namespace

HASH_VERSION = 1
"""Version of the chain's definition: bump it when `chain.key` changes."""

MAX_SECRET_BYTES = 64
"""BLAKE2b's own limit for a key."""

MAX_SECRETS = 4
"""Secrets that are good at one time: a forged datagram costs a check against each of them."""

MAX_FIELD_CHARS = 256
"""Bound of a readable field, so that a peer's domain fits a datagram."""


def keyed_digest(secret: bytes, purpose: str, *parts: bytes, size: int = 8) -> bytes:
    """Return the keyed BLAKE2b of length-prefixed parts; `purpose` separates the uses of one secret. O(bytes)."""
    state = blake2b(digest_size=size, key=secret, person=purpose.encode()[:16])
    for part in parts:
        state.update(len(part).to_bytes(4, "little"))
        state.update(part)
    return state.digest()


def checked_secrets(secrets: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the secrets, of which each authenticates and the first signs. Raises `UsageError` for unusable ones."""
    if isinstance(secrets, (str, bytes)) or not isinstance(secrets, Sequence) or not 0 < len(secrets) <= MAX_SECRETS:
        raise UsageError(f"secrets must be a list of 1 to {MAX_SECRETS}, the one that signs first")
    for secret in secrets:
        if not isinstance(secret, bytes) or len(secret) > MAX_SECRET_BYTES:
            raise UsageError(f"a secret must be at most {MAX_SECRET_BYTES} bytes; pass a hash of a longer one")
    if len(set(secrets)) < len(secrets):
        raise UsageError("secrets must differ from each other")
    return tuple(secrets)


@dataclass(frozen=True, slots=True)
class Domain:
    """What must be equal for keys to be comparable: model, tokenizer, block size, policy and secret.

    `tokenizer` is whatever names the tokenizer's exact content, a hash of its file for instance.
    `block_size` is the canonical block in tokens, whatever blocks or pages the engines use. Nodes compare by
    `fingerprint`, 64 bits over all of it. The secret keys the hashes; unless a node is given others, it authenticates
    datagrams as well. Raises `UsageError` for a field that is empty, too long or out of range.
    """

    model: str
    tokenizer: str
    block_size: int = 16
    namespace_policy: str = "lora+salt"
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "namespace_policy"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= MAX_FIELD_CHARS:
                raise UsageError(f"Domain.{name} must be a text of 1 to {MAX_FIELD_CHARS} characters, not {value!r}")
        if (
            isinstance(self.block_size, bool)
            or not isinstance(self.block_size, int)
            or not 1 <= self.block_size <= 4096
        ):
            raise UsageError(f"Domain.block_size must be 1 to 4096 tokens, not {self.block_size!r}")
        if not isinstance(self.secret, bytes) or len(self.secret) > MAX_SECRET_BYTES:
            raise UsageError(f"Domain.secret must be at most {MAX_SECRET_BYTES} bytes; pass a hash of a longer one")

    def fields(self) -> dict[str, str]:
        """Return the readable fields in a fixed order; the secret appears only as a MAC over the empty message."""
        return {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "block_size": str(self.block_size),
            "hash_version": str(HASH_VERSION),
            "namespace_policy": self.namespace_policy,
            "secret": keyed_digest(self.secret, "secret-id").hex(),
        }

    @property
    def fingerprint(self) -> bytes:
        """Eight bytes that two domains share exactly when all their fields are equal, but for a chance of 2**-64."""
        return _fingerprint(self)

    @property
    def mix(self) -> int:
        """64 bits of the secret that enter every seed of the chain."""
        return int.from_bytes(keyed_digest(self.secret, "chain-mix"), "little")

    def root_key(self, namespace: Namespace) -> int:
        """Return a namespace's key of depth 0: keyed BLAKE2b over (domain, namespace). Memoised."""
        return _root_key(self, namespace)


@lru_cache(maxsize=256)
def _fingerprint(domain: Domain) -> bytes:
    return keyed_digest(domain.secret, "fingerprint", *(f"{k}={v}".encode() for k, v in domain.fields().items()))


@lru_cache(maxsize=65536)
def _root_key(domain: Domain, namespace: Namespace) -> int:
    # An engine's words may hold half a surrogate pair.
    words = (word.encode("utf-8", "surrogatepass") for word in (namespace.lora, namespace.salt))
    return int.from_bytes(keyed_digest(domain.secret, "namespace-root", domain.fingerprint, *words), "little")
