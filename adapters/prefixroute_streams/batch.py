"""One published batch, as bytes or as the publisher's own objects, to engine-neutral events.

Rules:
1. Any bytes give an `EngineBatch` or `DecodeError`. The latter only when the batch itself cannot be read: a bad
   event becomes an `UnknownEvent` with a reason, and its siblings survive.
2. Events are decoded by tag, from arrays and from maps. Unknown fields are ignored and missing ones are None.
   Arrays may have any length.
3. Maps of an engine's newest layout are read by it (`layout`), all others and arrays field by field.
4. An object is turned into what the engine's encoder would write of it; after that both ways are the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from prefixroute.errors import DecodeError
from prefixroute.events import EngineBatch, EngineEvent, UnknownEvent

from .fields import Fields, MalformedError
from .layout import Layout
from .source import MAX_PAYLOAD_BYTES

TAG_CHARS: Final = 64
"""The longest tag that is kept. Tags become names of counters, so a hostile one must stay short."""


class EventForm(NamedTuple):
    """How events of one tag are read: the field order of array-shaped ones, tag excluded, and what to make of them."""

    names: tuple[str, ...]
    decode: Callable[[Fields], Sequence[EngineEvent]]


Forms: TypeAlias = Mapping[str, EventForm]
"""An engine's events by tag."""

_BAD_BYTES: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, TypeError)
"""What msgspec raises for bad bytes; the last two before 0.23, for invalid text and for keys that cannot be hashed."""
_UNDECODABLE: Final = object()
_plain: Final = msgspec.msgpack.Decoder().decode
_raw_items: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def decode_payload(payload: bytes, forms: Forms, layout: Layout | None = None) -> EngineBatch:
    """Decode the payload frame of one live or replayed message, by `layout` if it is of it.

    Raises `DecodeError` when the batch as a whole cannot be read; its `kind` is one of ``too_large``,
    ``malformed``, ``depth``, ``shape``, ``timestamp`` and ``rank``. O(bytes); nothing is allocated because a
    length field claims it.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise DecodeError("too_large", f"payload of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    typed = layout.decode(payload) if layout is not None else None
    if typed is not None:
        return typed
    try:
        batch = _plain(payload)
    except _BAD_BYTES:
        batch = _decode_apart(payload)
    if type(batch) is not list or len(batch) < 2:
        raise DecodeError("shape", "a batch is an array of a timestamp, events and perhaps a rank")
    return _batch(batch[0], batch[1], batch[2] if len(batch) > 2 else None, forms)


def decode_objects(batch: object, rank_name: str, rank: int, forms: Forms) -> EngineBatch:
    """Decode the object that an engine hands to a publisher in its own process; nothing of it is kept.

    `rank_name` is the attribute of the data-parallel rank, `rank` counts when that is None, as it is in SGLang. Raises
    `DecodeError` as `decode_payload` does. O(events' sizes).
    """
    ts, events, told = (getattr(batch, name, None) for name in ("ts", "events", rank_name))
    shaped = [_shaped(event) for event in events] if isinstance(events, (list, tuple)) else None
    return _batch(ts, shaped, rank if told is None else told, forms)


def _batch(ts: object, events: object, rank: object, forms: Forms) -> EngineBatch:
    if type(events) is not list:
        raise DecodeError("shape", "the second element of a batch is an array of events")
    if type(ts) not in (int, float) or not math.isfinite(ts):  # type: ignore[arg-type]
        raise DecodeError("timestamp", "the first element of a batch is a finite number of seconds")
    if rank is not None and (type(rank) is not int or rank < 0):
        raise DecodeError("rank", "the third element of a batch is a data-parallel rank or null")
    decoded: list[EngineEvent] = []
    for event in events:
        decoded.extend(_decode_event(event, forms))
    return EngineBatch(tuple(decoded), rank or 0, float(ts))  # type: ignore[arg-type]


def _decode_apart(payload: bytes) -> list[object]:
    """Decode event by event, so that an invalid string in one event costs that event alone."""
    try:
        items = _raw_items(payload)
        head: list[object] = [_plain(item) for item in items[:1]]
        events = [_decode_alone(raw) for raw in _raw_items(items[1])] if len(items) > 1 else []
        return [*head, events, *(_plain(item) for item in items[2:3])]
    except RecursionError as error:
        raise DecodeError("depth", "nested too deeply") from error
    except _BAD_BYTES as error:
        raise DecodeError("malformed", str(error)) from error


def _decode_alone(raw: msgspec.Raw) -> object:
    try:
        return _plain(raw)
    except _BAD_BYTES:
        return _UNDECODABLE


def _decode_event(event: object, forms: Forms) -> Sequence[EngineEvent]:
    if event is _UNDECODABLE:
        return (UnknownEvent("", "undecodable"),)
    if type(event) is dict:
        tag = event.get("type")
    elif type(event) is list and event:
        tag = event[0]
    else:
        return (UnknownEvent("", "neither an array nor a map"),)
    if type(tag) is not str:
        return (UnknownEvent("", "no tag"),)
    form = forms.get(tag)
    if form is None:
        return (UnknownEvent(tag[:TAG_CHARS]),)
    fields: Fields = event if type(event) is dict else dict(zip(form.names, event[1:], strict=False))
    try:
        return form.decode(fields)
    except MalformedError as error:
        return (UnknownEvent(tag, str(error)),)


# --- objects -----------------------------------------------------------------------------------------------


def _shaped(event: object) -> object:
    """What the engine's encoder would make of an event: an array that begins with its tag, or a map with a ``type``."""
    kind = type(event)
    config = getattr(kind, "__struct_config__", None)
    try:
        values = _values(event)
    except Exception:  # an attribute may be a property of an engine that we have not met: it must not stop the rest
        return _UNDECODABLE
    if values is None:
        return _UNDECODABLE
    tag = getattr(config, "tag", None) or kind.__name__
    return [tag, *values.values()] if getattr(config, "array_like", False) else {"type": tag, **values}


def _values(thing: object) -> dict[str, object] | None:
    names = getattr(type(thing), "__struct_fields__", None) or getattr(thing, "__dict__", None)
    if names is None:
        return {} if hasattr(type(thing), "__struct_fields__") else None
    return {name: _value(getattr(thing, name)) for name in names}


def _value(value: object) -> object:
    if value is None or isinstance(value, (list, int, float, bytes, dict)) or type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # a member of a text enumeration
    if isinstance(value, tuple):
        return list(value)
    if hasattr(type(value), "__struct_fields__"):
        return _values(value)
    listed = getattr(value, "tolist", None)  # arrays of the standard library and of numpy
    return listed() if listed is not None else value
