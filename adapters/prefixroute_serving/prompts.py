"""From a request's body to the token ids and namespace by which the node routes it.

Rules:
1. The engine's own tokenizer decides (``POST /tokenize``). A copy of it (`OwnTokenizer`), where one is configured,
   reads plain texts as long as both agree.
2. A prompt whose tokens cannot be known exactly (images, several prompts, an engine that does not answer) is routed
   without tokens, by load alone. That may miss a hit, but never claims a wrong one.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import xxhash
from cachetools import LRUCache

from prefixroute import Namespace

from .local_tokenizer import OwnTokenizer

log = logging.getLogger("prefixroute.sidecar")

_MEMO_PROMPTS = 1024
TOKENIZE_TIMEOUT_S = 10.0
"""The longest wait for the engine's tokens, in seconds."""

AskEngine = Callable[[bytes], Awaitable[bytes | None]]
"""A function that asks the engine's ``POST /tokenize``; it returns None when there is no answer."""

_NONE = msgspec.Raw()


class RequestBody(msgspec.Struct, frozen=True):
    """The fields of a request that a sidecar reads; long fields stay raw bytes until they are needed.

    `read_body` makes one. A prompt is made of the fields after `extra_key`.
    """

    model: Any = None
    stream: Any = False
    cache_salt: Any = None
    extra_key: Any = None
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    add_generation_prompt: msgspec.Raw = _NONE
    continue_final_message: msgspec.Raw = _NONE
    add_special_tokens: msgspec.Raw = _NONE
    chat_template: msgspec.Raw = _NONE
    chat_template_kwargs: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE


_CHAT_FIELDS = tuple(name for name in RequestBody.__struct_fields__[5:])
_TEXT_FIELDS = ("prompt", "add_special_tokens")

_read_body = msgspec.json.Decoder(RequestBody).decode
_read_ids = msgspec.json.Decoder(list[int]).decode
_read_any = msgspec.json.Decoder().decode


def read_body(body: bytes) -> RequestBody:
    """Read a request's body. Raises a ValueError that says what is wrong with the body."""
    try:
        return _read_body(body)
    except msgspec.ValidationError:
        raise ValueError("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None


class RoutedPrompt(NamedTuple):
    """The tokens and namespace by which a request is routed; without tokens (None) only load counts.

    `tokens` are 32-bit ids. `was_text` tells that a tokenizer is needed to read the prompt.
    """

    tokens: array[int] | None
    namespace: Namespace
    was_text: bool


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class PromptTokenizer:
    """Reads prompts with the engine's tokenizer, and remembers the last ones by their digest."""

    def __init__(self, ask: AskEngine, model: str, own: OwnTokenizer | None = None) -> None:
        self._ask = ask
        self._model = model
        self._own = own
        self._memo: LRUCache[bytes, array[int]] = LRUCache(_MEMO_PROMPTS)
        self._decoder = msgspec.json.Decoder(_Tokenized)

    async def read(
        self, request: RequestBody, chat: bool, known: array[int] | None = None, salt: str = ""
    ) -> RoutedPrompt:
        """Return the prompt of a request that is cached under `salt`; its tokens may be `known` already.

        Nothing that a client may send makes this raise.
        """
        tokens = known if known is not None else await self._tokens(request, chat)
        return RoutedPrompt(tokens, self._namespace(request, salt), chat or _kind(request.prompt) == b'"')

    def _namespace(self, request: RequestBody, salt: str) -> Namespace:
        model = request.model
        adapter = model if isinstance(model, str) and model != self._model else ""
        return Namespace(lora=adapter, salt=salt)

    async def _tokens(self, request: RequestBody, chat: bool) -> array[int] | None:
        if chat:
            return await self._remembered(request, _CHAT_FIELDS) if _is_text(request.messages) else None
        kind = _kind(request.prompt)
        if kind == b"[":
            return _token_ids(request.prompt)
        return await self._remembered(request, _TEXT_FIELDS) if kind == b'"' else None

    async def _remembered(self, request: RequestBody, names: tuple[str, ...]) -> array[int] | None:
        given = {name: value for name in names if (value := getattr(request, name)) is not _NONE}
        body = msgspec.json.encode({"model": self._model, **given})
        digest = xxhash.xxh3_128_digest(body)
        tokens = self._memo.get(digest)
        if tokens is None:
            tokens = await self._read(request, body, names is _TEXT_FIELDS)
            if tokens is not None:
                self._memo[digest] = tokens
        return tokens

    async def _read(self, request: RequestBody, body: bytes, text: bool) -> array[int] | None:
        own = self._own
        if own is None or not text:
            return await self._ask_engine(body)
        special = bytes(request.add_special_tokens) != b"false"
        try:
            tokens = await own.read(_read_any(request.prompt), special)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if own.checking:
            told = await self._ask_engine(body)
            if told is not None and not own.compare(tokens, told):
                log.warning("engine.tokenizer_file does not read prompts as the engine does: it is not used")
                self._own = None
            return told
        return tokens

    async def _ask_engine(self, body: bytes) -> array[int] | None:
        reply = await self._ask(body)
        try:
            return None if reply is None else array("I", self._decoder.decode(reply).tokens)
        except (msgspec.MsgspecError, OverflowError):
            return None


def _kind(value: msgspec.Raw) -> bytes:
    """Return the first byte of a JSON value, which tells its kind; no byte for no value."""
    return bytes(memoryview(value)[:1])


def _token_ids(prompt: msgspec.Raw) -> array[int] | None:
    """Return the token ids of a prompt that is given as token ids; None for several prompts or another kind."""
    try:
        return array("I", _read_ids(prompt)) or None
    except (msgspec.MsgspecError, OverflowError):
        return None


def _is_text(messages: msgspec.Raw) -> bool:
    """False when a message holds more than text."""
    try:
        listed = _read_any(messages) if messages else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return isinstance(listed, list) and all(_has_text(message) for message in listed)


def _has_text(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
