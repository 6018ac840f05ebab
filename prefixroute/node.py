"""The node: the only object that a transport or a server touches.

Bytes and clock readings go in; bytes, decisions and events come out. Nothing here waits, and nothing that a peer or an
engine sends raises.

    transport   receive_datagram(data, source, now)   datagrams_to_send(now)   next_timer()   handle_timer(now)
    engine      apply(endpoint, batch, now)           set_load(endpoint, report, now)
                go_by_history(endpoint, reason, now)
    server      route(prompt, now) -> Decision        first_token(decision, now)   report(decision, outcome, now)
    operator    events()   counters   stats(now)      explain(decision)

`now` is a reading of one clock in seconds, the same for all calls; only differences matter (`node_clock`). One thread
calls a node: that of the first call, or which last called `take_over`; any other gets a `UsageError`. For many threads
there is `prefixroute.threads`.

No call takes long, a few milliseconds at most: what is large is done in slices. While a slice is left to do the timer
is due at once, and `handle_timer` does one of each kind. These are all the backlogs that a node has:

| of what | comes with | waits in | a slice is |
|---|---|---|---|
| keys for the index | a peer's large set; an endpoint that leaves | `IndexFeed` | `SLICE_KEYS`, 4,096: 1.5 ms |
| blocks for a residency | a large batch of an engine | `LocalEndpoint.backlog` | `PORTION_BLOCKS`, 1,024 |
| bytes for peers | an answer of many datagrams | `Gossip` | `SEND_BYTES`, or one larger datagram: 2 ms |
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf
from typing import Any, ClassVar

from .endpoint.local import OwnSettings
from .endpoint.table import EndpointHandle, EndpointTable, check_endpoint
from .errors import UsageError, expect
from .events import DEFAULT_NAMESPACE, ContentSpan, EngineBatch, Journal, Namespace, NodeEvent
from .keys.chain import STRIDE, TOKEN_LIMIT, ChainSpec, TokenChain, pack_tokens
from .keys.chain_memo import ChainMemo
from .keys.domain import Domain, checked_secrets
from .keys.names import checked_address, checked_name, checked_tenant, owner_of
from .load import LoadReport
from .node_clock import NodeClock
from .policy.interface import Policy
from .policy.rent_or_buy import RentOrBuy
from .replication.gossip import Gossip
from .replication.members import MAX_HEARSAY
from .replication.outbox import Datagram
from .residency.mirror import Residency
from .routing.answers import Flight
from .routing.decision import FORWARDED, Decision, Explanation, Outcome
from .routing.fleet import Fleet, offered
from .routing.flights import FlightBounds, Flights, Hooks
from .routing.router import Router
from .routing.standing import Standing
from .routing.zones import Gate
from .settings import NodeSettings
from .stats import Digest, NodeStats, RoundTrip, Tallies, row_of

SEND_BYTES = 16384
"""Bytes of an answer that are encoded at once: 2 ms."""


class Node:
    """One node of the fleet. `node` is its name, unique in the cluster and without a slash. `rng` is seeded by chance.

    Raises `UsageError` for names and settings that cannot be used.
    """

    thread_id: ClassVar[Callable[[], int]] = staticmethod(int)
    """Names the calling thread, in 40 ns. Set by the package: no part of the core knows threads, or waits for one."""

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
        self.domain = expect(domain, Domain, "domain")
        expect(rng, random.Random, "rng")
        self.settings = NodeSettings() if settings is None else expect(settings, NodeSettings, "settings")
        if policy is not None and (isinstance(policy, type) or not callable(getattr(policy, "choose", None))):
            raise UsageError(f"policy must be a policy with a method `choose`, as RentOrBuy(), not {policy!r}")
        self.journal = Journal()
        """What this node tells and counts; a transport may count its own failures here."""
        self._clock = NodeClock(now, self.journal)
        self._ident = type(self).thread_id
        self._thread = 0
        """Whose calls are taken, 0 before the first."""
        self._spec = ChainSpec(domain.block_size, domain.mix)
        self._memo = ChainMemo(STRIDE * self._spec.block_bytes)
        self._root = domain.root_key(DEFAULT_NAMESPACE)
        self._lives = 0
        """Endpoints added so far."""
        self._gossiped = False
        """Whether the last timer went to gossip."""
        self._tallies = Tallies()
        settings, journal = self.settings, self.journal
        now = self._clock.read(now)
        gate = Gate(settings.zone, settings.zones, journal) if settings.zone else None
        # Each node's flag lasts a little longer or shorter, so that not all are asked again at one moment.
        ttl_s = settings.push_back.ttl_s * rng.uniform(0.8, 1.2)
        own = OwnSettings(domain, settings.push_back, ttl_s, settings.digest_bytes)
        # Gossip is there before its table, and tells it of changes.
        self._gossip = Gossip(node, domain, settings, rng, now, journal, lambda *c: self._table.replica_changed(*c))
        self._peers, self._members = self._gossip.peers, self._gossip.members
        self._tempo, self._outbox = self._gossip.tempo, self._gossip.outbox
        fleet, copies = Fleet(rng, gate), self._members.copies
        self._table = EndpointTable(fleet, own, copies, self._peers, self._tempo.stir, now, journal, node)
        router = Router(policy or RentOrBuy(), self._table.index, fleet, domain.block_size, rng)
        bounds = FlightBounds(settings.outcome_timeout_s, settings.push_back.ttl_s, settings.max_in_flight)
        hooks = Hooks(self._served, self._table.begun, self._table.ended)
        self._flights = Flights(router, bounds, hooks, journal, now)
        if secrets:
            self.set_secrets(secrets)

    def take_over(self) -> None:
        """Take the calls of this thread from now on, and no other's. The other one must have ended its last call."""
        self._thread = self._ident()

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

        The id is an `EndpointHandle` of this life of the endpoint: what comes with it after `remove_endpoint`, even
        when the name is there again, is counted and dropped. Its plain text means whichever life there is.
        `incarnation` orders the lives of the endpoint's process: wall-clock nanoseconds at its start will do, since an
        owner that meets a later one of itself moves past it. `url` is where peers forward to, opaque here.
        """
        now = self._at(now)
        endpoint = f"{self.node}/{checked_name(name)}"
        if endpoint in self._table.locals:
            raise UsageError(f"endpoint {endpoint!r} was added already")
        if isinstance(incarnation, bool) or not isinstance(incarnation, int) or not 0 < incarnation <= MAX_HEARSAY:
            raise UsageError("incarnation must be an int in 1 .. 2**62; time.time_ns() will do")
        check_endpoint(endpoint, url, credited)
        self._lives += 1
        handle = EndpointHandle(endpoint, (self._gossip.freshness.life, self._lives))
        self._table.add(self._members.join(endpoint, incarnation, url, now), credited, now, handle.life)
        return handle

    def remove_endpoint(self, endpoint: str, now: float) -> None:
        """Own an endpoint no longer: no work goes there any more, and peers hear that it has left."""
        now = self._at(now)
        if self._table.living(endpoint, "removals") is not None:
            self._remove(str(endpoint), now)

    def _remove(self, endpoint: str, now: float) -> None:
        self._table.begin(now)
        self._members.leave(endpoint, now)
        self._table.remove(endpoint)

    def leave(self, now: float) -> None:
        """Remove all endpoints and tell every peer at once; send what `datagrams_to_send` then returns, and stop."""
        now = self._at(now)
        for endpoint in list(self._table.locals):
            self._remove(endpoint, now)
        self._gossip.farewell(now)

    def add_peer(self, node: str, address: Hashable, now: float) -> None:
        """Gossip with another node at `address`, which is the transport's own and opaque here."""
        now = self._at(now)
        if checked_name(node) == self.node:
            raise UsageError("a node is no peer of itself")
        self._table.begin(now)
        self._peers.add(node, checked_address(address), now)
        self._follow(now)

    def seed(self, address: Hashable, now: float | None = None) -> None:
        """Be introduced to whoever is at `address`: it becomes a peer, as if it had been added by its name.

        The address is asked until somebody answers, and again when that peer is silent. Who is there takes up a node
        that it does not know if its settings say `learn_peers`, and this node's say its `contact`.
        """
        at = None if now is None else self._at(now)
        self._gossip.addresses.seed(checked_address(address))
        if at is not None:
            self._tempo.stir(at)

    def remove_peer(self, node: str, now: float) -> None:
        """Stop gossiping with a node and forget its endpoints, whoever still speaks of them."""
        now = self._at(now)
        self._table.begin(now)
        if self._members.remove_peer(checked_name(node)):
            self._follow(now)

    def set_secrets(self, secrets: Sequence[bytes]) -> None:
        """Authenticate datagrams with `secrets` from now on: the first signs, each is good; by default the domain's.

        So they are changed in three steps over the fleet: old and new, new and old, new alone. Keys and fingerprint
        stay those of the domain's own secret. Raises `UsageError` for none, more than four, or one that is too long.
        """
        self._gossip.set_secrets(checked_secrets(secrets))

    def limit_datagrams(self, most_bytes: int) -> None:
        """Make no datagram larger than this, whatever `datagram_bytes` allows: what a transport can carry.

        Raises `UsageError` for less than gossip needs with names as long as this domain's.
        """
        self._gossip.limit_datagrams(most_bytes)

    # --- transport -----------------------------------------------------------------------------------------

    def receive_datagram(self, data: bytes, source: Hashable, now: float) -> None:
        """Take a datagram. Bad bytes are counted and told by an event, never raised."""
        now = self._at(now)
        if type(data) is not bytes:
            data = bytes(expect(data, (bytes, bytearray, memoryview), "a datagram"))
        self._table.begin(now)
        if self._gossip.receive(data, source, now):
            self._follow(now)
        else:
            # What is refused costs no more than its refusal.
            self._table.feed.go_on()
        self._outbox.pack(SEND_BYTES)

    def screen(self, data: bytes, source: Hashable, now: float) -> bool:
        """Whether a datagram has a right tag; others are counted and told here, so that a transport can drop them."""
        return self._gossip.screen(data, source, self._at(now))

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        """Return the datagrams to send now; each is returned once."""
        self._at(now)
        return self._outbox.take()

    def next_timer(self) -> float:
        """Return the clock reading at which `handle_timer` wants to be called; one that is past asks for it at once."""
        due_at = min(self._tempo.next_at, self._flights.judge_at)
        return self._clock.reading_of(min(self._table.now, due_at) if self._behind() else due_at)

    def handle_timer(self, now: float) -> None:
        """Do what is due: advertise, gossip, once a round rank all endpoints anew; or a slice of what is left to do.

        O(endpoints), or O(endpoints log endpoints) once a round.
        """
        now = self._at(now, True)
        self._table.begin(now)
        self._flights.judge(now)
        # In turn, so that neither waits for ever where the timer is handled at its own pace.
        if now < self._tempo.next_at or (self._gossiped and self._behind()):
            self._gossiped = False
            self._table.feed.go_on()
            self._outbox.pack(SEND_BYTES)
            self._table.apply_waiting(now)
            return
        self._gossiped = True
        self._table.advertise_all(now)
        begins_round = self._gossip.exchange(now)
        self._follow(now)
        if begins_round:
            self._table.fleet.refresh_all(now)
        else:
            self._table.fleet.refresh_passing(now)
        self._flights.expire(now)
        self._tallies.forget(self._flights.open)

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
        another one are refused. What cannot be an event (a store whose tokens do not fill its blocks, rubbish) is
        counted and told, and makes the residency partial.
        """
        expect(expect(batch, EngineBatch, "batch").events, (tuple, list), "EngineBatch.events")
        self._table.apply(endpoint, batch, self._at(now))

    def set_load(self, endpoint: str, report: LoadReport, now: float) -> None:
        """Take a probe's report of the endpoint's engine. One that fell asleep has dropped its cache."""
        self._table.probed(endpoint, expect(report, LoadReport, "report"), self._at(now))

    def go_by_history(self, endpoint: str, reason: str, now: float) -> None:
        """Let what is routed stand in for the engine's events, which will not come, and say so; `reason` says why.

        Without this it begins after some served prompts without an event. It ends with the first block that the engine
        tells of. Harmless when it is so already.
        """
        self._table.go_by_history(endpoint, reason, self._at(now))

    def load(self, endpoint: str, now: float) -> LoadReport:
        """Return what the endpoint advertises right now; fit to ride in a reply."""
        local = self._table.local(endpoint)
        local.advertise(self._at(now))
        return local.copy.advert.report

    def residency(self, endpoint: str) -> Residency:
        """Return the mirror of a local endpoint's engine, to look at."""
        return self._table.local(endpoint).residency

    # --- server --------------------------------------------------------------------------------------------

    def chain(
        self, tokens: Any, *, namespace: Namespace = DEFAULT_NAMESPACE, contents: Sequence[ContentSpan] = ()
    ) -> TokenChain:
        """Prepare a prompt, so that it is packed and hashed once however often it is used.

        `tokens` is a sequence of ints or a one-dimensional integer buffer. Raises `UsageError` that says what to pass.
        """
        if namespace is DEFAULT_NAMESPACE:
            root = self._root
        else:
            root = self.domain.root_key(expect(namespace, Namespace, "namespace"))
        if type(tokens) is list and tokens and not (type(tokens[-1]) is int and 0 <= tokens[-1] < TOKEN_LIMIT):
            pack_tokens(tokens[-1:])  # Padding is at the end; a list is read no further than it is compared.
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
        among: Iterable[str] | None = None,
    ) -> Decision:
        """Decide who serves a prompt: tokens, or a chain made by `chain`. Books the expected work at the target.

        With `forwarded`, as for a request that another node sent here, only local endpoints are considered. Give the
        `budget_s` of that node's decision where it came along: a prompt that would take longer is `declined`. `tenant`
        says whom to count it for (`NodeStats.tenants`); what keeps tenants apart is the namespace.

        A host that can reach some endpoints only gives their ids, `among`: nobody else is chosen then or is a fallback,
        not even this node's own. Those that are not known (yet) are passed over. Raises `UsageError` when tokens cannot
        be used, and `NoEndpointError` when no endpoint is known, or none of those.
        """
        now = self._at(now)
        if not isinstance(prompt, TokenChain):
            prompt = self.chain(prompt, namespace=namespace, contents=contents)
        elif namespace not in (DEFAULT_NAMESPACE, prompt.namespace) or contents:
            raise UsageError("a prepared chain has its namespace and contents: give them to chain(), not to route()")
        elif prompt.spec != self._spec:
            raise UsageError("this chain was prepared by a node of another domain")
        if budget_s is not inf and (not isinstance(budget_s, (int, float)) or budget_s != budget_s):
            raise UsageError(f"budget_s must be seconds, or math.inf for none, not {budget_s!r}")
        if tenant != "":
            checked_tenant(tenant)
        offer = None if among is None else offered(among)
        decision = self._flights.route(prompt, forwarded, now, budget_s, offer)
        if tenant:
            self._tallies.decided(tenant, decision, forwarded)
        if decision.local and decision.matched_tokens and not decision.declined:
            weighed = decision.candidate(decision.target)
            if weighed is not None:
                self._table.locals[decision.target].residency.use(prompt, weighed.depth, now)
        return decision

    def first_token(self, decision: Decision, now: float) -> None:
        """Note that the target's first token came: its prefill is done, so its booked work is released."""
        self._flights.first_token(expect(decision, Decision, "decision").id, self._at(now))

    def report(
        self,
        decision: Decision,
        outcome: Outcome,
        now: float,
        *,
        endpoint: str | None = None,
        served_by: str | None = None,
    ) -> str | None:
        """Take an attempt's outcome; return the endpoint to try next, or None when there is nothing (more) to try.

        Report every attempt, also what was cancelled: one of which no word comes counts as failed. Give `endpoint`,
        whose attempt it was, where reports may come late or twice: what is not of the attempt under way is only counted
        then. Without it a report is taken for the attempt under way. An outcome of an older life of an endpoint teaches
        nothing of the life that there is now; one that names an older life by its handle is late.

        A host that sent the request elsewhere than decided says where, `served_by`: the outcome is learnt of that
        endpoint, and the decision's target is neither praised nor blamed. One that is not known ends the request.
        """
        now = self._at(now)
        if type(decision) is not Decision or type(outcome) is not Outcome:
            raise UsageError(
                "report(decision, outcome, now): give what route() returned, and one of Outcome.served(...), "
                f"Outcome.failed(...) and so on; not {decision!r:.60}, {outcome!r:.60}"
            )
        if type(endpoint) is EndpointHandle and not self._table.is_attempt(endpoint, self._flights.booked(decision.id)):
            self._table.dropped("outcomes")
            return None
        return self._flights.report(decision.id, outcome, now, endpoint, served_by)

    def explain(self, decision: Decision) -> Explanation:
        """Return every term of every candidate that the decision weighed, and who was vetoed and why. O(endpoints).

        Who was vetoed is as it was then; why is as it is now.
        """
        vetoes = self._table.fleet.vetoes(
            *expect(decision, Decision, "decision").masks, hop=decision.reason == FORWARDED
        )
        return Explanation(decision, vetoes)

    def endpoint_url(self, endpoint: str) -> str:
        """Return an endpoint's service address, "" if it is not known."""
        copy = self._members.copies.get(endpoint)
        return copy.url if copy is not None else ""

    def digests(self) -> dict[str, Digest]:
        """Return what this node holds of every endpoint, its own included, as it was published. O(endpoints)."""
        copies = self._members.copies.values()
        return {c.endpoint: Digest(c.incarnation, c.keys.version, c.keys.anchor_stride, c.keys.keys) for c in copies}

    def stats(self, now: float) -> NodeStats:
        """Return the node's view of everything it knows. O(endpoints + peers)."""
        now = self._at(now)
        table = self._table
        rows = [
            row_of(standing, table.locals.get(standing.name), bool(standing.bit & table.fleet.usable), now)
            for standing in table.fleet.standings.values()
        ]
        peers = self._peers.values()
        zones = {owner_of(copy.endpoint): copy.zone for copy in self._members.copies.values() if copy.zone}
        return NodeStats(
            self.node,
            tuple(rows),
            {peer.node: peer.state for peer in peers},
            len(table.index),
            len(self._flights.open),
            dict(self.counters),
            self.settings.zone,
            tuple(RoundTrip(peer.node, zones.get(peer.node, ""), peer.rtt_s) for peer in peers),
            self._tallies.stats(),
        )

    # --- what goes on behind -------------------------------------------------------------------------------

    def _at(self, now: float, timer: bool = False) -> float:
        """Begin a call: return its node time. Raises `UsageError` for another thread, and for another clock."""
        if self._ident() != self._thread:
            if self._thread:
                raise UsageError(
                    f"node {self.node!r} is called from two threads, and not made for it: call it from one alone (in a "
                    "server with asyncio: from `async def` handlers), or wrap it once in "
                    "prefixroute.threads.ThreadSafeNode(node); `take_over` moves it to the calling thread for good"
                )
            self._thread = self._ident()
        return self._clock.read(now, timer)

    def _behind(self) -> bool:
        """Whether anything is left to do in slices."""
        return self._table.behind or self._outbox.packing

    def _follow(self, now: float) -> None:
        """Bring the table up to date with what gossip learnt."""
        lost = self._members.take_lost()
        self._table.follow(self._members.take_touched(), lost, now)

    def _served(self, flight: Flight, standing: Standing, outcome: Outcome, now: float) -> None:
        """Learn from a request that was served: of a local endpoint, its engine's speed and cache show."""
        decision, chain = flight.decision, flight.chain
        if chain.fault:
            self.journal.count("prompts_unusable")
            return
        if self._tallies.open:
            self._tallies.served(decision, standing.local, flight.weighed.matched_tokens, outcome)
        local = self._table.locals.get(standing.name)
        if local is not None:
            cached = outcome.counted_tokens
            if outcome.ttft_s is not None and cached is not None:
                local.standing.estimate.add(decision.prompt_tokens - cached, outcome.ttft_s, flight.queued)
            self._table.served(local, chain, cached, now)
        chain.remember()  # by now it is packed

    def _check(self) -> None:
        """Assert that index, fleet, replicas and residencies agree. O(blocks)."""
        self._table._check()
