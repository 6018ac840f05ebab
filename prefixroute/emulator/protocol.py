"""The OpenAI-style bodies of requests and answers. Pure functions.

Rules:
1. A field that would change the answer and is not emulated (`n`, `logprobs`, ...) is refused; a field that
   could not change it (temperature, seed, stop, ...) is ignored. Unknown fields are ignored, as in vLLM.
2. A refusal says which field is wrong and what it must be, in vLLM's error shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from prefixroute.emulator.answer import Answer
from prefixroute.emulator.block_cache import CacheScope
from prefixroute.emulator.emulator_config import EngineConfig
from prefixroute.emulator.tokenizer import ChatMessage, encode, render_chat

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}

_REFUSED = (
    ("n", 1),
    ("best_of", 1),
    ("echo", False),
    ("suffix", ""),
    ("logprobs", False),
    ("prompt_logprobs", None),
    ("use_beam_search", False),
)


class ApiError(Exception):
    """A request is answered with an error; the text goes to the client."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> dict[str, object]:
        """The JSON body."""
        kind = _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request, checked: what to compute, and how to answer."""

    chat: bool
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    scope: CacheScope
    stream: bool
    include_usage: bool


class ApiReply(NamedTuple):
    """The values that are the same in all parts of one answer."""

    id: str
    created: int
    call: ApiCall
    answer: Answer


Json = Mapping[str, object]


def parse_body(raw: bytes) -> Json:
    """The JSON object of a request's body; ApiError 400 when it is none."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def parse_completion(body: Json, config: EngineConfig) -> ApiCall:
    """A /v1/completions request."""
    model, scope = parse_model(body, config)
    prompt = _prompt(body.get("prompt"), config)
    wanted = _positive(body, "max_tokens")
    return _call(body, config, model, scope, prompt, wanted, chat=False)


def parse_chat(body: Json, config: EngineConfig) -> ApiCall:
    """A /v1/chat/completions request."""
    model, scope = parse_model(body, config)
    prompt = tuple(encode(render_chat(parse_messages(body.get("messages"))), config.tokenizer_seed))
    wanted = _positive(body, "max_completion_tokens") or _positive(body, "max_tokens")
    return _call(body, config, model, scope, prompt, wanted, chat=True)


def parse_tokenize(body: Json, config: EngineConfig) -> list[int]:
    """A /tokenize request: the ids of its prompt or of its messages."""
    parse_model(body, config)
    if "messages" in body:
        return encode(render_chat(parse_messages(body["messages"])), config.tokenizer_seed)
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise ApiError(400, "pass 'prompt' as text, or 'messages'", "prompt")
    return encode(prompt, config.tokenizer_seed)


def parse_model(body: Json, config: EngineConfig) -> tuple[str, CacheScope]:
    """The model's name and, when it names an adapter, that adapter; ApiError 404 when there is none such."""
    model = body.get("model")
    if model is None:
        model = config.model
    if not isinstance(model, str):
        raise ApiError(400, "'model' must be text", "model")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ApiError(400, "'cache_salt' must be text that is not empty", "cache_salt")
    if model in config.lora_modules:
        return model, CacheScope(model, config.lora_modules.index(model) + 1, salt)
    if model != config.model and not config.any_model:
        raise ApiError(404, f"the model {model!r} does not exist; this engine serves {config.model!r}", "model")
    return model, CacheScope(salt=salt)


def parse_messages(value: object) -> list[ChatMessage]:
    """The messages of a conversation; content is text, or a list of text parts that are joined."""
    if not isinstance(value, list) or not value:
        raise ApiError(400, "'messages' must be a list with at least one message", "messages")
    return [_message(item) for item in value]


def _message(item: object) -> ChatMessage:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise ApiError(400, "a message must be an object with the text field 'role'", "messages")
    content = item.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(400, "only text parts of a message's content are supported", "messages")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise ApiError(400, "a message's 'content' must be text or a list of text parts", "messages")
    return ChatMessage(item["role"], content)


def _prompt(value: object, config: EngineConfig) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(encode(value, config.tokenizer_seed))
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in value):
        return tuple(value)
    raise ApiError(400, "'prompt' must be text or a list of token ids of 0 to 2**32 - 1; one a request", "prompt")


def _call(
    body: Json,
    config: EngineConfig,
    model: str,
    scope: CacheScope,
    prompt: tuple[int, ...],
    wanted: int | None,
    *,
    chat: bool,
) -> ApiCall:
    for name, only in _REFUSED:
        value = body.get(name)
        if value is not None and (value != only or type(value) is not type(only)):
            raise ApiError(400, f"{name!r} is not emulated: leave it out, or pass {only!r}", name)
    limit = config.context_length
    if not prompt:
        raise ApiError(400, "the prompt is empty", "prompt")
    if len(prompt) >= limit:
        raise ApiError(
            400,
            f"this model's maximum context length is {limit} tokens, the prompt has {len(prompt)}: "
            "at least one must be left for the output",
            "prompt",
        )
    room = limit - len(prompt)
    if wanted is not None and wanted > room:
        raise ApiError(
            400,
            f"this model's maximum context length is {limit} tokens, but {len(prompt)} prompt tokens and "
            f"{wanted} output tokens were asked for",
            "max_tokens",
        )
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise ApiError(400, "'stream_options' must be an object, and needs 'stream': true", "stream_options")
    include_usage = _flag(options, "include_usage") if isinstance(options, dict) else False
    tokens = wanted or min(config.default_max_tokens, room)
    return ApiCall(chat, model, prompt, tokens, scope, stream, include_usage)


def _positive(body: Json, name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ApiError(400, f"{name!r} must be a whole number of at least 1", name)
    return value


def _flag(body: Json, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name!r} must be true or false", name)
    return bool(value)


# --- answers -----------------------------------------------------------------------------------------------


def usage(call: ApiCall, tokens: int, cached: int) -> dict[str, object]:
    """The usage object; it always has the tokens found in the cache."""
    return {
        "prompt_tokens": len(call.prompt),
        "completion_tokens": tokens,
        "total_tokens": len(call.prompt) + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def whole_answer(reply: ApiReply, tokens: int, cached: int) -> dict[str, object]:
    """The body of an answer that is not streamed."""
    text = reply.answer.text(0, tokens)
    if reply.call.chat:
        message = {"role": "assistant", "content": text[1:]}
        choice: dict[str, object] = {"index": 0, "message": message, "logprobs": None}
    else:
        choice = {"index": 0, "text": text, "logprobs": None}
    choice["finish_reason"] = "length"
    kind = "chat.completion" if reply.call.chat else "text_completion"
    return {**_envelope(reply, kind), "choices": [choice], "usage": usage(reply.call, tokens, cached)}


def token_chunk(reply: ApiReply, start: int, stop: int, finish_reason: str | None) -> bytes:
    """A streamed chunk with the output tokens from `start` to `stop`."""
    text = reply.answer.text(start, stop)
    if reply.call.chat:
        # A chat answer begins without the space, so that it can be sent back as a message's content.
        return _chat_chunk(reply, {"content": text[1:] if start == 0 else text}, finish_reason)
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return _event({**_envelope(reply, "text_completion"), "choices": [choice]})


def role_chunk(reply: ApiReply) -> bytes:
    """The chunk that opens a streamed chat answer."""
    return _chat_chunk(reply, {"role": "assistant", "content": ""}, None)


def usage_chunk(reply: ApiReply, tokens: int, cached: int) -> bytes:
    """The last chunk before the end, when usage was asked for; it has no choices."""
    kind = "chat.completion.chunk" if reply.call.chat else "text_completion"
    return _event({**_envelope(reply, kind), "choices": [], "usage": usage(reply.call, tokens, cached)})


DONE = b"data: [DONE]\n\n"
"""Ends every stream."""


def _chat_chunk(reply: ApiReply, delta: Json, finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _event({**_envelope(reply, "chat.completion.chunk"), "choices": [choice]})


def _envelope(reply: ApiReply, kind: str) -> dict[str, object]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.call.model}


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
