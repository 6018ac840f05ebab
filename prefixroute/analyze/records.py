"""A line of a request log as a request: when, for whom, of which model, and the prompt.

Rules:
1. A line that is no request raises `BadLine` with a short reason; the caller counts it. Nothing else is raised.
2. The tables below are the field names that logs use; the first name that a line has counts.
3. A body may be the line itself, or be in one of BODIES, as an object or as JSON in a string.
4. Names are made printable, since a terminal may show the report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from math import isfinite
from typing import Any, NamedTuple

import msgspec

BODIES = ("body", "request", "request_body", "requestBody", "kwargs", "input")
TIMES = ("timestamp", "ts", "time", "created_at", "start_time", "startTime", "@timestamp", "created", "arrival_time_ns")
TENANTS = ("tenant", "tenant_id", "organization", "org_id", "team_id", "cache_salt", "user", "user_id")
SYSTEM = ("instructions", "system")
"""Fields of some interfaces whose text goes in front of all messages."""

NESTED = 8
PROMPTS = ("messages", "prompt", "input", "hash_ids", "prompt_token_ids", "input_tok_ids")


class BadLine(Exception):  # noqa: N818 - it is no error of ours
    """A line that is no request; the message is its reason."""


class Chat(NamedTuple):
    """A chat body: its messages, and the tools that it offers."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Any]


class TraceBlocks(NamedTuple):
    """A prompt of which only ids of its prefix blocks are known, and its length in tokens (0: unknown)."""

    ids: Sequence[int]
    tokens: int


Content = Chat | TraceBlocks | str | list[int]
"""The content of a prompt: a chat, a trace's ids, a text, or tokens."""


class Record(NamedTuple):
    """A request; where the log does not say them, `at` (in seconds) is None, and `model` and `tenant` are empty."""

    at: float | None
    model: str
    tenant: str
    contents: Sequence[Content]


_decode = msgspec.json.Decoder().decode


def parse(data: bytes, tenant_field: str = "") -> Record:
    """Read a line. A completion body with several prompts gives several contents. Raises `BadLine`."""
    outer = _json(data)
    if isinstance(outer, list):
        raise BadLine("a JSON list: a line has one request")
    if not isinstance(outer, dict):
        raise BadLine("no JSON object")
    body = _body(outer)
    contents = _contents(body)
    layers = (outer, body) if body is not outer else (outer,)
    names = (tenant_field,) if tenant_field else TENANTS
    return Record(
        _time(layers, isinstance(contents[0], TraceBlocks)), _name(layers, ("model",)), _name(layers, names), contents
    )


def printable(text: str) -> str:
    """Return a text without characters that would move a terminal's cursor or cannot be written."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _json(data: bytes | str, name: str = "") -> Any:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        # The text was cut in the middle of a character: only Python's own reader accepts half a character.
        text = data if isinstance(data, str) else data.decode()
        if "\\ud" in text or "\\uD" in text:
            return json.loads(text)
    except (ValueError, RecursionError):
        pass
    raise BadLine(f"no JSON in {name!r}" if name else "no JSON")


def _body(outer: dict[str, Any], nested: int = 0) -> dict[str, Any]:
    if any(name in outer for name in ("messages", "prompt", "hash_ids")) or nested >= NESTED:
        return outer
    for name in BODIES:
        inner = outer.get(name)
        if isinstance(inner, str) and inner[:1] == "{":
            inner = _json(inner, name)
        if isinstance(inner, dict):
            return _body(inner, nested + 1)
    return outer


def _contents(body: dict[str, Any]) -> Sequence[Content]:
    name = next((name for name in PROMPTS if body.get(name) is not None), None)
    if name is None:
        raise BadLine("no prompt: neither of " + ", ".join(PROMPTS[:4]))
    prompt = body[name]
    if name == "hash_ids":
        return (_trace(prompt, body.get("input_length") or 0),)
    system = [{"role": "system", "content": body[name]} for name in SYSTEM if body.get(name)]
    if isinstance(prompt, str):
        return (Chat([*system, {"role": "user", "content": prompt}], ()),) if system else (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise BadLine(f"{name} is neither text nor a list")
    if all(isinstance(part, dict) for part in prompt):
        tools = body.get("tools") or body.get("functions")
        return (Chat([*system, *prompt], tools if isinstance(tools, list) else ()),)
    if all(isinstance(part, str) for part in prompt):
        return tuple(prompt)
    many = prompt if all(isinstance(part, list) for part in prompt) else [prompt]
    for tokens in many:
        if not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
            raise BadLine(f"{name} has what is neither text nor tokens")
    return tuple(many)


def _trace(ids: Any, tokens: Any) -> TraceBlocks:
    if not isinstance(ids, list) or not all(type(i) is int and -(2**63) <= i < 2**63 for i in ids):
        raise BadLine("hash_ids is no list of whole numbers")
    if not isinstance(tokens, int) or not 0 <= tokens < 2**40:
        raise BadLine("input_length is no number of tokens")
    return TraceBlocks(ids, tokens)


def _name(layers: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    for name in names:
        for layer in layers:
            value = layer.get(name)
            if isinstance(value, (str, int)) and value != "":
                return printable(str(value)[:200])
    return ""


def _time(layers: Sequence[dict[str, Any]], milliseconds: bool) -> float | None:
    for name in TIMES:
        for layer in layers:
            value = layer.get(name)
            if isinstance(value, str):
                found = _date(value)
                if found is not None and isfinite(found):
                    return found
            elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e20:
                return value / (1e9 if name.endswith("_ns") else 1e3 if milliseconds else _unit(value))
    return None


def _unit(value: float) -> float:
    """Return how many units of a Unix time make a second, by its size: it is in seconds, ms, us or ns."""
    size = abs(value)
    return 1.0 if size < 1e11 else 1e3 if size < 1e14 else 1e6 if size < 1e17 else 1e9


def _date(text: str) -> float | None:
    try:
        return float(text) / _unit(float(text))
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
