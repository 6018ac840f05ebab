"""The wire: datagrams in and out, as pure functions.

Layout of a datagram (docs/wire.md has it in full; golden files pin it):

    magic "PRT2" 4 | kind 1 | domain fingerprint 8 | tag 16 | body: MessagePack

Rules:
1. The tag is keyed BLAKE2b-128 over everything but itself, with a secret of the cluster's. It is checked before a byte
   of the body is read.
2. Every length is bounded by the datagram's own length and by the limits below before anything is allocated.
3. Any bytes give a value or `DecodeError`; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import IntEnum
from hashlib import blake2b
from hmac import compare_digest
from math import inf
from operator import attrgetter, itemgetter
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from ..errors import DecodeError
from ..keys.chain import STRIDE, WIRE_BITS
from ..load import Advert, LoadReport, PushBackState

MAGIC = b"PRT2"
TAG_BYTES = 16
_FRONT_BYTES = len(MAGIC) + 1 + 8
HEADER_BYTES = _FRONT_BYTES + TAG_BYTES
MAX_DATAGRAM_BYTES = 65536
KEY_LIMIT = 1 << WIRE_BITS
MAX_MISSING = 16
"""Ranges that a receiver names of a transfer: at 30 % loss a burst of 54 datagrams leaves some 11 holes."""

MARK_MASK = 0xFFFF
"""The part of a checksum that every vector entry carries."""

LAST_BEAT = 2**63 - 1
"""The heartbeat of an owner's last word: the endpoint has left, and no word of this incarnation can follow."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=80)]
Contact = Annotated[str, msgspec.Meta(max_length=80)]
Zone = Annotated[str, msgspec.Meta(max_length=40)]
Url = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=64)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
U48 = Annotated[int, msgspec.Meta(ge=0, le=KEY_LIMIT)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Ordinal = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""An incarnation or a version of something that exists: 0 is nothing."""
U64 = int
"""Compared only, never used to count or allocate; msgspec bounds it to 64 bits by its own encoding."""
U16 = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Stride = Annotated[int, msgspec.Meta(ge=1, le=STRIDE)]
Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]


Parts: TypeAlias = Sequence[bytes]
"""Entries or updates that `encode_part` has encoded."""


class Kind(IntEnum):
    """What a datagram asks for: SYN an answer, SYN_ACK what its sender lacks, ACK nothing."""

    SYN = 1
    SYN_ACK = 2
    ACK = 3


class LoadWire(msgspec.Struct, frozen=True, array_like=True):
    """What an endpoint says of its load, in the units of the names; 0 is not known. `_TERMS` says what each is."""

    running: U32 = 0
    waiting: U32 = 0
    queued_tokens: U63 = 0
    prefill_tokens_per_s: U32 = 0
    overhead_us: U32 = 0
    capacity_tokens: U63 = 0
    kv_used_percent: Percent = 0
    state: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    ttl_ms: U32 = 0
    reason: Reason = ""
    hit_unit: U32 = 0
    confidence_percent: Percent = 100
    held_tokens: U63 = 0
    eviction_age_ms: U32 = 0
    arrivals_per_ks: U32 = 0
    home_percent: Percent = 0
    demand_permille: U32 = 0


class Want(msgspec.Struct, frozen=True, array_like=True):
    """A transfer that its sender has begun to receive, and the ranges of keys that it lacks of it."""

    incarnation: Ordinal
    since: U63
    version: Ordinal
    missing: Annotated[list[tuple[U48, U48]], msgspec.Meta(min_length=1, max_length=MAX_MISSING)]


class VectorEntry(msgspec.Struct, frozen=True, array_like=True):
    """What a node says it holds of one endpoint: version 0 is nothing.

    `mark` are the low 16 bits of the set's checksum. `heartbeat` orders the owner's words, and `age_ms` is how old the
    last one is. `revision` orders the loads of one incarnation; `load` is left out where the receiver has it.
    """

    endpoint: Name
    incarnation: Ordinal
    heartbeat: U63
    version: U63 = 0
    mark: U16 = 0
    age_ms: U32 = 0
    revision: U63 = 0
    load: LoadWire | None = None
    want: Want | None = None


class Update(msgspec.Struct, frozen=True, array_like=True):
    """A change of one endpoint's set, `since` -> `version`, or the part of it with `lower` <= key < `upper`.

    A snapshot has `since` 0; `upper` 0 is the end. `checksum` and `anchor_stride` are those of the whole set at
    `version`. `added` and `removed` are coded by `keys.rice`; `url`, `contact` and `zone` ride in snapshots.
    """

    endpoint: Name
    incarnation: Ordinal
    since: U63
    version: Ordinal
    checksum: U64
    anchor_stride: Stride
    lower: U48
    upper: U48
    added: bytes
    removed: bytes
    url: Url = ""
    contact: Contact = ""
    zone: Zone = ""

    @property
    def whole(self) -> bool:
        """Whether this part is the whole change."""
        return self.lower == 0 and self.upper in (0, KEY_LIMIT)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A datagram's body. `domain` (its readable fields) and `contact` (where the sender takes datagrams) are there
    until the sender has heard from the receiver.

    `complete` says that `vector` lists every endpoint that the sender holds. `life` is the sender's run, `sequence`
    numbers its datagrams, and `to` is the receiver's life as far as the sender knows it: see `freshness`.
    """

    sender: Name
    nonce: U63 = 0
    echo: U63 = 0
    complete: bool = False
    domain: Annotated[dict[Name, Text], msgspec.Meta(max_length=16)] | None = None
    vector: list[VectorEntry] = []
    updates: list[Update] = []
    contact: Contact = ""
    life: U32 = 0
    sequence: U63 = 0
    to: U32 = 0


class Stamp(NamedTuple):
    """What makes a datagram one of a kind: its sender's life and number, and the receiver's life."""

    life: int
    sequence: int
    to: int


class Envelope(msgspec.Struct, frozen=True):
    """A datagram that was verified: kind, fingerprint of its domain, body, and the number of the secret that signed."""

    kind: Kind
    fingerprint: bytes
    message: Message
    signed: int = 0


_LONGEST_STAMP = Stamp(2**32 - 1, 2**63 - 1, 2**32 - 1)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class _Term(NamedTuple):
    """One term of an advert: where it is, and the way to the wire and back; `read` is None for a value as it is."""

    path: str
    tell: Callable[[Any], Any]
    read: Callable[[Any], Any] | None = None


def _count(path: str, most: int) -> _Term:
    """A term that is a whole number."""
    return _Term(path, lambda value: min(round(value), most))


def _scaled(path: str, most: int, scale: float) -> _Term:
    """A term that travels in units of 1 / `scale`."""
    return _Term(path, lambda value: min(round(value * scale), most), lambda told: told / scale)


def _tell_text(text: str) -> str:
    # An engine's words may hold half a surrogate pair, which no encoder takes.
    return text[:64].encode("utf-8", "replace").decode()


def _tell_age(age_s: float) -> int:
    """Milliseconds; 0 stands for infinity, so a finite age is 1 at least."""
    return max(1, min(round(age_s * 1000), _MAX_32)) if age_s < inf else 0


def _read_age(age_ms: int) -> float:
    return age_ms / 1000 if age_ms else inf


_MAX_32, _MAX_63 = 2**32 - 1, 2**63 - 1

_TERMS = (
    _count("report.running", _MAX_32),
    _count("report.waiting", _MAX_32),
    _count("report.queued_tokens", _MAX_63),
    _scaled("report.prefill_tokens_per_s", _MAX_32, 1.0),
    _scaled("report.overhead_s", _MAX_32, 1e6),
    _count("report.capacity_tokens", _MAX_63),
    _scaled("report.kv_used", 100, 100),
    _Term("state", int, PushBackState),
    _scaled("ttl_s", _MAX_32, 1000),
    _Term("report.reason", _tell_text),
    _count("hit_unit", _MAX_32),
    _scaled("confidence", 100, 100),
    _count("held_tokens", _MAX_63),
    _Term("eviction_age_s", _tell_age, _read_age),
    _scaled("arrivals_per_s", _MAX_32, 1000),
    _scaled("home", 100, 100),
    _scaled("demand", _MAX_32, 1000),
)
"""All terms, in the order of `LoadWire`. A new one is a row here, and its field in `LoadWire` and in the advert.

What has no row does not travel, but for `LoadReport.refusing`, which is the state `REFUSING`."""

_STAYS = ("asleep", "block_tokens")

_TELL = [(attrgetter(term.path), term.tell) for term in _TERMS]
_READ = [term.read for term in _TERMS]
_PLACES = {term.path: at for at, term in enumerate(_TERMS)} | {"report.refusing": len(_TERMS)}
_OF_REPORT = itemgetter(*(_PLACES[f"report.{field.name}"] for field in fields(LoadReport) if field.name not in _STAYS))
_OF_ADVERT = itemgetter(*(_PLACES[name] for name in Advert._fields if name != "report"))
"""What picks the arguments of a report, and those of an advert behind its report, from the values of all terms."""


def load_to_wire(advert: Advert) -> LoadWire:
    """Return the form of an advert that travels in a vector."""
    return LoadWire(*[tell(value_of(advert)) for value_of, tell in _TELL])


def load_from_wire(wire: LoadWire) -> Advert:
    """Return the advert that a vector's entry tells."""
    told = zip(msgspec.structs.astuple(wire), _READ, strict=True)
    values = [value if read is None else read(value) for value, read in told]
    values.append(wire.state == PushBackState.REFUSING)
    return Advert(LoadReport(*_OF_REPORT(values)), *_OF_ADVERT(values))


def encode_part(part: VectorEntry | Update) -> bytes:
    """Encode one entry or update, so that a sender can weigh it before it picks what fits.

    A zone that is not known is left out: a fleet without zones says what it said before there were any.
    """
    if isinstance(part, Update) and not part.zone:
        return _encoder.encode(msgspec.structs.astuple(part)[:-1])
    return _encoder.encode(part)


def encode(
    kind: Kind,
    fingerprint: bytes,
    secret: bytes,
    head: Message,
    vector: Parts = (),
    updates: Parts = (),
    stamp: Stamp | None = None,
) -> bytes:
    """Encode a datagram from `head` and parts that were encoded by `encode_part`; a node stamps each of its own."""
    front, body = MAGIC + bytes([kind]) + fingerprint, _body(head, vector, updates, stamp)
    return front + _tag(secret, front, body) + body


def overhead_bytes(head: Message) -> int:
    """Upper bound of what a datagram costs beside its parts."""
    return HEADER_BYTES + len(_body(head, (), (), _LONGEST_STAMP)) + 8


def _body(head: Message, vector: Parts, updates: Parts, stamp: Stamp | None) -> bytes:
    fields: list[Any] = [head.sender, head.nonce, head.echo, head.complete, head.domain]
    fields += [[msgspec.Raw(part) for part in vector], [msgspec.Raw(part) for part in updates]]
    if head.contact or stamp is not None:
        fields += [head.contact, *(stamp or ())]
    return _encoder.encode(fields)


def verify(data: bytes, *secrets: bytes) -> int:
    """Return which of these secrets signed a datagram. O(bytes), 2 us.

    Raises `DecodeError` of kind ``oversized``, ``truncated``, ``magic``, ``version`` or ``forged``.
    """
    if len(data) > MAX_DATAGRAM_BYTES:
        raise DecodeError("oversized", f"{len(data)} bytes, at most {MAX_DATAGRAM_BYTES}")
    if len(data) < HEADER_BYTES:
        raise DecodeError("truncated", f"{len(data)} bytes, at least {HEADER_BYTES}")
    if data[:3] != MAGIC[:3]:
        raise DecodeError("magic", "not a prefixroute datagram")
    if data[:4] != MAGIC:
        raise DecodeError("version", f"wire version {data[3:4]!r}, this is {MAGIC[3:4]!r}")
    front, tag, body = data[:_FRONT_BYTES], data[_FRONT_BYTES:HEADER_BYTES], data[HEADER_BYTES:]
    for signed, secret in enumerate(secrets):
        if compare_digest(tag, _tag(secret, front, body)):
            return signed
    raise DecodeError("forged", "the tag does not verify: corrupted, forged, or made with another secret")


def decode(data: bytes, *secrets: bytes) -> Envelope:
    """Decode and verify a datagram that was signed with one of these secrets.

    Raises `DecodeError` as `verify` does, or of kind ``kind`` or ``malformed``. A foreign domain is no error here:
    compare `Envelope.fingerprint`.
    """
    signed = verify(data, *secrets)
    try:
        kind = Kind(data[4])
    except ValueError:
        raise DecodeError("kind", f"unknown datagram kind {data[4]}") from None
    try:
        message = _decoder.decode(data[HEADER_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError("malformed", str(error)) from None
    return Envelope(kind, data[5:_FRONT_BYTES], message, signed)


def _tag(secret: bytes, front: bytes, body: bytes) -> bytes:
    state = blake2b(front, digest_size=TAG_BYTES, key=secret, person=b"datagram-tag")
    state.update(body)
    return state.digest()
