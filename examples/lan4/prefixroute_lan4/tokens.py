"""From a request's body to what the node routes by: token ids and namespace.

Rules:
1. The engine's own tokenizer decides (``POST /tokenize``). A copy of it (`OwnTokenizer`), where one is configured,
   reads plain texts as long as it agrees.
2. A prompt that cannot be told exactly (images, several prompts, an engine that does not answer) has no tokens:
   it is routed by load alone. A missed chance, never a wrong match.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
import msgspec
import xxhash
from cachetools import LRUCache

from prefixroute import Namespace

from .own_tokenizer import OwnTokenizer

log = logging.getLogger("prefixroute.sidecar")

_CHAT_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
_MEMO_PROMPTS = 1024
_TOKENIZE_TIMEOUT_S = 10.0


class Prompt(NamedTuple):
    """What a request is routed by. `tokens` are 32-bit ids; None: unknown, only load counts."""

    tokens: array[int] | None
    namespace: Namespace


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class PromptReader:
    """Reads prompts with the engine's tokenizer, and remembers the last ones by their digest."""

    def __init__(self, client: httpx.AsyncClient, engine_url: str, model: str, own: OwnTokenizer | None = None) -> None:
        self._client = client
        self._url = f"{engine_url}/tokenize"
        self._model = model
        self._own = own
        self._memo: LRUCache[bytes, array[int]] = LRUCache(_MEMO_PROMPTS)
        self._decoder = msgspec.json.Decoder(_Tokenized)

    async def read(self, payload: Mapping[str, Any], chat: bool) -> Prompt:
        """The prompt of a decoded request body; never raises for what a client may send."""
        question = _chat_question(payload) if chat else _completion_question(payload)
        return Prompt(await self._tokens(question), self._namespace(payload))

    def _namespace(self, payload: Mapping[str, Any]) -> Namespace:
        model, salt = payload.get("model"), payload.get("cache_salt")
        adapter = model if isinstance(model, str) and model != self._model else ""
        return Namespace(lora=adapter, salt=salt if isinstance(salt, str) else "")

    async def _tokens(self, question: array[int] | dict[str, Any] | None) -> array[int] | None:
        if question is None or isinstance(question, array):
            return question
        body = msgspec.json.encode({"model": self._model, **question})
        digest = xxhash.xxh3_128_digest(body)
        tokens = self._memo.get(digest)
        if tokens is None:
            tokens = await self._read(question, body)
            if tokens is not None:
                self._memo[digest] = tokens
        return tokens

    async def _read(self, question: dict[str, Any], body: bytes) -> array[int] | None:
        text, own = question.get("prompt"), self._own
        if own is None or not isinstance(text, str):
            return await self._ask_engine(body)
        tokens = await own.read(text, question.get("add_special_tokens") is not False)
        if own.checking:
            told = await self._ask_engine(body)
            if told is not None and not own.compare(tokens, told):
                log.warning("engine.tokenizer_file does not read prompts as the engine does: it is not used")
                self._own = None
            return told
        return tokens

    async def _ask_engine(self, body: bytes) -> array[int] | None:
        headers = {"content-type": "application/json"}
        try:
            reply = await self._client.post(self._url, content=body, headers=headers, timeout=_TOKENIZE_TIMEOUT_S)
            if reply.status_code != 200:
                return None
            return array("I", self._decoder.decode(reply.content).tokens)
        except (httpx.HTTPError, msgspec.MsgspecError, OverflowError):
            return None


def _completion_question(payload: Mapping[str, Any]) -> array[int] | dict[str, Any] | None:
    """Token ids as they are, or what to ask the engine; None for several prompts or none."""
    prompt = payload.get("prompt")
    if isinstance(prompt, str):
        return {field: payload[field] for field in ("prompt", "add_special_tokens") if field in payload}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        try:
            return array("I", prompt)
        except OverflowError:
            return None
    return None


def _chat_question(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to ask the engine; None when a message holds more than text."""
    messages = payload.get("messages")
    if not isinstance(messages, list) or not all(_is_text(message) for message in messages):
        return None
    return {field: payload[field] for field in _CHAT_FIELDS if field in payload}


def _is_text(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
