"""Fields of an event, read with suspicion. vLLM and SGLang share names and meanings; handles are each engine's own.

Rules:
1. A field that cannot be used raises `MalformedError`, whose text becomes the reason of an `UnknownEvent`.
2. When content identity is in doubt the event is not mappable: an under-estimate costs a cold prefill somewhere
   else, a false match costs one here and misleads every peer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Final, TypeAlias

from prefixroute.events import GPU, ContentSpan

MAX_BLOCK_SIZE: Final = 1 << 20
"""No cache group has blocks of more tokens; hybrid models inflate them to a few thousand (vllm#43258)."""

MAX_WINDOW: Final = 1 << 40
"""Far above the context of any model."""

MASK_64: Final = (1 << 64) - 1
_MEDIUM_CHARS: Final = 64

Fields: TypeAlias = dict[object, object]
"""An event's fields by name."""


class MalformedError(Exception):
    """A field cannot be used; the text says which and why."""


def read_tokens(fields: Fields) -> array[int]:
    """Return ``token_ids``, packed; empty when the engine did not say."""
    tokens = fields.get("token_ids")
    if tokens is None:
        return array("I")
    if type(tokens) is not list:
        raise MalformedError("token_ids: not a list")
    try:
        return array("I", tokens)  # checks every token in C, 5 ns each, and packs them once for all users
    except (TypeError, OverflowError):
        raise MalformedError("token_ids: not ints from 0 to 2**32 - 1") from None


def read_count(fields: Fields, name: str, most: int) -> int:
    """Return a field that is a number from 0 to `most`; 0 when it is not there."""
    value = fields.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= most:
        raise MalformedError(f"{name}: not an int from 0 to {most}")
    return value


def read_text(fields: Fields, name: str) -> str:
    """Return a field that is a text; "" when it is not there."""
    value = fields.get(name)
    if value is None:
        return ""
    if type(value) is not str:
        raise MalformedError(f"{name}: not a string")
    return value


def read_lora(fields: Fields) -> str:
    """Return what tells the LoRA adapter: its name, or else its number."""
    number = fields.get("lora_id")
    lora = read_text(fields, "lora_name")
    if not lora and number is not None and type(number) is not int:
        raise MalformedError("lora_id: not an int")
    return lora_of(lora, number)


def lora_of(name: str | None, number: object) -> str:
    """Return the adapter's name, or else what its number makes of it; "" for none."""
    return name or ("" if number is None else f"id:{number}")


def read_tier(fields: Fields, tiers: Mapping[str, str]) -> str:
    """Return the tier that ``medium`` names, by the engine's table of lower-case media; an unknown one names itself."""
    return tier_of(read_text(fields, "medium"), fields.get("locality"), tiers)


def tier_of(medium: str | None, locality: object, tiers: Mapping[str, str]) -> str:
    """Return the tier of a medium, by the engine's table of lower-case media; an unknown one names itself."""
    medium = medium[:_MEDIUM_CHARS].lower() if medium else GPU
    tier = tiers.get(medium, medium)
    # Every node can load a remote block, so it is kept apart from the tiers that make a node worth a forward.
    return f"remote-{tier}" if locality == "REMOTE" else tier


def read_extra_keys(
    keys: object, blocks: int, block_size: int, root: bool, lora: str
) -> tuple[str, tuple[ContentSpan, ...], bool]:
    """What the extra keys of a stored event's blocks say: the salt, the items that start here, mappable or not.

    A block's entry is null or a list of: the LoRA name; a pair (identifier, offset) for each item that overlaps
    the block; the cache salt, in the prompt's first block only; a digest of prompt embeddings, as bytes. An
    offset counts from the start of the block; below zero the item began earlier and is in the chain already.

    In vLLM 0.17 and 0.18 an item is its bare identifier. In the first block of a prompt it cannot be told from a
    salt and is taken for one, which is safe: nobody asks for that namespace. Anywhere else its start is unknown.
    """
    if keys is None:
        return "", (), True
    if type(keys) is not list:
        raise MalformedError("extra_keys: not a list")
    if not any(keys):
        return "", (), True
    if len(keys) != blocks:
        return "", (), False
    salts: list[str] = []
    contents: list[ContentSpan] = []
    mappable = True
    for number, entry in enumerate(keys):
        if entry is None:
            continue
        if not isinstance(entry, (list, tuple)):
            raise MalformedError("extra_keys: an entry is neither null nor a list")
        first = root and number == 0
        # A salt may equal the LoRA name, and the name comes first.
        named = bool(lora and entry and entry[0] == lora)
        for key in entry[1:] if named else entry:
            item = _item(key)
            if first and type(key) is str:
                salts.append(key)
            elif item is None:
                mappable = False
            elif 0 <= item[1] < block_size:
                contents.append(ContentSpan(item[0], number * block_size + item[1]))
            elif first or item[1] >= 0:
                mappable = False
    if len(salts) > 1:
        return "", (), False
    return "".join(salts), tuple(contents), mappable


def _item(key: object) -> tuple[str, int] | None:
    if isinstance(key, (list, tuple)) and len(key) == 2 and type(key[0]) is str and type(key[1]) is int:
        return key[0], key[1]
    return None
