"""Prompts as keys of their prefixes: the comparison of an engine's prefix cache, without the engine.

Rules:
1. Two prompts have the same key at a depth exactly when they begin with the same blocks, but for one chance in 2**64.
2. Without a tokenizer four bytes stand for a token; reports say so beside their figures.
3. All work is done on whole arrays; there is no loop over blocks.

These keys are for counting only: no secret goes into them, and they never leave the process.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from prefixroute import UsageError

from .records import Chat, Content, TraceBlocks

Keys = NDArray[np.uint64]

TOKEN_BYTES = 4
"""Bytes that stand for a token without a tokenizer: about as in English text, and as many as a packed token has."""

TRACE_TOKENS = 512
"""Tokens of one id in `hash_ids`, in the published traces."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_ODD = np.random.default_rng(20).integers(0, 2**63, 4096, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


class KeyedPrompt(NamedTuple):
    """A prompt: the key of each of its prefixes of whole blocks, its tokens, and tokens of a block."""

    keys: Keys
    tokens: int
    block_tokens: int


def mix(words: Keys) -> Keys:
    """Return a permutation of 64-bit words in which every bit depends on every bit (splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    mixed: Keys = words ^ (words >> np.uint64(31))
    return mixed


def prefix_keys(blocks: Keys) -> Keys:
    """Return the keys of all prefixes of a row of block values. O(blocks)."""
    places = np.arange(1, len(blocks) + 1, dtype=np.uint64) * _GOLDEN
    return mix(np.cumsum(mix(blocks + places), dtype=np.uint64))


def salted(keys: Keys, salt: int) -> Keys:
    """Return keys that differ from the keys under any other salt."""
    return mix(keys + np.uint64(salt))


class PromptReader:
    """Turns contents of requests into prompts.

    `tokenizer` is a ``tokenizer.json`` of Hugging Face's `tokenizers`, or its folder; `template` a Jinja chat template,
    a ``tokenizer_config.json`` that has one, or the folder of either. Raises `UsageError` for a file it cannot use.
    """

    def __init__(self, block_tokens: int = 16, tokenizer: Path | None = None, template: Path | None = None) -> None:
        if not 1 <= block_tokens <= 4096:
            raise UsageError("a block has from 1 to 4096 tokens")
        self.block_tokens = block_tokens
        self.trace_tokens = TRACE_TOKENS
        self.by_bytes = tokenizer is None
        self._tokenizer = None if tokenizer is None else _tokenizer(tokenizer)
        self._template = None if template is None else _template(template)
        self._width = 8 if block_tokens % 2 == 0 else 4

    def text(self, content: Content) -> str:
        """Return a prompt's text, empty where only ids are known."""
        if isinstance(content, str):
            return content
        if isinstance(content, Chat):
            return self._template(content) if self._template is not None else plain_chat(content)
        if isinstance(content, TraceBlocks) or self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(content[:4096]))

    def read(self, content: Content) -> KeyedPrompt:
        """Return the prompt of a content. O(length)."""
        if isinstance(content, TraceBlocks):
            blocks = np.array(content.ids, dtype=np.int64).view(np.uint64)
            return KeyedPrompt(
                prefix_keys(blocks), content.tokens or len(blocks) * self.trace_tokens, self.trace_tokens
            )
        if isinstance(content, list):
            packed = np.array(content, dtype="<u4").tobytes()
        elif self._tokenizer is not None:
            # A chat's template has written the special tokens; to a completion's text the engine adds them.
            whole = isinstance(content, str)
            packed = np.array(
                self._tokenizer.encode(self.text(content), add_special_tokens=whole).ids, dtype="<u4"
            ).tobytes()
        else:
            packed = self.text(content).encode("utf-8", "surrogatepass")
        size = self.block_tokens * TOKEN_BYTES
        n = len(packed) // size
        words = np.frombuffer(packed, dtype=f"<u{self._width}", count=n * size // self._width).astype(np.uint64)
        columns = size // self._width
        # A multiplier for each place, a random linear hash, mixes words badly that differ in high bits alone.
        words = words * _GOLDEN
        words ^= words >> np.uint64(32)
        blocks = (words.reshape(n, columns) * _ODD[:columns]).sum(axis=1, dtype=np.uint64)
        return KeyedPrompt(prefix_keys(blocks), -(-len(packed) // TOKEN_BYTES), self.block_tokens)


NAMED_CHARS = 200
MEDIA = ("data", "file_data", "b64_json", "image", "audio", "video", "url")
MORE = ("tool_calls", "function_call", "arguments", "output")
"""The fields of a message, beside its content, that enter the prompt."""


def plain_chat(chat: Chat) -> str:
    """Return a chat as text, in the order that most templates have: tools, then each message with its role."""
    parts = [f"<|tools|>{msgspec.json.encode(chat.tools).decode()}\n"] if chat.tools else []
    for message in chat.messages:
        parts.append(f"<|{message.get('role', '')}|>\n")
        parts.append(_said(message.get("content")))
        parts += [_encoded(message[name]) for name in MORE if message.get(name)]
        parts.append("\n")
    parts.append("<|assistant|>\n")
    return "".join(parts)


def _said(content: Any) -> str:
    """Return a content as text; a picture or the like is represented by its address, or a hash of its bytes."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else _encoded(content)
    return "".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else _encoded(part)
        for part in content
    )


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose parts are joined to one text, as engines do for templates that know no parts."""
    content = message.get("content")
    return message | {"content": _said(content)} if isinstance(content, list) else message


def _encoded(value: Any) -> str:
    return msgspec.json.encode(_named(value)).decode()


def _named(value: Any, media: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _named(inner, key in MEDIA) for key, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner, media) for inner in value]
    if isinstance(value, str) and len(value) > NAMED_CHARS and (media or value.startswith("data:")):
        return xxhash.xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass"))
    return value


def _tokenizer(path: Path) -> Any:
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise UsageError("--tokenizer needs its extra, run: pip install 'prefixroute[tokenizer]'") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise UsageError(f"{file} is no tokenizer.json: {error}") from None


def _template(path: Path) -> Any:
    try:
        sandbox: Any = importlib.import_module("jinja2.sandbox")
        exceptions: Any = importlib.import_module("jinja2.exceptions")
    except ImportError:
        raise UsageError("--chat-template needs Jinja, run: pip install 'prefixroute[tokenizer]'") from None
    try:
        template, told = _template_source(path)
        if not isinstance(template, str):
            raise UsageError(f"{path} has several chat templates: write the one that is used to a file")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **_: msgspec.json.encode(value).decode()
        compiled = environment.from_string(template)
    except (OSError, LookupError, TypeError, msgspec.MsgspecError, exceptions.TemplateError) as error:
        raise UsageError(f"{path} has no chat template that can be used: {error}") from None
    special = {name: _token(told.get(name)) for name in ("bos_token", "eos_token")}

    def apply(chat: Chat) -> str:
        try:
            return str(
                compiled.render(
                    messages=[_flat(message) for message in chat.messages],
                    tools=list(chat.tools) or None,
                    add_generation_prompt=True,
                    **special,
                )
            )
        except TemplateRefusal as refusal:
            # A template's message may quote a prompt; a message that stands in the template itself does not.
            raise TemplateRefusal(str(refusal) if str(refusal) in template else "it refuses the messages") from None
        except Exception as error:
            raise TemplateRefusal(type(error).__name__) from None

    return apply


def _template_source(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return a template and its tokenizer's configuration: one file or two, in the folder of a model."""
    folder = path if path.is_dir() else path.parent
    beside, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if path.is_dir():
        path = beside if beside.exists() else config
    if path.suffix == ".json":
        config = path
    told: dict[str, Any] = msgspec.json.decode(config.read_bytes()) if config.exists() else {}
    if path.suffix != ".json":
        return path.read_text(encoding="utf-8"), told
    if "chat_template" not in told and beside.exists():
        return beside.read_text(encoding="utf-8"), told
    return told["chat_template"], told


class TemplateRefusal(Exception):  # noqa: N818 - the line's fault, no error of the program
    """The chat template does not take these messages."""


def _refuse(reason: str) -> None:
    raise TemplateRefusal(reason)


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
