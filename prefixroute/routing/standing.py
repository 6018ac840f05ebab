"""One endpoint's standing with this node: what is believed of it, and what it would cost to send a prompt there.

Rules:
1. What a decision reads is kept ready; `refresh` brings it up to date when a report, an outcome or a round comes.
2. Confidence comes from evidence: what the owner says of its own residency, hits that were predicted and missed, and
   how soon the owner evicts, against the way there. Age alone does not lower it (it cost up to 45 % in the rule's
   model); it bounds how long an endpoint is usable.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from ..load import LoadReport, Pace, PushBackState, RateEstimate, learnt
from ..policy.interface import Candidate
from ..replication.copies import Copy, Peer
from .ledger import ArrivalRate, Ledger
from .trust import Accuracy, Lateness, Misses, Suspension

BELIEF = 0.95
"""Share of a remote match that is counted: a digest lags its owner by a round or so."""

DEFAULT_RTT_S = 0.001
"""Network round trip to a peer until it is measured."""


class Send(NamedTuple):
    """Work that joins a peer's queue: a forward of this node's, and what the other origins can be expected to send."""

    arrives_at: float
    work_s: float


class Standing:
    """One endpoint's standing with this node. What a decision reads is kept ready; `refresh` brings it up to date."""

    __slots__ = (
        "_arrivals",
        "_bias_s",
        "_eviction_age_s",
        "_queue_at",
        "_queue_s",
        "_reported_at",
        "_reported_s",
        "_room_tokens",
        "_surprised_at",
        "_waiting",
        "accuracy",
        "bit",
        "confidence",
        "copy",
        "default",
        "default_rtt_s",
        "estimate",
        "hit_unit",
        "lateness",
        "ledger",
        "local",
        "misses",
        "name",
        "needs_s",
        "overhead_s",
        "peer",
        "probed_tokens",
        "rank",
        "rate",
        "refusal",
        "refused_until",
        "reply",
        "rtt_s",
        "sends",
        "state",
        "suspension",
        "trust",
        "zone",
    )

    def __init__(self, copy: Copy, peer: Peer | None, bit: int, now: float) -> None:
        self.copy = copy
        self.name = copy.endpoint
        self.local = copy.mine
        """Whether the endpoint is this node's own."""
        self.peer = peer
        self.bit = bit
        self.ledger = Ledger()
        self._arrivals = ArrivalRate()
        self.estimate = RateEstimate()
        self.default_rtt_s = DEFAULT_RTT_S
        """What is taken for a round trip that was not measured yet."""
        self.default = Pace()
        """What is taken for a pace that the endpoint does not tell."""
        self.suspension = Suspension()
        self.refused_until = float("-inf")
        self.refusal = ""
        self.sends: dict[int, Send] = {}
        """By decision: forwards without a first token; those that the freshest report cannot know count."""
        self.reply: tuple[LoadReport, float] | None = None
        """The load report that came with a reply, and when: the freshest one until gossip brings a later word."""
        self.probed_tokens = 0
        """What a probe saw queued at a local engine; its advert counts this node's bookings as well."""
        self.trust = 1.0
        """Share of predicted hits that came true, lately."""
        self.accuracy = Accuracy()
        """All predictions that were compared, since the endpoint is known."""
        self.misses = Misses()
        self.lateness = Lateness()
        self._bias_s = 0.0
        self._surprised_at = now
        self._queue_s = 0.0
        self._queue_at: float | None = None
        self.needs_s = 0.0
        """Seconds that a forward there has to save by the rules for zones; infinite: none may go there."""
        self.rank: tuple[float, float, int] | None = None
        """Where it is in the fleet's ranking: cost before any prefill, a draw for ties, its bit."""
        self.refresh(now)

    def refresh(self, now: float) -> None:
        """Read the freshest report: rate, fixed time, queue, push-back, confidence, round trip. O(1)."""
        copy, advert = self.copy, self.copy.advert
        report, self._reported_at = advert.report, copy.load_at
        if self.reply is not None and self.reply[1] >= copy.load_at:
            report, self._reported_at = self.reply
        if self.local:
            report = learnt(report, self.estimate)
        self.rate = report.prefill_tokens_per_s or self.default.prefill_tokens_per_s
        self.overhead_s = report.overhead_s or self.default.overhead_s
        self._reported_s = (self.probed_tokens if self.local else report.queued_tokens) / self.rate
        self._queue_at = None
        self._waiting = report.waiting
        self._room_tokens, self._eviction_age_s = advert.room_tokens, advert.eviction_age_s
        self.hit_unit = advert.hit_unit
        self.zone = copy.zone
        measured = self.peer.rtt_s if self.peer is not None else None
        self.rtt_s = 0.0 if self.local else self.default_rtt_s if measured is None else measured
        self.trust = self.misses.forgiven(self.trust, now)
        self.confidence = advert.confidence * self.trust
        if not self.local:
            # What is evicted there while a forward is under way is no hit: of a cache that turns over in seconds,
            # little is left after a second's way.
            self.confidence *= BELIEF * exp(-self.rtt_s / 2 / max(self._eviction_age_s, 1e-9))
        self.state = advert.state
        if now < self.refused_until:
            self.state = PushBackState.REFUSING
        elif not self.local and now - copy.heard_at > advert.ttl_s:
            self.state = PushBackState.OPEN

    def wait_s(self, now: float) -> float:
        """Expected wait before prefill begins: the reported queue, drained since, and what was sent since."""
        ledger = self.ledger
        if self.local:
            # What a probe saw is of an unknown moment between two probes; it is not drained.
            return max(ledger.wait_s(now), self._reported_s) if len(ledger) else self._reported_s
        # The queue as it was reported, drained since; what was sent since joins it when it arrives.
        at = self._queue_at
        if at is None:
            at = self._recount()
        wait = self._queue_s
        if wait:
            since = now + self.rtt_s / 2 - at
            wait = 0.0 if since >= wait else wait - since if since > 0 else wait
        return wait + self.excess_s(now) if self._bias_s > 0 else wait

    def sent(self, ticket: int, send: Send) -> None:
        """Note a forward that joins the queue. O(1)."""
        at = self._queue_at
        if at is not None and ticket not in self.sends:
            self._join(send, at)
        else:
            self._queue_at = None
        self.sends[ticket] = send

    def unsent(self, ticket: int) -> None:
        """Take a forward out of the queue: its first token is here, or will never be. An unknown one is harmless."""
        if self.sends.pop(ticket, None) is not None:
            self._queue_at = None

    def _recount(self) -> float:
        """Let the queue be what was reported and what was sent since; return when it was so. O(forwards under way)."""
        self._queue_s, self._queue_at = self._reported_s, self._reported_at
        for send in self.sends.values():
            self._join(send, self._queue_at)
        return self._queue_at

    def _join(self, send: Send, at: float) -> None:
        if send.arrives_at > self._reported_at:
            self._queue_s = max(0.0, self._queue_s - max(0.0, send.arrives_at - at)) + send.work_s
            self._queue_at = max(at, send.arrives_at)

    def told_s(self, uncached_tokens: float) -> float:
        """Return the seconds to a first token there, by its last word alone: its queue, fixed time and rate."""
        return self._reported_s + self.overhead_s + uncached_tokens / self.rate

    def arrived(self, now: float) -> None:
        """Note a request that a local endpoint is to serve."""
        self._arrivals.arrived(now)

    def arrivals_per_s(self, now: float) -> float:
        """Return the requests a second that come to the endpoint, by its owner's word or by this node's count."""
        return self._arrivals.per_s(now) if self.local else self.copy.advert.arrivals_per_s

    def excess_s(self, now: float) -> float:
        """Return the seconds by which first tokens came later than expected, lately: what its reports do not tell.

        It fades, so that a peer that is avoided for it is tried again.
        """
        # Early ones weigh against late ones, but a peer is not taken for faster than it says.
        return self._bias_s * exp((self._surprised_at - now) / self.lateness.fades_s) if self._bias_s > 0 else 0.0

    def surprised(self, ttft_s: float, expected_s: float, now: float) -> None:
        """Learn from a first token when it came, and when it was expected of a peer by what it tells of itself."""
        self._bias_s = self.excess_s(now) or self._bias_s
        self._bias_s += self.lateness.weight(ttft_s, expected_s) * (ttft_s - expected_s - self._bias_s)
        self._surprised_at = now

    def weigh(self, depth: int, n_tokens: int, block_tokens: int, now: float, predicted: bool = False) -> Candidate:
        """Weigh the endpoint for a prompt of which it holds `depth` blocks. O(1)."""
        matched = 0
        if depth:
            # The last token is never reused: an engine computes at least one.
            matched = depth * block_tokens
            if matched >= n_tokens:
                matched = n_tokens - 1
            matched -= matched % (self.hit_unit or block_tokens)
        local, copy, rate, confidence = self.local, self.copy, self.rate, self.confidence
        rtt, wait, overhead = self.rtt_s, self.wait_s(now), self.overhead_s
        prefill = (n_tokens - confidence * matched) / rate
        queued, waiting = len(self.ledger.open), self._waiting
        return tuple.__new__(
            Candidate,
            (
                self.name,
                local,
                n_tokens,
                depth,
                matched,
                confidence,
                rtt,
                wait,
                overhead,
                prefill,
                rtt + wait + overhead + prefill,
                self.state,
                0.0 if local else now - copy.heard_at,
                1 / rate,
                queued if queued > waiting else waiting,
                self._room_tokens,
                self._eviction_age_s,
                predicted,
                self._arrivals.per_s(now) if local else copy.advert.arrivals_per_s,
                self.zone,
                None,
            ),
        )
