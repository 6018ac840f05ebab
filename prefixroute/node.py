"""The node: the only object that a transport or a server touches.

Bytes and clock readings go in; bytes, decisions and events come out. Nothing here waits, and nothing that a peer or an
engine sends raises.

    transport   receive_datagram(data, source, now)   datagrams_to_send(now)   next_timer()   handle_timer(now)
    engine      apply(endpoint, batch, now)           set_load(endpoint, report, now)
                go_by_history(endpoint, reason, now)
    server      route(prompt, now) -> Decision        first_token(decision, now)   report(decision, outcome, now)
    operator    events()   counters   stats(now)      explain(decision)

`now` is any clock in seconds that does not go back; only differences matter.

No call takes long, a few milliseconds at most: a large batch, a peer's large set, an answer of many datagrams are taken
on in slices. While something is left to do the timer is due at once, and `handle_timer` does the next slice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from math import inf
from typing import Any

from .endpoint.local import LocalEndpoint
from .errors import UsageError
from .events import (
    DEFAULT_NAMESPACE,
    ContentSpan,
    EngineBatch,
    Journal,
    Namespace,
    NodeEvent,
    ResidencyChanged,
    StreamGap,
    StreamRestarted,
)
from .keys.chain import STRIDE, ChainSpec, TokenChain, wire_key
from .keys.chain_memo import ChainMemo
from .keys.domain import Domain, checked_secrets
from .keys.keyset import Delta, Keys
from .keys.names import checked_name, owner_of
from .load import LoadReport
from .policy.interface import Policy
from .policy.rent_or_buy import RentOrBuy
from .replication.copies import Copy
from .replication.gossip import Gossip
from .replication.members import MAX_HEARSAY
from .replication.outbox import Datagram
from .residency.mirror import Residency
from .routing.decision import Decision, Outcome
from .routing.explain import Explanation
from .routing.index_feed import Upkeep
from .routing.router import Flight, Hooks, Router
from .routing.standing import Standing
from .routing.zones import Gate
from .settings import NodeSettings
from .stats import Digest, NodeStats, Tallies, round_trips, row_of

SEND_BYTES = 16384
"""Of an answer so much is encoded at once, or one datagram that is larger: 2 ms."""


class Node:
    """One node of the fleet. `node` is its name, unique in the cluster and without a slash. `rng` is seeded by chance.

    Raises `UsageError` for names and settings that cannot be used.
    """

    def __init__(
        self,
        node: str,
        domain: Domain,
        *,
        rng: random.Random,
        now: float,
        settings: NodeSettings | None = None,
        policy: Policy | None = None,
        secrets: Sequence[bytes] = (),
    ) -> None:
        self.node = checked_name(node)
        self.domain = domain
        self.settings = settings or NodeSettings()
        self.journal = Journal()
        """What this node tells and counts; a transport may count its own failures here."""
        self._spec = ChainSpec(domain.block_size, domain.mix)
        self._memo = ChainMemo(STRIDE * self._spec.block_bytes)
        self._root = domain.root_key(DEFAULT_NAMESPACE)
        self._locals: dict[str, LocalEndpoint] = {}
        self._now = now
        self._gossiped = False
        """Whether the last timer went to gossip."""
        # Each node's flag lasts a little longer or shorter, so that not all are asked again at one moment.
        self._push_back_ttl_s = self.settings.push_back.ttl_s * rng.uniform(0.8, 1.2)
        self._router = Router(
            policy or RentOrBuy(),
            domain.block_size,
            self.settings.outcome_timeout_s,
            self.settings.push_back.ttl_s,
            self.settings.max_in_flight,
            rng,
            self.journal,
            Hooks(self._learn, self._begun, self._ended),
            Gate(self.settings.zone, self.settings.zones, self.journal) if self.settings.zone else None,
        )
        self._index, self._fleet = self._router.index, self._router.fleet
        self._tallies = Tallies()
        self._upkeep = Upkeep(self._index)
        self._gossip = Gossip(node, domain, self.settings, rng, now, self.journal, self._index_replica)
        self._peers, self._members = self._gossip.peers, self._gossip.members
        self._tempo, self._outbox = self._gossip.tempo, self._gossip.outbox
        if secrets:
            self.set_secrets(secrets)

    # --- membership ----------------------------------------------------------------------------------------

    def add_endpoint(
        self,
        name: str = "0",
        *,
        url: str = "",
        incarnation: int,
        now: float,
        credited: Sequence[str] = ("gpu", "cpu"),
    ) -> str:
        """Own an endpoint (an engine, or one data-parallel rank of it); return its id, "node/name".

        `incarnation` orders the lives of the endpoint's process: wall-clock nanoseconds at its start will do, since an
        owner that meets a later one of itself moves past it. `url` is where peers forward to, opaque here.
        """
        endpoint = f"{self.node}/{checked_name(name)}"
        if endpoint in self._locals:
            raise UsageError(f"endpoint {endpoint!r} was added already")
        if not isinstance(incarnation, int) or not 0 < incarnation <= MAX_HEARSAY:
            raise UsageError("incarnation must be an int in 1 .. 2**62; time.time_ns() will do")
        if len(url.encode()) > 256 or len(endpoint.encode()) > 80:
            raise UsageError("an endpoint's url has at most 256 bytes and its id at most 80")
        copy = self._members.join(endpoint, incarnation, url, now)
        self._join(copy, now)
        held = partial(self._index.held, self._index.bit(endpoint))
        settings = self.settings
        self._locals[endpoint] = LocalEndpoint(
            copy, self.domain, settings.push_back, credited, settings.digest_bytes, held
        )
        return endpoint

    def remove_endpoint(self, endpoint: str, now: float) -> None:
        """Own an endpoint no longer: no work goes there any more, and peers hear that it has left."""
        local = self._local(endpoint)
        self._begin(now)
        self._members.leave(endpoint, now)
        del self._locals[endpoint]
        self._fleet.drop(endpoint)
        self._upkeep.retire(endpoint, map(wire_key, local.residency.published()))
        self._upkeep.go_on()

    def leave(self, now: float) -> None:
        """Remove all endpoints and tell every peer at once; send what `datagrams_to_send` then returns, and stop."""
        for endpoint in list(self._locals):
            self.remove_endpoint(endpoint, now)
        self._gossip.farewell(now)

    def add_peer(self, node: str, address: Hashable, now: float) -> None:
        """Gossip with another node at `address`, which is the transport's own and opaque here."""
        if node == self.node:
            raise UsageError("a node is no peer of itself")
        self._begin(now)
        self._peers.add(checked_name(node), address, now)
        self._follow_copies(now)

    def remove_peer(self, node: str, now: float) -> None:
        """Stop gossiping with a node and forget its endpoints, whoever still speaks of them."""
        self._begin(now)
        if self._members.remove_peer(node):
            self._follow_copies(now)

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Authenticate datagrams with `secrets` from now on: the first signs, each is good; by default the domain's.

        So they are changed in three steps over the fleet: old and new, new and old, new alone. Keys and fingerprint
        stay those of the domain's own secret. Raises `UsageError` for none, more than four, or one that is too long.
        """
        self._gossip.set_secrets(checked_secrets(secrets))

    # --- transport -----------------------------------------------------------------------------------------

    def receive_datagram(self, data: bytes, source: Hashable, now: float) -> None:
        """Take a datagram. Bad bytes are counted and told by an event, never raised."""
        self._begin(now)
        if self._gossip.receive(data, source, now):
            self._follow_copies(now)
        else:
            # What is refused costs no more than its refusal.
            self._upkeep.go_on()
        self._outbox.pack(SEND_BYTES)

    def screen(self, data: bytes, source: Hashable, now: float) -> bool:
        """Whether a datagram has a right tag; others are counted and told here, so that a transport can drop them."""
        return self._gossip.screen(data, source, now)

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        """Return the datagrams to send now; each is returned once."""
        return self._outbox.take()

    def next_timer(self) -> float:
        """Return the clock reading at which `handle_timer` wants to be called; one that is past asks for it at once."""
        due_at = self._tempo.next_at
        return min(self._now, due_at) if self._behind() else due_at

    def handle_timer(self, now: float) -> None:
        """Do what is due: advertise, sweep, gossip; or a slice of what is left to do. O(endpoints)."""
        self._begin(now)
        # In turn, so that neither waits for ever where the timer is handled at its own pace.
        if now < self._tempo.next_at or (self._gossiped and self._behind()):
            self._gossiped = False
            self._slice(now)
            return
        self._gossiped = True
        for endpoint, local in self._locals.items():
            self._advertise(endpoint, now)
            local.publisher.gather(now)
        self._gossip.exchange(now)
        self._follow_copies(now)
        self._fleet.refresh_all(now)
        self._router.expire(now)
        if self._tallies.open:
            self._tallies.forget(self._router.flights)

    def events(self) -> list[NodeEvent]:
        """Return and forget what there is to tell; at most `MAX_EVENTS` are kept."""
        return self.journal.take_events()

    @property
    def counters(self) -> Counter[str]:
        """Everything that this node has counted, by name; a copy. O(counters)."""
        return self.journal.counters()

    # --- engine --------------------------------------------------------------------------------------------

    def apply(self, endpoint: str, batch: EngineBatch, now: float) -> None:
        """Apply what the endpoint's engine did; of a large batch the first portion, the rest with the next timers.

        Never raises for its content. An endpoint is one data-parallel rank: the first batch says which, and batches of
        another one are refused.
        """
        local = self._local(endpoint)
        if not all(isinstance(event, (StreamGap, StreamRestarted)) for event in batch.events):
            # Only the engine's own events tell a rank: a follower may mark its stream before it knows one.
            if local.rank is None:
                local.rank = batch.rank
            elif local.rank != batch.rank:
                self._refuse_rank(endpoint, local.rank, batch.rank)
                return
        self._apply_next(endpoint, batch, now)

    def _apply_next(self, endpoint: str, batch: EngineBatch | None, now: float) -> None:
        """Apply the next portion of what the endpoint's engine did, of this batch or of one that waits still."""
        local = self._locals[endpoint]
        portion = local.portion(batch)
        if portion is None:
            return
        self._took(endpoint, *local.apply(portion, now))
        self._now = now
        self._tempo.stir(now)
        if local.residency.hit_unit not in (0, local.copy.advert.hit_unit):
            # The first event tells the engine's block; until then a match is rounded down to the canonical one.
            self._advertise(endpoint, now)
            self._fleet.refresh(self._fleet.standings[endpoint], now)

    def set_load(self, endpoint: str, report: LoadReport, now: float) -> None:
        """Take a probe's report of the endpoint's engine. One that fell asleep has dropped its cache."""
        self._took(endpoint, *self._local(endpoint).probed(report, now), news_at=now)
        self._advertise(endpoint, now)
        self._fleet.refresh(self._fleet.standings[endpoint], now)

    def go_by_history(self, endpoint: str, reason: str, now: float) -> None:
        """Let what is routed stand in for the engine's events, which will not come, and say so; `reason` says why.

        Without this it begins after some served prompts without an event. It ends with the first block that the engine
        tells of. Harmless when it is so already.
        """
        self._took(endpoint, *self._local(endpoint).go_by_history(reason, now), news_at=now)

    def load(self, endpoint: str, now: float) -> LoadReport:
        """Return what the endpoint advertises right now; fit to ride in a reply."""
        self._local(endpoint)
        self._advertise(endpoint, now)
        return self._members.copies[endpoint].advert.report

    def residency(self, endpoint: str) -> Residency:
        """Return the mirror of a local endpoint's engine, to look at."""
        return self._local(endpoint).residency

    # --- server --------------------------------------------------------------------------------------------

    def chain(
        self, tokens: Any, *, namespace: Namespace = DEFAULT_NAMESPACE, contents: Sequence[ContentSpan] = ()
    ) -> TokenChain:
        """Prepare a prompt, so that it is packed and hashed once however often it is used.

        `tokens` is a sequence of ints or a one-dimensional integer buffer. Raises `UsageError` that says what to pass.
        """
        root = self._root if namespace is DEFAULT_NAMESPACE else self.domain.root_key(namespace)
        return TokenChain(self._spec, root, tokens, contents, namespace, self._memo)

    def route(
        self,
        prompt: Any,
        now: float,
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        contents: Sequence[ContentSpan] = (),
        forwarded: bool = False,
        budget_s: float = inf,
        tenant: str = "",
    ) -> Decision:
        """Decide who serves a prompt: tokens, or a chain made by `chain`. Books the expected work at the target.

        With `forwarded`, as for a request that another node sent here, only local endpoints are considered. Give the
        `budget_s` of that node's decision where it came along: a prompt that would take longer is `declined`. `tenant`
        says whom to count it for (`NodeStats.tenants`); what keeps tenants apart is the namespace. Raises `UsageError`
        when tokens cannot be used, or when no endpoint at all is known.
        """
        if not isinstance(prompt, TokenChain):
            prompt = self.chain(prompt, namespace=namespace, contents=contents)
        elif namespace not in (DEFAULT_NAMESPACE, prompt.namespace) or contents:
            raise UsageError("a prepared chain has its namespace and contents: give them to chain(), not to route()")
        elif prompt.spec != self._spec:
            raise UsageError("this chain was prepared by a node of another domain")
        decision = self._router.route(prompt, forwarded, now, budget_s)
        if tenant:
            self._tallies.decided(tenant, decision, forwarded)
        if decision.local and decision.matched_tokens and not decision.declined:
            depth = next(c.depth for c in decision.candidates if c.endpoint == decision.target)
            self._locals[decision.target].residency.forest.use(prompt, depth, now)
        return decision

    def first_token(self, decision: Decision, now: float) -> None:
        """Note that the target's first token came: its prefill is done, so its booked work is released."""
        self._router.first_token(decision.id, now)

    def report(self, decision: Decision, outcome: Outcome, now: float, *, endpoint: str | None = None) -> str | None:
        """Take an attempt's outcome; return the endpoint to try next, or None when there is nothing (more) to try.

        Give `endpoint`, whose attempt it was, where reports may come late or twice: what is not of the attempt under
        way is only counted then. Without it a report is taken for the attempt under way.
        """
        return self._router.report(decision.id, outcome, now, endpoint)

    def explain(self, decision: Decision) -> Explanation:
        """Return every term of every candidate that the decision weighed."""
        return Explanation(decision)

    def endpoint_url(self, endpoint: str) -> str:
        """Return an endpoint's service address, "" if it is not known."""
        copy = self._members.copies.get(endpoint)
        return copy.url if copy is not None else ""

    def digests(self) -> dict[str, Digest]:
        """Return what this node holds of every endpoint, its own included, as it was published. O(endpoints)."""
        copies = self._members.copies.values()
        return {c.endpoint: Digest(c.incarnation, c.keys.version, c.keys.anchor_stride, c.keys.keys) for c in copies}

    def stats(self, now: float) -> NodeStats:
        """Return the node's view of everything it knows. O(endpoints)."""
        rows = [
            row_of(standing, self._locals.get(standing.name), bool(standing.bit & self._fleet.usable), now)
            for standing in self._fleet.standings.values()
        ]
        peers = {peer.node: peer.state for peer in self._peers.values()}
        return NodeStats(
            *(
                self.node,
                tuple(rows),
                peers,
                len(self._index),
                len(self._router.flights),
                dict(self.journal.counters()),
            ),
            zone=self.settings.zone,
            round_trips=round_trips(self._peers.values(), self._members.copies.values()),
            tenants=self._tallies.stats(),
        )

    # --- upkeep --------------------------------------------------------------------------------------------

    def _behind(self) -> bool:
        """Whether anything is left to do in slices."""
        return self._upkeep.waiting or self._outbox.packing or any(local.backlog for local in self._locals.values())

    def _slice(self, now: float) -> None:
        """Do a slice of what is left to do, of each kind."""
        self._upkeep.go_on()
        self._outbox.pack(SEND_BYTES)
        behind = next((name for name, local in self._locals.items() if local.backlog), None)
        if behind is not None:
            self._apply_next(behind, None, now)

    def _learn(self, flight: Flight, standing: Standing, outcome: Outcome, now: float) -> None:
        """A request was served: by a local endpoint, its engine's speed and cache show."""
        if self._tallies.open:
            weighed = next(c for c in flight.decision.candidates if c.endpoint == standing.name)
            self._tallies.served(flight.decision, standing.local, weighed.matched_tokens, outcome)
        local = self._locals.get(standing.name)
        if local is None:
            flight.chain.remember()
            return
        if outcome.ttft_s is not None and outcome.cached_tokens is not None:
            uncached = flight.decision.prompt_tokens - outcome.cached_tokens
            standing.estimate.add(uncached, outcome.ttft_s, flight.queued)
        self._took(standing.name, *local.served(flight.chain, outcome.cached_tokens, now))
        flight.chain.remember()  # by now it is packed

    def _begun(self, ticket: int, chain: TokenChain, standing: Standing, depth: int, now: float) -> None:
        """Peers that get such a prompt before the engine has told of this one are to know where it is."""
        if self._locals[standing.name].promise(ticket, chain, depth):
            self._tempo.stir(now)

    def _ended(self, ticket: int, standing: Standing) -> None:
        local = self._locals.get(standing.name)
        if local is not None:
            local.publisher.over(ticket)

    def _refuse_rank(self, endpoint: str, ours: int, theirs: int) -> None:
        """Two caches in one mirror would be a lie about both: say so, the first time."""
        self.journal.count("batches_of_another_rank")
        if self.journal.counts["batches_of_another_rank", None] == 1:
            reason = f"events of rank {theirs} came to the endpoint of rank {ours}: add an endpoint for each rank"
            self.journal.tell(ResidencyChanged(endpoint, "mixed", reason))

    def _took(self, endpoint: str, changes: Delta, told: list[NodeEvent], *, news_at: float | None = None) -> None:
        if changes.added or changes.removed:
            self._index.update(endpoint, changes.added, changes.removed)
            if news_at is not None:
                self._tempo.stir(news_at)
        for event in told:
            self.journal.tell(event)

    def _advertise(self, endpoint: str, now: float) -> None:
        standing = self._fleet.standings[endpoint]
        for event in self._locals[endpoint].advertise(standing, self._push_back_ttl_s, now):
            self.journal.tell(event)

    def _begin(self, now: float) -> None:
        """Begin a call that may do a slice of upkeep."""
        self._now = now
        self._upkeep.begin()

    def _index_replica(self, endpoint: str, added: Keys, removed: Keys) -> None:
        """Gossip changed a replica's keys."""
        copy = self._members.copies.get(endpoint)
        if endpoint not in self._fleet.standings:
            assert copy is not None
            self._join(copy, self._now)
        self._upkeep.take(endpoint, added, removed, copy.keys.anchor_stride if copy is not None else 1)

    def _join(self, copy: Copy, now: float) -> None:
        self._index.join(copy.endpoint)
        peer = self._peers.get(owner_of(copy.endpoint))
        self._fleet.add(Standing(copy, peer, self._index.bit(copy.endpoint), now), now)

    def _follow_copies(self, now: float) -> None:
        """Bring standings up to date with what gossip learnt: endpoints that came, went, or spoke."""
        copies = self._members.copies
        if self._members.take_lost():
            for endpoint in [s.name for s in self._fleet.standings.values() if copies.get(s.name) is not s.copy]:
                self._fleet.drop(endpoint)
                self._upkeep.retire(endpoint)
        for endpoint in sorted(self._members.take_touched()):
            copy = copies.get(endpoint)
            if copy is None:
                continue
            standing = self._fleet.standings.get(endpoint)
            if standing is None:
                self._join(copy, now)
            else:
                standing.peer = self._peers.get(owner_of(endpoint))
                self._fleet.refresh(standing, now)
        self._upkeep.go_on()

    def _local(self, endpoint: str) -> LocalEndpoint:
        try:
            return self._locals[endpoint]
        except KeyError:
            raise UsageError(f"{endpoint!r} is no endpoint of this node: it has {sorted(self._locals)}") from None

    def _check(self) -> None:
        """Assert that index, fleet, replicas and residencies agree. O(blocks)."""
        assert set(self._fleet.standings) == set(self._members.copies)
        self._fleet._check()
        expected: dict[str, set[int]] = {}
        for endpoint, copy in self._members.copies.items():
            copy.keys._check()
            if copy.mine:
                residency = self._locals[endpoint].residency
                residency._check()
                expected[endpoint] = {wire_key(key) for key in residency.published()}
                self._locals[endpoint].publisher._check()
            else:
                expected[endpoint] = set(copy.keys.tolist())
        self._upkeep._check(expected)
