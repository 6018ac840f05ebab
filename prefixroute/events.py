"""Plain data that crosses the library's borders: what an engine did, and what a node has to tell and has counted.

Rules:
1. Engine events are engine-neutral. An adapter turns its engine's stream into them; `residency` applies them.
2. Token ids are non-negative and below 2**32. An adapter may pass any sequence of ints.
3. Node events inform, they never ask: a caller that ignores them all loses nothing but the news.
4. All parts of a node tell and count in its one `Journal`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from .errors import UsageError

Handle: TypeAlias = int | bytes
"""An engine's own opaque block hash. It never leaves the node."""

GPU, CPU, DISK = "gpu", "cpu", "disk"
"""Tiers. An adapter may pass another lower-case word: blocks in it are counted apart and give no match."""

FULL_ATTENTION_KINDS = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Group kinds that need, and keep, every block of a prefix. Other kinds need blocks near its end (vLLM >= 0.22)."""


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """An image, audio clip or other item whose placeholder tokens start at `start`.

    In a prompt `start` counts tokens from the prompt's beginning; in `BlocksStored.contents` from the
    beginning of the event's tokens. `content_id` is whatever names the content: its hash, usually.
    Keys are chained, so the block in which an item starts carries the id for all blocks after it.
    """

    content_id: str
    start: int


def items_within(contents: tuple[ContentSpan, ...], start: int, end: int) -> tuple[ContentSpan, ...]:
    """Return the items that start at tokens `start` to `end` - 1, placed by their distance from `start`."""
    if not contents:
        return ()
    return tuple(ContentSpan(item.content_id, item.start - start) for item in contents if start <= item.start < end)


@dataclass(frozen=True, slots=True)
class Namespace:
    """What separates caches inside one domain: LoRA adapter name, and tenant or cache salt.

    The salt comes from the trusted caller. Two namespaces share nothing.
    """

    lora: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora, str) or not isinstance(self.salt, str):
            raise UsageError('a namespace is of texts: pass "" for no adapter or salt')


DEFAULT_NAMESPACE = Namespace()
"""No adapter, no salt."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """The engine cached blocks, root side first.

    `parent` is the handle before the first one, None at the root. `tokens` are those of all blocks, `block_size` each,
    or empty if the engine did not say. `namespace` matters at the root only; below it the parent's is inherited.
    `mappable` is False when the event does not tell the content of the blocks (an image without an offset): such
    blocks are counted, never matched. `confirmed` marks a report: the engine holds these blocks now, and may have
    stored them just now or long ago, so their copies are not to be counted. `window` is how many tokens the group looks
    back, 0 if it is no window group or the engine did not say.
    """

    handles: tuple[Handle, ...]
    parent: Handle | None
    tokens: Sequence[int]
    block_size: int
    tier: str = GPU
    group: int = 0
    group_kind: str = ""
    namespace: Namespace = DEFAULT_NAMESPACE
    contents: tuple[ContentSpan, ...] = ()
    mappable: bool = True
    confirmed: bool = False
    window: int = 0

    def part(self, start: int, end: int) -> BlocksStored:
        """Return blocks `start` to `end` - 1, clipped to those there are, as a store below the block before. O(blocks).

        Each item goes with the block in which it starts. `block_size` has to be that of `tokens`.
        """
        first, last = start * self.block_size, end * self.block_size
        return replace(
            self,
            handles=self.handles[start:end],
            parent=self.handles[start - 1] if start else self.parent,
            tokens=self.tokens[first:last],
            contents=items_within(self.contents, first, last),
        )


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The engine dropped one physical copy of each of these blocks from one tier of one group.

    `last_copy` is True when the engine says that no copy is left (vLLM #48933 proposes it). `told` is how many engine
    events this one stands for: an adapter may join neighbours that differ in their handles alone.
    """

    handles: tuple[Handle, ...]
    tier: str = GPU
    group: int = 0
    last_copy: bool = False
    told: int = field(default=1, compare=False)


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The engine dropped every block of `tier`, or of all tiers when it is None."""

    tier: str | None = GPU


@dataclass(frozen=True, slots=True)
class StreamGap:
    """`missing` messages were lost and could not be replayed (0 when the number is unknown)."""

    missing: int = 0


@dataclass(frozen=True, slots=True)
class StreamRestarted:
    """The engine's process began anew, with an empty cache."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event that could not be used: its tag, and why. It never costs its siblings."""

    tag: str
    reason: str = "unknown tag"


EngineEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared | StreamGap | StreamRestarted | UnknownEvent


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """What one step of a data-parallel `rank` did, in order. `ts` is the engine's wall clock in seconds, or 0.0."""

    events: tuple[EngineEvent, ...]
    rank: int = 0
    ts: float = 0.0

    @property
    def told(self) -> int:
        """How many events the engine sent; removals that an adapter joined count one by one."""
        return sum([event.told if isinstance(event, BlocksRemoved) else 1 for event in self.events])


# --- what a node tells -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DatagramRejected:
    """A datagram could not be used; `kind` is a counter's word (``forged``, ``truncated``, ``version``, ...)."""

    source: object
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class DomainMismatch:
    """A peer serves another domain: overlap with it would be silently zero, so it is refused loudly."""

    source: object
    peer: str
    field: str
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A peer was ``learnt``, ``heard``, ``suspected`` (silent), ``forgotten`` or ``removed``, has ``moved`` to another
    address, or forwards to it were ``suspended`` or ``resumed``.
    """

    peer: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AddressFailed:
    """Nothing reaches an address; `reason` says why: its name is not resolved, or nobody answers at a seed."""

    address: object
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaChanged:
    """A peer endpoint was ``learnt`` or ``forgotten``, its replica ``replaced`` or ``discarded``; or an own endpoint
    was ``refuted``: it met a later incarnation of itself and moved past it. `reason` says why: a forgotten endpoint may
    have been unheard, removed by the caller, or have ``left``.
    """

    endpoint: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PushBackChanged:
    """A local endpoint began or ended to refuse forwarded work."""

    endpoint: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResidencyChanged:
    """A local endpoint's residency became ``partial``, ``exact`` or ``restarted``, its engine is ``silent``, more of
    its blocks are live than it has (``inflated``), events of another rank came to it (``mixed``), or events that cannot
    be used (``faulty``); answers show that the engine reuses nothing of what it was sent (``unused``), or does again
    (``reused``); and why.
    """

    endpoint: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class ClockJumped:
    """A reading of the caller's clock was `by_s` seconds off what was to be expected; what that was taken for."""

    by_s: float
    reason: str


class Differs(NamedTuple):
    """The first place at which an engine stores another token of a prompt than this node hashes."""

    position: int
    ours: int
    theirs: int


@dataclass(frozen=True, slots=True)
class TokensDiffer:
    """A local endpoint's engine stores prompts as other tokens than this node hashes, so that they never match: at
    `position`, the first that differs, it has token `theirs`, and the prompt `ours`.
    """

    endpoint: str
    position: int
    ours: int
    theirs: int


NodeEvent: TypeAlias = (
    DatagramRejected
    | DomainMismatch
    | PeerChanged
    | AddressFailed
    | ReplicaChanged
    | PushBackChanged
    | ResidencyChanged
    | ClockJumped
    | TokensDiffer
)

MAX_EVENTS = 1024
"""Node events kept for a caller that does not drain them; the oldest go first."""


class Journal:
    """What one node tells and counts. O(1) a call.

    A count has a name and may have a label: `counts["rejected", "forged"]`. `counters()` returns the same counts under
    flat names, `rejected_forged`.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str | None]] = Counter()
        """By (name, label); the label is None for a count that has none. To be read only."""
        self._events: deque[NodeEvent] = deque(maxlen=MAX_EVENTS)

    def tell(self, event: NodeEvent) -> None:
        """Keep an event for the caller."""
        self._events.append(event)

    def count(self, name: str, label: str | None = None, n: int = 1) -> None:
        """Add `n` to a count."""
        self.counts[name, label] += n

    def take_events(self) -> list[NodeEvent]:
        """Return and forget the events, at most `MAX_EVENTS`, the oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def counters(self) -> Counter[str]:
        """Return the counts under flat names. O(counts), some 5 us."""
        return Counter({flat_name(*key): n for key, n in self.counts.items()})


@lru_cache(maxsize=1024)
def flat_name(name: str, label: str | None) -> str:
    """Return the flat name of a count: "name", or "name_label"."""
    return name if label is None else f"{name}_{label}"
