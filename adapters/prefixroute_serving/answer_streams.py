"""Server-sent events of a streamed answer: cutting them, book-keeping, and resuming after the upstream died.

Rules:
1. Events pass as the very bytes that the engine sent, and only whole: a dead upstream leaves no half event.
2. After a break another engine gives the whole answer again. The part that the client already has is left out,
   but only while the new answer repeats it to the letter; when it does not, the stream is broken off (`Diverged`).
   A client may get an error, but never two answers spliced together.
3. Streams that cannot be compared this way (several choices, tool calls, log probabilities) are never resumed.

The treatment of an event of the second answer:

| event | already sent | action |
|---|---|---|
| closing ``[DONE]``, usage, finish | no | pass |
| closing ``[DONE]``, usage, finish | yes | drop |
| text, wholly within what was sent | - | compare, drop |
| text, partly or wholly beyond | - | compare the overlap, pass the rest |
| anything else (a role, an empty text) | anything | drop |
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

_EVENT_END = re.compile(rb"\r?\n\r?\n")
MAX_EVENT_BYTES = 1 << 20
"""The longest event in bytes, to bound the buffer: a longer one breaks the stream off; no engine sends such events."""

SERVER_ERROR = 500
"""The HTTP status of an error event that names none."""


class Diverged(Exception):  # noqa: N818 - an outcome, not an error of the program
    """A second answer does not repeat what the client already has, or cannot be compared with it."""


class UpstreamBroke(ValueError):  # noqa: N818 - an outcome, not an error of the program
    """The engine reports an error in the stream; `status` is the HTTP status that the event names."""

    def __init__(self, message: str, status: int = SERVER_ERROR) -> None:
        super().__init__(message)
        self.status = status


class EventCutter:
    """Cuts a byte stream into whole events; O(1) a byte."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that `data` completes, each with its blank line. ValueError beyond MAX_EVENT_BYTES."""
        if self._rest:
            data = self._rest + data
        events, start = [], 0
        if b"\r" in data:
            for match in _EVENT_END.finditer(data):
                events.append(data[start : match.end()])
                start = match.end()
        else:  # all engines write this form; the regular expression takes ten times as long
            while (end := data.find(b"\n\n", start)) >= 0:
                events.append(data[start : end + 2])
                start = end + 2
        self._rest = data[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events


class Event(NamedTuple):
    """The fields of one event that a ledger needs.

    `plain` is False when the event holds more than text, a role, usage or an end; `error` is the engine's error
    message, and `status` the HTTP status that it names.
    """

    text: str = ""
    done: bool = False
    finish: bool = False
    usage: bool = False
    cached_tokens: int | None = None
    plain: bool = True
    error: str = ""
    status: int = SERVER_ERROR


def read_event(data: bytes) -> Event:
    """Read an event of ``/v1/completions`` or ``/v1/chat/completions``; other data gives an Event that is not plain."""
    line = data.strip()
    if not line.startswith(b"data:"):
        return Event(plain=line.startswith(b":"))  # a comment is a keep-alive
    payload = line[5:].strip()
    if payload == b"[DONE]":
        return Event(done=True)
    try:
        chunk = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return Event(plain=False)
    return _read_chunk(chunk) if isinstance(chunk, dict) else Event(plain=False)


def _read_chunk(chunk: dict[str, Any]) -> Event:
    usage, choices = chunk.get("usage"), chunk.get("choices")
    if "error" in chunk:
        error = chunk["error"]
        return Event(plain=False, error=str(error) or "error", status=_status_of(error))
    cached = cached_tokens(usage)
    if not choices:
        return Event(usage=usage is not None, cached_tokens=cached, plain=usage is not None)
    choice = choices[0]
    text, plain = _text_of(choice)
    plain = plain and len(choices) == 1 and not choice.get("index") and not choice.get("logprobs")
    return Event(text, finish=choice.get("finish_reason") is not None, cached_tokens=cached, plain=plain)


def _status_of(error: object) -> int:
    """The HTTP status that an error names, in its `code`."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code <= 599 else SERVER_ERROR


def _text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """Return the choice's text, and whether the choice holds nothing else."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or "", True
    extra = any(value for key, value in delta.items() if key not in ("role", "content"))
    return delta.get("content") or "", not extra


def cached_tokens(usage: object) -> int | None:
    """Return the engine's count of reused prompt tokens in a ``usage`` object, None when there is none."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if isinstance(value, int) else None


class StreamLedger:
    """The parts of one streamed answer that the client has been sent, from all engines that gave parts of it."""

    def __init__(self) -> None:
        self.done = False
        self.cached_tokens: int | None = None
        self._finished = False
        self._used = False
        self._plain = True
        self._began = False
        self._texts: list[str] = []
        self._repeated: str | None = None  # text of the second answer so far; None while on the first

    @property
    def text(self) -> str:
        """The text sent so far. O(events since the last call)."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def has_text(self) -> bool:
        """True from the first text on."""
        return bool(self._texts)

    @property
    def began(self) -> bool:
        """True once an event has been passed on."""
        return self._began

    def restart(self) -> None:
        """Note that the next event begins another answer. Raises Diverged when this stream cannot be compared."""
        if not self._plain:
            raise Diverged("this kind of stream cannot be resumed")
        self._repeated = "" if self._began else None

    def accept(self, data: bytes) -> bytes | None:
        """Return the bytes of this event to pass on, None when the client has them already.

        Raises Diverged when the event contradicts what was sent; UpstreamBroke when it is an error message.
        """
        event = read_event(data)
        if event.error:
            raise UpstreamBroke(event.error, event.status)
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if self._repeated is not None:
            return self._accept_repeated(data, event)
        self._note(event)
        return data

    def _accept_repeated(self, data: bytes, event: Event) -> bytes | None:
        assert self._repeated is not None
        if not event.plain:
            raise Diverged("the second answer holds more than text")
        self._repeated += event.text
        sent = self.text
        overlap = min(len(self._repeated), len(sent))
        if self._repeated[:overlap] != sent[:overlap]:
            raise Diverged("the second answer differs from what was sent")
        rest = self._repeated[len(sent) :]
        new_end = (event.done and not self.done) or (event.finish and not self._finished)
        if not (rest or new_end or (event.usage and not self._used)):
            return None
        if len(self._repeated) < len(sent):
            raise Diverged("the second answer ends before what was sent")
        self._note(event._replace(text=rest))
        return data if rest == event.text else _with_text(data, rest)

    def _note(self, event: Event) -> None:
        if event.text:
            self._texts.append(event.text)
        self.done |= event.done
        self._finished |= event.finish
        self._used |= event.usage
        self._plain &= event.plain
        self._began = True


def _with_text(data: bytes, text: str) -> bytes:
    """Return the event with its text replaced."""
    chunk = msgspec.json.decode(data.strip()[5:].strip())
    choice = chunk["choices"][0]
    if choice.get("delta") is not None:
        choice["delta"]["content"] = text
    else:
        choice["text"] = text
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
