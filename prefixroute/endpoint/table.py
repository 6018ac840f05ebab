"""One table of endpoints: what joins, changes or leaves does so at the index, the fleet and the owner's side alike.

| what happens | the index | the fleet | the owner's side |
|---|---|---|---|
| an endpoint of this node's own is added | gives it a bit | takes in its `LocalStanding` | a `LocalEndpoint` |
| gossip meets one of another node | gives it a bit | takes in its `PeerStanding` | |
| keys of its replica change | takes them in slices | | |
| its load, liveness or owner changes | | is refreshed | |
| its engine tells of blocks | takes them at once | | changes what it publishes |
| it leaves, or is forgotten | clears its keys in slices, then frees its bit | drops it | drops it |

Rules:
1. The row of an endpoint is its standing: name, copy, owner and bit. The fleet has all rows, by name and by bit. An
   endpoint of this node's own has its `LocalEndpoint` besides, which has that row.
2. Large changes are taken in slices: keys of replicas wait in `feed`, blocks of a local engine in the `backlog` of its
   `LocalEndpoint`. A call that may do a slice of the former begins with `begin`.
3. Copies and peers are gossip's; here they are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from typing_extensions import Self

from ..errors import UsageError
from ..events import EngineBatch, Journal, ResidencyChanged
from ..keys.chain import TokenChain, wire_key
from ..keys.keyset import Delta, Keys
from ..keys.names import owner_of
from ..load import LoadReport, PushBackState
from ..replication.copies import Copy, Peer
from ..routing.fleet import Fleet
from ..routing.index import MergedIndex
from ..routing.index_feed import IndexFeed
from ..routing.standing import PeerStanding, Standing
from .local import LocalEndpoint, OwnSettings


class EndpointHandle(str):
    """An endpoint's id, "node/name", which means one life of it: what `add_endpoint` returned, to its removal.

    It is that text wherever a text is wanted, and two lives of one name are equal as texts.
    """

    __slots__ = ("life",)

    life: tuple[int, int]
    """The node's own life, by chance, and the number of the endpoint's in it."""

    def __new__(cls, endpoint: str, life: tuple[int, int]) -> Self:
        """Make the handle of one life of an endpoint; `Node.add_endpoint` does."""
        handle = super().__new__(cls, endpoint)
        handle.life = life
        return handle

    def __getnewargs__(self) -> tuple[str, tuple[int, int]]:  # type: ignore[override]
        return str(self), self.life


class EndpointTable:
    """Every endpoint that a node knows. `news(now, first)` is called when peers should soon hear of a change here.

    `first` is for the first blocks that any engine of this node holds.
    """

    def __init__(
        self,
        fleet: Fleet,
        own: OwnSettings,
        copies: Mapping[str, Copy],
        peers: Mapping[str, Peer],
        news: Callable[[float, bool], None],
        now: float,
        journal: Journal,
        node: str = "",
    ) -> None:
        self._node = node
        self.index = MergedIndex()
        self.feed = IndexFeed(self.index)
        self.fleet = fleet
        self.locals: dict[str, LocalEndpoint] = {}
        """This node's own endpoints, by name."""
        self.now = now
        """When the last call began that may leave something to do."""
        self._copies = copies
        self._peers = peers
        self._news = news
        self._own = own
        self._journal = journal
        self._holds = False
        """Whether any engine of this node held a block so far."""

    def begin(self, now: float) -> None:
        """Begin a call that may do a slice of what waits for the index."""
        self.now = now
        self.feed.begin()

    @property
    def behind(self) -> bool:
        """Whether anything is left to do in slices. O(local endpoints)."""
        return bool(self.feed.waiting) or any(local.backlog for local in self.locals.values())

    # --- this node's own endpoints -------------------------------------------------------------------------

    def local(self, endpoint: str) -> LocalEndpoint:
        """Return an endpoint of this node's own. Raises `UsageError` for another, and for a life that has ended."""
        local = self.locals.get(endpoint) if isinstance(endpoint, str) else None
        if local is None:
            raise UsageError(f"{endpoint!r} is no endpoint of this node: it has {sorted(self.locals)}")
        if type(endpoint) is EndpointHandle and endpoint.life != local.life:
            raise UsageError(f"this life of {endpoint!r} has ended: use the handle that add_endpoint returned last")
        return local

    def living(self, endpoint: str, what: str) -> LocalEndpoint | None:
        """As `local`; but `what` comes with the handle of a life that has ended is counted, and None is returned."""
        if type(endpoint) is EndpointHandle and owner_of(endpoint) == self._node:
            local = self.locals.get(endpoint)
            if local is None or local.life != endpoint.life:
                self.dropped(what)
                return None
            return local
        return self.local(endpoint)

    def dropped(self, what: str) -> None:
        """Count what belongs to an older life of an endpoint."""
        self._journal.count("older_life", what)

    def is_attempt(self, endpoint: EndpointHandle, booked: Standing | None) -> bool:
        """Whether an attempt that is `booked` there goes to this life of the endpoint. O(1)."""
        local = self.locals.get(endpoint)
        current = local is not None and local.life == endpoint.life
        return booked is None or current == (local is not None and booked is local.standing)

    def add(self, copy: Copy, credited: Sequence[str], now: float, life: tuple[int, int] = (0, 0)) -> None:
        """Take in an endpoint of this node's own, in a new `life`; `credited` are the tiers whose blocks count."""
        bit = self.index.join(copy.endpoint)
        held = partial(self.index.held, bit)
        local = LocalEndpoint(copy, bit, now, self._own, credited, held, self._journal)
        local.life = life
        self.locals[copy.endpoint] = local
        self.fleet.add(local.standing, now)

    def remove(self, endpoint: str) -> None:
        """Drop an endpoint of this node's own; its keys leave the index in slices."""
        local = self.locals.pop(endpoint)
        self.fleet.drop(endpoint)
        self.feed.retire(endpoint, map(wire_key, local.residency.published()))
        self.feed.go_on()

    def apply(self, endpoint: str, batch: EngineBatch, now: float) -> None:
        """Apply what an engine did; of a large batch the first portion. A batch of another rank is refused."""
        local = self.living(endpoint, "batches")
        if local is None:
            return
        batch = local.sound(batch)
        if local.admits(batch):
            self._apply(local, batch, now)
            return
        # Two caches in one mirror would be a lie about both: say so, the first time.
        self._journal.count("batches_of_another_rank")
        if self._journal.counts["batches_of_another_rank", None] == 1:
            of, to = f"events of rank {batch.rank}", f"the endpoint of rank {local.rank}"
            self._journal.tell(ResidencyChanged(endpoint, "mixed", f"{of} came to {to}: add an endpoint for each rank"))

    def apply_waiting(self, now: float) -> None:
        """Apply the next portion of what waits at the first local endpoint that is behind."""
        behind = next((local for local in self.locals.values() if local.backlog), None)
        if behind is not None:
            self._apply(behind, None, now)

    def probed(self, endpoint: str, report: LoadReport, now: float) -> None:
        """Take a probe's report of an endpoint's engine."""
        local = self.living(endpoint, "reports")
        if local is None:
            return
        self._took(local, local.probed(report, now), news_at=now)
        sizes = [one.report.capacity_tokens for one in self.locals.values()]
        self.fleet.entry.capacity_tokens = sum(sizes) if all(sizes) else 0
        refused = local.push_back.state is PushBackState.REFUSING
        if local.advertise(now) and (refused or local.push_back.state is PushBackState.REFUSING):
            self._news(now, False)
        self.fleet.refresh(local.standing, now)

    def go_by_history(self, endpoint: str, reason: str, now: float) -> None:
        """Let what is routed stand in for an engine's events."""
        local = self.living(endpoint, "reasons")
        if local is not None:
            self._took(local, local.go_by_history(reason, now), news_at=now)

    def served(self, local: LocalEndpoint, chain: TokenChain, cached_tokens: int | None, now: float) -> None:
        """Learn from a prompt that a local engine served."""
        unused = local.unused
        self._took(local, local.served(chain, cached_tokens, now))
        if local.unused is not unused:
            local.advertise(now)
            self._news(now, False)

    def begun(self, ticket: int, chain: TokenChain, standing: Standing, depth: int, now: float) -> None:
        """Announce what a prompt will leave: peers that get such a prompt before the engine tells are to know."""
        if self.locals[standing.name].promise(ticket, chain, depth):
            self._news(now, False)

    def ended(self, ticket: int, standing: Standing) -> None:
        """Note that an attempt at an endpoint is over: what it announced is in the engine's events, or never will."""
        local = self.locals.get(standing.name)
        if local is not None:
            local.publisher.over(ticket)

    def advertise_all(self, now: float) -> None:
        """Bring all adverts up to date, and gather what is to be published. O(local endpoints)."""
        for local in self.locals.values():
            local.advertise(now)
            local.publisher.gather(now)

    # --- other nodes' endpoints ----------------------------------------------------------------------------

    def replica_changed(self, endpoint: str, added: Keys, removed: Keys) -> None:
        """Take the keys that a replica gained and lost. They are in the index by and by (`feed`)."""
        copy = self._copies.get(endpoint)
        if endpoint not in self.fleet.standings:
            assert copy is not None
            self._join(copy, self.now)
        self.feed.take(endpoint, added, removed, copy.keys.anchor_stride if copy is not None else 1)

    def follow(self, touched: Iterable[str], lost: bool, now: float) -> None:
        """Follow what gossip learnt: endpoints that came or spoke are `touched`; `lost` says whether any went."""
        copies, fleet = self._copies, self.fleet
        if lost:
            for endpoint in [s.name for s in fleet.standings.values() if copies.get(s.name) is not s.copy]:
                fleet.drop(endpoint)
                self.feed.retire(endpoint)
        for endpoint in sorted(touched):
            copy, standing = copies.get(endpoint), fleet.standings.get(endpoint)
            if copy is not None and standing is None:
                self._join(copy, now)
            elif copy is not None and standing is not None:
                if isinstance(standing, PeerStanding):
                    standing.peer = self._peers.get(owner_of(endpoint))
                fleet.refresh(standing, now)
        self.feed.go_on()

    def _join(self, copy: Copy, now: float) -> None:
        bit, peer = self.index.join(copy.endpoint), self._peers.get(owner_of(copy.endpoint))
        self.fleet.add(PeerStanding(copy, peer, bit, now), now)

    def _apply(self, local: LocalEndpoint, batch: EngineBatch | None, now: float) -> None:
        """Apply the next portion of what an engine did, of this batch or of one that still waits."""
        portion = local.portion(batch)
        if portion is None:
            return
        self._took(local, local.apply(portion, now))
        self.now = now
        first, self._holds = not self._holds, self._holds or local.residency.live_blocks > 0
        self._news(now, first and self._holds)
        if local.residency.hit_unit and local.hit_unit != local.copy.advert.hit_unit:
            # The first event tells the engine's block; until then a match is rounded down to the canonical one.
            local.advertise(now)
            self.fleet.refresh(local.standing, now)

    def _took(self, local: LocalEndpoint, changes: Delta, *, news_at: float | None = None) -> None:
        """Bring what changed at a local endpoint into the index."""
        if changes.added or changes.removed:
            self.index.update(local.copy.endpoint, changes.added, changes.removed)
            if news_at is not None:
                self._news(news_at, False)

    def _check(self) -> None:
        """Assert that index, fleet, copies and residencies agree. O(blocks)."""
        assert set(self.fleet.standings) == set(self._copies)
        self.fleet._check()
        expected: dict[str, set[int]] = {}
        for endpoint, copy in self._copies.items():
            copy.keys._check()
            standing = self.fleet.standings[endpoint]
            assert standing.copy is copy and standing.bit == self.index.bit(endpoint)
            assert standing.local is copy.mine is (endpoint in self.locals)
            standing.ledger._check()
            if copy.mine:
                local = self.locals[endpoint]
                assert local.standing is standing
                local.residency._check()
                local.publisher._check()
                expected[endpoint] = {wire_key(key) for key in local.residency.published()}
            else:
                expected[endpoint] = set(copy.keys.keys.tolist())
        self.feed._check(expected)


def check_endpoint(endpoint: str, url: str, credited: Sequence[str]) -> None:
    """Raise `UsageError` for an endpoint's id, service address or tiers that cannot be used."""
    if not isinstance(url, str) or len(url.encode(errors="replace")) > 256:
        raise UsageError(f"an endpoint's url is a text of at most 256 bytes, not {url!r}")
    if len(endpoint.encode(errors="replace")) > 80:
        raise UsageError("an endpoint's id has at most 80 bytes")
    if not isinstance(credited, (tuple, list)) or not all(isinstance(tier, str) for tier in credited):
        raise UsageError(f"credited must be a list of tiers, as ('gpu', 'cpu'), not {credited!r}")
