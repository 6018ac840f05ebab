"""A node for many threads: one lock around each call.

    node = ThreadSafeNode(Node("n0", domain, rng=random.Random(), now=time.monotonic()))
    async with Driver(node, transport) as driver:   # gossips in the thread of the event loop
        ...                                         # handlers call node.route and node.report from any thread

Rules:
1. What is wrapped is the node itself: whoever holds it already, such as a driver or an attachment, takes the lock as
   well.
2. No call waits for anything but the lock, and none holds it longer than a few milliseconds (`node`).
3. Time is one for all threads: read the clock right before the call. A reading that another thread's call has passed
   meanwhile is not an error, the node's time stands still for it.

The lock costs 0.2 us a call while nobody else holds it. Where several threads decide at once they take turns: a node
decides some 50,000 times a second in all, as the interpreter runs one thread at a time anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from threading import RLock
from typing import Any

from typing_extensions import Self

from .errors import UsageError
from .node import Node


class ThreadSafeNode(Node):
    """A node that many threads call. `ThreadSafeNode(node)` makes `node` itself one, and returns it. O(1).

    It has the same methods. `counters`, `journal` and what methods return may be read without the lock. Raises
    `UsageError` for what is no node.
    """

    _lock: AbstractContextManager[bool]

    def __new__(cls, node: Node) -> Self:
        """Make `node` one that many threads call, and return it."""
        if not isinstance(node, Node):
            raise UsageError(f"ThreadSafeNode wraps a Node: ThreadSafeNode(Node(...)), not {node!r:.60}")
        if isinstance(node, cls):
            return node
        if type(node) is not Node:
            raise UsageError(f"ThreadSafeNode wraps a Node, not an object of its subclass {type(node).__name__}")
        vars(node)["_lock"] = RLock()
        node.__class__ = cls
        assert isinstance(node, cls)
        return node

    def __init__(self, node: Node) -> None:
        """Nothing is left to do: `node` is this node, made already."""


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a node that any thread may call."""

    @wraps(method)
    def call(self: ThreadSafeNode, *args: Any, **named: Any) -> Any:
        with self._lock:
            self._thread = self._ident()
            return method(self, *args, **named)

    return call


for _name, _method in vars(Node).items():
    if callable(_method) and _name != "thread_id" and (not _name.startswith("_") or _name == "_check"):
        setattr(ThreadSafeNode, _name, _locked(_method))
setattr(ThreadSafeNode, "counters", property(_locked(vars(Node)["counters"].fget)))  # noqa: B010 - mypy knows better
