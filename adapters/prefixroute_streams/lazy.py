"""Names of a package that need an extra, imported on first use: the rest works without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def on_first_use(package: str, modules: Mapping[str, str], extra: str) -> Callable[[str], object]:
    """Return a module's ``__getattr__``: `modules` says in which module of `package` a name is.

    Without ``zmq`` or ``httpx`` it raises `ModuleNotFoundError` that names the extra to install.
    """

    def getattr_(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in ("zmq", "httpx"):
                raise
            message = f"{name} needs {error.name}: pip install 'prefixroute[{extra}]'"
            raise ModuleNotFoundError(message, name=error.name) from error

    return getattr_
