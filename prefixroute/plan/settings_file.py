"""Settings files of planners, TOML or JSON: read into typed tables, or refused with the wrong line and its correction.

Rules:
1. An error is one line of text: the file, the line number, the key, what is wrong with it and what would be right.
2. An unknown key is refused, and the known keys are listed: a misspelt key would otherwise leave its default in force.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from prefixroute.errors import UsageError

_Made = TypeVar("_Made")
_File = TypeVar("_File", bound="FileTable")


class Source:
    """A file's text, in which the line of a key is looked up."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def error(self, where: str, what: str) -> UsageError:
        """Return an error at a key such as ``model.blocks`` or ``servers[2].site``, or at its table without the key."""
        line = self._line(where)
        place = f"{self._path}:{line}" if line else str(self._path)
        return UsageError(f"{place}: {where}: {what}" if where else f"{place}: {what}")

    def more_than(self, bound: float, values: Iterable[tuple[str, float]]) -> None:
        """Raise an error at the first of (key, value) that is not a finite number above `bound`."""
        for where, value in values:
            if not (value > bound and math.isfinite(value)):
                raise self.error(where, f"must be above {bound:g}, not {value:g}")

    def at_least(self, bound: float, values: Iterable[tuple[str, float]]) -> None:
        """Raise an error at the first of (key, value) that is not a finite number of `bound` or more."""
        for where, value in values:
            if not (value >= bound and math.isfinite(value)):
                raise self.error(where, f"must be {bound:g} or more, not {value:g}")

    def made(self, where: str, make: Callable[[], _Made]) -> _Made:
        """Return `make()`, which builds an object from a key's value; its `UsageError` becomes an error at the key."""
        try:
            return make()
        except UsageError as error:
            raise self.error(where, str(error)) from None

    def _line(self, where: str) -> int:
        found = re.match(r"(\w+)(?:\[(\d+)\])?(?:\.(\w+))?", where)
        if not found:
            return 0
        table, index, key = found[1], int(found[2] or 0), found[3]
        header, seen, inside = 0, -1, False
        for number, text in enumerate(self._lines, 1):
            named = re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]", text)
            if named:
                seen += named[1] == table
                inside = named[1] == table and seen == index
                header = number if inside else header
                continue
            assigned = re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[=:]", text)
            if assigned and ((inside and assigned[1] == key) or (seen < 0 and not key and assigned[1] == table)):
                return number
        return header


class FileTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a file: its fields are the keys, and an unknown key is refused."""


class FileKind(NamedTuple):
    """A kind of file: its tables by name (the whole file under ""), and an example that shows them."""

    tables: Mapping[str, type[msgspec.Struct]]
    example: str


def read_settings(path: Path, whole: type[_File], kind: FileKind) -> tuple[_File, Source]:
    """Read a file into `whole`. Raises `UsageError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}: save it as UTF-8") from None
    source = Source(path, text)
    try:
        tree = json.loads(text) if path.suffix == ".json" else msgspec.toml.decode(text)
        return msgspec.convert(tree, whole), source
    except ImportError:
        raise UsageError(
            "with Python 3.10 TOML needs the extra sim: pip install 'prefixroute[sim]'; JSON does not"
        ) from None
    except msgspec.ValidationError as error:
        raise _explained(source, str(error), kind) from None
    except (msgspec.MsgspecError, ValueError) as error:
        at = re.search(r"line (\d+)", str(error))
        raise UsageError(f"{path}{':' + at[1] if at else ''}: not valid {path.suffix[1:].upper()}: {error}") from None


def _explained(source: Source, message: str, kind: FileKind) -> UsageError:
    """Turn ``Expected X, got Y - at `$.servers[1].site` `` into a line and a fix."""
    what, _, at = message.partition(" - at `")
    where = at.rstrip("`").removeprefix("$").removeprefix(".")
    table = re.sub(r"\[.*|\..*", "", where)
    unknown = re.search(r"unknown field `(.*?)`", what)
    if unknown:
        known = ", ".join(kind.tables.get(table, kind.tables[""]).__struct_fields__)
        return source.error(f"{where}.{unknown[1]}".lstrip("."), f"unknown key; known are {known}")
    missing = re.search(r"missing required field `(.*?)`", what)
    if missing:
        noun = "key" if where else "table"
        return source.error(where, f"the {noun} {missing[1]} is missing: add it (see {kind.example})")
    return source.error(where, what[:1].lower() + what[1:])
