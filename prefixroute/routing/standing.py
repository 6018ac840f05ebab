"""One endpoint's standing with this node: what is believed of it, and what it would cost to send a prompt there.

| | `LocalStanding`, this node's own | `PeerStanding`, anybody else's |
|---|---|---|
| pace | what outcomes show, else what its engine's probe tells | the freshest report, from gossip or with a reply |
| wait | the longer of what a probe saw and what is booked | what is left of the reported queue and sends; its silence |
| round trip | none | as gossip measured it |
| confidence | the residency's own | its owner's, times what came true, times what lasts the way there |
| arrivals | counted here | told by its owner |

Rules:
1. What a decision reads is kept ready; `refresh` brings it up to date when a report, an outcome or a round comes.
2. Confidence comes from evidence: what the owner says of its own residency, hits that were predicted and missed, and
   how soon the owner evicts, against the way there. Of this node's own engine an exact mirror is better evidence than
   any answer: answers show what is reused of it (`reuse`), none makes it doubtful. Age alone does not lower confidence
   (it cost up to 45 % in the rule's model); it bounds how long an endpoint is usable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import exp, inf

from ..load import DEFAULT_OVERHEAD_S, DEFAULT_PREFILL_TOKENS_PER_S, Advert, LoadReport, PushBackState
from ..policy.entry import Entry
from ..policy.interface import Candidate
from ..replication.copies import Copy, Peer
from .ledger import ArrivalRate, Ledger, Queue, RateEstimate
from .reuse import Reuse
from .trust import AT_ONCE, Accuracy, Lateness, Misses, Promptness, Silence, Suspension

BELIEF = 0.95
"""Share of a remote match that is counted: a digest lags its owner by a round or so."""

DEFAULT_REPORT = LoadReport(prefill_tokens_per_s=DEFAULT_PREFILL_TOKENS_PER_S, overhead_s=DEFAULT_OVERHEAD_S)
"""Rate and fixed time of an endpoint while no other is known to tell its own."""

DEFAULT_RTT_S = 0.001
"""Network round trip to a peer until it is measured."""


class Standing(ABC):
    """What both kinds of endpoint have. Made as one of them, and kept ready for `weigh` by `refresh`."""

    def __init__(self, copy: Copy, local: bool, bit: int) -> None:
        # Who it is.
        self.copy = copy
        self.name = copy.endpoint
        self.local = local
        self.bit = bit
        """In masks, as the index gave it."""
        # What this node and its requests did there.
        self.ledger = Ledger()
        self.silence = Silence()
        """Of a peer's endpoint."""
        self.away = False
        """Whether it was forgotten."""
        self.suspension = Suspension()
        """Shared with others while it has served nothing."""
        self.refused_until, self.refusal = -inf, ""
        """Clock reading, in seconds, until which it counts as refusing, since it turned a request away; its reason."""
        self.trust = 1.0
        """Share of predicted hits that came true lately, 0 to 1."""
        self.overdue = 0
        """Requests in the ledger that are not believed to be served any more."""
        self.misses = Misses()
        self.refuted = 0
        """Predictions in a row, of prompts that were sent there, of which nothing came true."""
        self.reuse = Reuse()
        self.accuracy = Accuracy()
        # What the fleet sets.
        self.default = DEFAULT_REPORT
        """What is taken for a pace that the endpoint does not tell."""
        self.needs_s = 0.0
        """Seconds that a forward there has to save by the rules for zones; infinite: none may go there."""
        self.rank: tuple[float, float, int] | None = None
        """Where it is in the fleet's ranking: seconds before any prefill, a draw for ties, its bit. None: nowhere."""
        # What `refresh` reads off, in the units of `Candidate`.
        self.rate = self.default.prefill_tokens_per_s
        self.overhead_s = self.default.overhead_s
        self.rtt_s = 0.0
        self.confidence = 1.0
        self.hit_unit = 0
        """Tokens that its engine reuses as a whole; 0: not known, a block is taken."""
        self.drop = self.floor = 0
        """Tokens that its engine computes anew of what it holds, and up to which it reuses nothing (`reuse`)."""
        self.exact = False
        """Whether what it holds is known from its engine's own events, without a gap."""
        self._incarnation = copy.incarnation
        self._refusing = False
        """Whether its last word was that it refuses."""
        self.state = PushBackState.OPEN
        self.zone = ""
        self.report = self.default
        """The freshest one."""
        self._advert: Advert | None = None
        self._told = self.default
        """The advert and the `default` that were read off last, with that report."""
        self._waiting = 0
        """Requests that wait there, by its report."""
        self._room_tokens = self._eviction_age_s = inf
        self._arrivals_per_s = 0.0
        self.home = self.demand = 0.0
        """What its owner tells of what enters there (`policy.entry`)."""

    @abstractmethod
    def refresh(self, now: float) -> None:
        """Bring all that a decision reads up to date. O(1)."""

    @abstractmethod
    def wait_s(self, now: float) -> float:
        """Return the seconds that a prompt can be expected to wait there before its prefill begins."""

    def arrivals_per_s(self, now: float) -> float:
        """Return the requests a second that come to the endpoint: what its owner tells."""
        return self._arrivals_per_s

    def _read(self, report: LoadReport, now: float) -> None:
        """Take what a report and the owner's advert say, and what was learnt of the endpoint."""
        copy, advert, learnt, default = self.copy, self.copy.advert, self.reuse, self.default
        if report is not self.report or advert is not self._advert or default is not self._told:
            self._read_off(report, advert)
        if copy.incarnation != self._incarnation:
            self._incarnation, self.refuted = copy.incarnation, 0
            learnt.forget()
        self.hit_unit = learnt.unit if learnt.unit > advert.hit_unit else advert.hit_unit
        self.drop, self.floor = learnt.drop, learnt.floor if learnt.floor > learnt.drop else learnt.drop
        self.zone = copy.zone
        if self.misses.in_row:
            self.trust = self.misses.forgiven(self.trust, now)
        self.confidence = advert.confidence * self.trust
        self.state = PushBackState.REFUSING if now < self.refused_until else advert.state

    def _read_off(self, report: LoadReport, advert: Advert) -> None:
        """Take a report and an advert of which at least one is new."""
        self.report, self._advert, self._told = report, advert, self.default
        self.rate = report.prefill_tokens_per_s or self.default.prefill_tokens_per_s
        self.overhead_s = report.overhead_s or self.default.overhead_s
        self._waiting = report.waiting
        self._room_tokens, self._eviction_age_s = advert.room_tokens, advert.eviction_age_s
        self._arrivals_per_s = advert.arrivals_per_s
        if not self.local:
            self.home, self.demand = advert.home, advert.demand
        if self._refusing and not report.refusing:
            # It has said that it refuses no more: what it turned away before says nothing now.
            self.refused_until = -inf
        self._refusing = report.refusing

    def compared(self, share: float, now: float) -> None:
        """Note that `share` of a predicted hit came true, 0 to 1."""
        self.trust += self.misses.weight(share, now) * (share - self.trust)

    def weigh(self, depth: int, n_tokens: int, block_tokens: int, now: float, predicted: bool = False) -> Candidate:
        """Weigh the endpoint for a prompt of which it holds `depth` blocks. O(1)."""
        matched = 0
        if depth:
            # The last token is never reused: an engine computes at least one.
            matched = depth * block_tokens
            if matched >= n_tokens:
                matched = n_tokens - 1
            matched -= matched % (self.hit_unit or block_tokens)
            matched = matched - self.drop if matched > self.floor else 0
        rate, rtt_s, wait_s, overhead_s = self.rate, self.rtt_s, self.wait_s(now), self.overhead_s
        prefill_s = (n_tokens - self.confidence * matched) / rate
        queued, waiting = len(self.ledger.open) - self.overdue, self._waiting
        # One tuple, without the constructor of named tuples, which takes twice as long; made of parts it is felt too.
        return tuple.__new__(
            Candidate,
            (
                self.name,  # endpoint
                self.local,
                n_tokens,  # prompt_tokens
                depth,
                matched,  # matched_tokens
                self.confidence,
                rtt_s,
                wait_s,
                overhead_s,
                prefill_s,
                rtt_s + wait_s + overhead_s + prefill_s,  # cost_s
                self.state,
                0.0 if self.local else now - self.copy.heard_at,  # age_s
                1 / rate,  # s_per_token
                queued if queued > waiting else waiting,
                self._room_tokens,
                self._eviction_age_s,
                predicted,
                # No call for a peer: it is felt in a decision.
                self.arrivals_per_s(now) if self.local else self._arrivals_per_s,
                self.home,
                self.demand,
                self.zone,
                None,  # withheld
            ),
        )


class LocalStanding(Standing):
    """An endpoint of this node's own. `probed()` returns the tokens that a probe saw queued at its engine.

    The queue of the advert would not do: it counts this node's bookings as well.
    """

    def __init__(self, copy: Copy, bit: int, now: float, probed: Callable[[], int]) -> None:
        super().__init__(copy, True, bit)
        self.estimate = RateEstimate()
        self.arrivals = ArrivalRate()
        self.entry = Entry()
        """What enters at this node; the fleet sets its own."""
        self._probed = probed
        self._probed_s = 0.0
        """The queue that a probe saw, in seconds of prefill."""
        self.refresh(now)

    def refresh(self, now: float) -> None:
        """Read the engine's probe and the outcomes. O(1)."""
        self._read(self.estimate.corrected(self.copy.advert.report), now)
        self._probed_s = self._probed() / self.rate
        self.home, self.demand = self.entry.told_home, self.entry.demand(now)

    def wait_s(self, now: float) -> float:
        """Return the seconds before a prefill begins: the longer of what a probe saw and what is booked."""
        # What a probe saw is of an unknown moment between two probes; it is not drained.
        booked_s = self.ledger.wait_s(now) if self.ledger.open else 0.0
        return booked_s if booked_s > self._probed_s else self._probed_s

    def arrivals_per_s(self, now: float) -> float:
        """Return the requests a second that this node's count shows."""
        return self.arrivals.per_s(now)


class PeerStanding(Standing):
    """An endpoint of another node; `peer` is that node, None while it is no peer of this one."""

    def __init__(self, copy: Copy, peer: Peer | None, bit: int, now: float) -> None:
        super().__init__(copy, False, bit)
        self.peer = peer
        self.default_rtt_s = DEFAULT_RTT_S
        """What is taken for a round trip that was not measured yet, in seconds."""
        self.slack_s = 0.0
        """Seconds that its first words are given beyond what is expected: what they took; else what others took."""
        self.queue = Queue()
        self.reply: tuple[LoadReport, float] | None = None
        """The load report that came with a reply, and when: the freshest one until gossip brings a later word."""
        self.lateness = Lateness()
        self.promptness = Promptness()
        self.doubted = False
        """Whether it was late or failed lately: a forward there is looked at more closely."""
        self.refresh(now)

    def take_up(self, gone: PeerStanding) -> None:
        """Go on where an endpoint of this name stood when it was forgotten: what was sent there is under way still."""
        self.ledger, self.queue, self.suspension = gone.ledger, gone.queue, gone.suspension
        self.silence, self.promptness, self.slack_s = gone.silence, gone.promptness, gone.slack_s
        self.overdue = gone.overdue

    def refresh(self, now: float) -> None:
        """Read the freshest report: rate, fixed time, queue, push-back, confidence, round trip. O(1)."""
        copy = self.copy
        report, at = copy.advert.report, copy.load_at
        if self.reply is not None and self.reply[1] >= at:
            report, at = self.reply
        self._read(report, now)
        self.queue.told(report.queued_tokens / self.rate, at)
        measured = self.peer.rtt_s if self.peer is not None else None
        self.rtt_s = self.default_rtt_s if measured is None else measured
        # Discount the match by what the peer evicts within one way: of a cache that turns over in seconds, little is
        # left after a second's way.
        self.confidence *= BELIEF
        if self._eviction_age_s < inf:
            self.confidence *= exp(-self.rtt_s / 2 / max(self._eviction_age_s, 1e-9))
        self.doubted = self.suspension.failures > 0 or self.lateness.late_s > 0.0
        if now >= self.refused_until and now - copy.heard_at > copy.advert.ttl_s:
            self.state = PushBackState.OPEN

    def holds(self, now: float) -> bool:
        """Whether so many forwards wait for a late first word that no more are to follow. O(1) unless it is late."""
        silence = self.silence
        if now < silence.late_at:
            return False
        waiting = sum([send.arrives_at >= silence.since for send in self.queue.sends.values()])
        return waiting > 0 and waiting + silence.given_up >= AT_ONCE

    def wait_s(self, now: float) -> float:
        """Return the seconds before a prefill begins: what is left of the queue when a prompt sent now arrives."""
        queue = self.queue
        wait = queue.left_s(now + self.rtt_s / 2) if queue.sends or queue.reported_s else 0.0
        late_at = self.silence.late_at
        if now > late_at:
            # As long as it has been late it may be late still.
            wait += now - late_at
        return wait + self.lateness.excess_s(now) if self.doubted else wait
