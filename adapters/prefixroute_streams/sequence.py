"""Order of one rank's stream: live messages and replay answers in, batches in engine order out.

vLLM and SGLang number their messages from 0 in every process and name no process on the wire, so a number alone
cannot tell a gap from a restart. Rules:
1. What was applied last is remembered as (sequence, timestamp). A replay starts at that message *inclusive*: if it
   comes back with its timestamp the life is the same; if not, life or history is lost and the view is cleared.
   A message that cannot be decoded has no timestamp and cannot vouch for a life.
2. During a replay live messages are held, then applied in sequence order; what was applied already is dropped.
3. What cannot be had again is declared: `StreamGap` or `StreamRestarted`, in an `EngineBatch` of its own, placed
   where it happened. Nothing else is ever missing, doubled or out of order between two such marks.
4. No clock and no socket: `now` is the caller's, a `ReplayRequest` is the caller's to send.

| last applied | live message            | action                                                        |
|--------------|-------------------------|---------------------------------------------------------------|
| n            | n + 1                   | apply                                                         |
| n            | more than n + 1         | hold, replay from n; without a replay endpoint: gap, apply    |
| n            | n or less, seen before  | drop                                                          |
| n            | n or less, not seen     | new life: clear, then as below                                |
| nothing      | 0                       | apply                                                         |
| nothing      | more than 0             | hold, replay from 0; without a replay endpoint: gap, apply    |

| replay      | answer                              | action                                                |
|-------------|-------------------------------------|-------------------------------------------------------|
| from n      | n, same timestamp                   | same life: go on after it                             |
| from n      | n, another timestamp; end without n | new life: clear, replay from 0                        |
| from n      | starts after n                      | history lost: clear, gap, apply                       |
| from 0      | starts after 0                      | truncated history: gap, apply                         |
| any         | a hole in it, or before held ones   | ask again if this one brought anything, else gap      |
| any         | no end in time                      | as at the end; not verified: gap                      |

A restart that hides behind the very number that was expected next cannot be seen from numbers. It shows as a new
connection, hence `connected`: it replays from n even though nothing seems to be missing. SGLang's first message of a
life clears everything; it needs no rule of its own, because its number and timestamp tell the new life already.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from prefixroute.errors import UsageError
from prefixroute.events import EngineBatch, EngineEvent, StreamGap, StreamRestarted

REPLAY_TIMEOUT_S: Final = 2.0
"""Silence after which a replay is given up. The engine answers between batches, up to 0.1 s later (vLLM 0.32.0)."""

MAX_HELD: Final = 4096
"""Live messages held during a replay. What exceeds it is dropped and found missing, and replayed, afterwards."""

MAX_REPLAYS: Final = 16
"""Requests in a row that may each bring a part of a long history: before vLLM 0.33 a reply loses what exceeds the
socket's high-water mark of 1,000 messages, and the engine keeps 10,000."""

BUFFER_STEPS: Final = 10_000
"""Messages that the engine keeps for replay, the default of vLLM and SGLang."""

_NOTHING: Final = -1
_TS_UNKNOWN: Final = math.nan


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Ask the engine for every buffered message from `start_seq` on.

    `number` tells answers apart: pass the request along with each of them. A newer request replaces an older one.
    """

    start_seq: int
    number: int


Action: TypeAlias = EngineBatch | ReplayRequest
"""What the caller has to do next: apply a batch, or send a request."""


class SequencerStats(NamedTuple):
    """What has happened to one stream. `missing` counts the messages of all gaps whose size is known, `resyncs` how
    often the caller had it begin anew.
    """

    gaps: int = 0
    missing: int = 0
    restarts: int = 0
    replays: int = 0
    replay_timeouts: int = 0
    duplicates: int = 0
    overflowed: int = 0
    resyncs: int = 0


class Sequencer:
    """State machine of one rank's stream.

    Each method returns what to do, in order: apply an `EngineBatch`, send a `ReplayRequest`. Pass None for a
    message that could not be decoded: it keeps its place in the order and becomes a gap of one. `buffer_steps` is
    the engine's own setting: a live message may lag that far behind a replay and must still be known. O(1) a
    message, amortised. Memory: the held messages, and 17 bytes for each of buffer_steps + max_held.
    """

    def __init__(
        self,
        *,
        replay: bool = True,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        max_held: int = MAX_HELD,
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        if replay_timeout_s <= 0 or max_held < 1 or buffer_steps < 0:
            raise UsageError("pass a positive replay_timeout_s, a max_held of at least 1 and buffer_steps from 0")
        self._replay = replay
        self._timeout_s = replay_timeout_s
        self._max_held = max_held
        self._rank = 0
        self._was_connected = False
        self._last = _NOTHING
        self._anchor: tuple[int, float] | None = None
        self._recent = _Recent(buffer_steps + max_held)
        self._held: deque[tuple[int, EngineBatch | None]] = deque()
        self._pending: ReplayRequest | None = None
        self._verifying = False
        self._deadline = math.inf
        self._last_at_request = _NOTHING
        self._requests_in_a_row = 0
        self._counts = dict.fromkeys(SequencerStats._fields, 0)
        self._actions: list[Action] = []

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int | None:
        """Sequence number applied last in this life, None before the first."""
        return None if self._last == _NOTHING else self._last

    @property
    def pending(self) -> ReplayRequest | None:
        """The request whose answers are awaited. All others may be forgotten."""
        return self._pending

    @property
    def stats(self) -> SequencerStats:
        """Counters since construction."""
        return SequencerStats(**self._counts)

    def next_timer(self) -> float:
        """When `handle_timer` wants to be called, in the caller's time; infinity for never."""
        return self._deadline

    # --- input ---------------------------------------------------------------------------------------------

    def connected(self, now: float) -> list[Action]:
        """Take note of a new connection to the publisher, the first one included.

        Call it after the messages of the connection before and before those of the new one. What was sent in
        between is lost to the live stream, and the publisher may be another process.
        """
        if self._replay:
            self._held.clear()  # of the same life: will be replayed; of a past one: must not be applied
            self._requests_in_a_row = 0
            self._request(now)
        elif self._was_connected or self._last != _NOTHING:
            self._gap(0)
        self._was_connected = True
        return self._take()

    def receive_live(self, seq: int, batch: EngineBatch | None, now: float) -> list[Action]:
        """Take a live message."""
        _check_seq(seq)
        if self._pending is None:
            self._accept(seq, batch, now)
        elif self._fits(seq, batch):
            self._hold(seq, batch)
        else:
            self._abandon()
            self._start_over()
            self._accept(seq, batch, now)
            if self._pending is None:
                self._request(now)  # the abandoned one may have been asked of the past life
        return self._take()

    def receive_replayed(self, request: ReplayRequest, seq: int, batch: EngineBatch | None, now: float) -> list[Action]:
        """Take an answer to `request`; it is ignored unless that is the pending one."""
        _check_seq(seq)
        if request == self._pending:
            self._deadline = now + self._timeout_s
            if not self._verifying or self._verify(seq, batch, now):
                self._accept_replayed(seq, batch, now)
        return self._take()

    def receive_replay_end(self, request: ReplayRequest, now: float) -> list[Action]:
        """Take the end marker of the answers to `request`."""
        if request == self._pending:
            if self._verifying:
                self._start_over()
                self._request(now)
            else:
                self._finish(now)
        return self._take()

    def handle_timer(self, now: float) -> list[Action]:
        """Give a replay up when its time has come."""
        if self._pending is not None and now >= self._deadline:
            self._counts["replay_timeouts"] += 1
            if self._verifying and (not self._held or self._held[0][0] == self._last + 1):
                self._gap(0)  # no number is missing, yet the life is not known
            self._finish(now)
        return self._take()

    def resync(self, now: float) -> list[Action]:
        """Begin anew from all that the engine still keeps, because what was made of the stream proved wrong.

        Without a replay endpoint there is nothing to begin from, and nothing happens.
        """
        if self._replay:
            self._counts["resyncs"] += 1
            self._abandon()
            self._mark(StreamRestarted())
            self._last, self._anchor = _NOTHING, None
            self._held.clear()
            self._request(now)
        return self._take()

    # --- live ----------------------------------------------------------------------------------------------

    def _accept(self, seq: int, batch: EngineBatch | None, now: float) -> None:
        if seq <= self._last:
            if self._recent.knows(seq, _ts(batch)):
                self._counts["duplicates"] += 1
                return
            self._start_over()
        if seq == self._last + 1:
            self._apply(seq, batch)
        elif self._replay:
            self._held.append((seq, batch))
            self._request(now)
        else:
            self._gap(seq - self._last - 1)
            self._apply(seq, batch)

    def _fits(self, seq: int, batch: EngineBatch | None) -> bool:
        """Whether a message belongs to the life of those already applied and held, as far as numbers tell."""
        if seq <= self._last:
            return self._recent.knows(seq, _ts(batch))
        if self._held and seq <= self._held[-1][0]:
            return any(s == seq and _same(_ts(held), _ts(batch)) for s, held in self._held)
        return True

    def _hold(self, seq: int, batch: EngineBatch | None) -> None:
        if seq <= (self._held[-1][0] if self._held else self._last):
            self._counts["duplicates"] += 1
        elif len(self._held) >= self._max_held:
            self._counts["overflowed"] += 1
        else:
            self._held.append((seq, batch))

    # --- replay --------------------------------------------------------------------------------------------

    def _request(self, now: float) -> None:
        if self._anchor is None and self._last != _NOTHING:
            self._forget()  # nothing that was applied could be decoded, so no answer could be verified
        start, self._verifying = (self._anchor[0], True) if self._anchor else (0, False)
        self._counts["replays"] += 1
        self._requests_in_a_row += 1
        self._last_at_request = self._last
        self._deadline = now + self._timeout_s
        self._pending = ReplayRequest(start, self._counts["replays"])
        self._actions.append(self._pending)

    def _verify(self, seq: int, batch: EngineBatch | None, now: float) -> bool:
        """Compare an answer with the message applied last; True when it is to be applied."""
        assert self._anchor is not None
        seq_wanted, ts_wanted = self._anchor
        if seq < seq_wanted:
            return False
        if seq == seq_wanted and batch is not None and batch.ts == ts_wanted:
            self._verifying = False
            return False
        self._start_over()
        if seq > seq_wanted:
            return True
        self._request(now)
        return False

    def _accept_replayed(self, seq: int, batch: EngineBatch | None, now: float) -> None:
        if self._last == _NOTHING:
            # Nothing vouches for a held message that precedes the whole buffer: it may be of a past life.
            while self._held and self._held[0][0] < seq:
                self._held.popleft()
        self._drain(before=seq)
        if seq <= self._last:
            return
        if seq > self._last + 1:
            if self._last != _NOTHING and self._may_ask_again():
                self._request(now)
                return
            self._gap(seq - self._last - 1)
        self._apply(seq, batch)

    def _may_ask_again(self) -> bool:
        return self._last > self._last_at_request and self._requests_in_a_row < MAX_REPLAYS

    def _finish(self, now: float) -> None:
        """End a replay: apply what was held, ask again or declare a gap where something is still missing."""
        self._drain()
        if self._held and not self._verifying and self._may_ask_again():
            self._request(now)
            return
        while self._held:
            seq, batch = self._held.popleft()
            self._gap(seq - self._last - 1)
            self._apply(seq, batch)
            self._drain()
        self._abandon()

    def _abandon(self) -> None:
        self._pending = None
        self._verifying = False
        self._deadline = math.inf
        self._requests_in_a_row = 0

    def _drain(self, before: float = math.inf) -> None:
        """Apply held messages that continue what was applied, and drop those that the replay brought.

        Time runs forward within a life, so a held message older than the last applied one is of an older life.
        """
        while self._held and self._held[0][0] < before:
            seq, batch = self._held[0]
            outlived = batch is not None and self._anchor is not None and batch.ts < self._anchor[1]
            if seq > self._last + 1 and not outlived:
                return
            self._held.popleft()
            if seq == self._last + 1 and not outlived:
                self._apply(seq, batch)

    # --- output --------------------------------------------------------------------------------------------

    def _start_over(self) -> None:
        """Begin a new life. Held messages go too: those of the new life will be replayed."""
        self._forget()
        self._held.clear()
        self._verifying = False

    def _forget(self) -> None:
        self._counts["restarts"] += 1
        self._mark(StreamRestarted())
        self._last = _NOTHING
        self._anchor = None

    def _apply(self, seq: int, batch: EngineBatch | None) -> None:
        self._last = seq
        self._recent.add(seq, _ts(batch))
        if batch is None:
            self._gap(1)
            return
        self._anchor = (seq, batch.ts)
        self._rank = batch.rank
        self._actions.append(batch)

    def _gap(self, missing: int) -> None:
        self._counts["gaps"] += 1
        self._counts["missing"] += missing
        self._mark(StreamGap(missing))

    def _mark(self, event: EngineEvent) -> None:
        self._actions.append(EngineBatch((event,), self._rank))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _check(self) -> None:
        """Assert every invariant; O(held)."""
        numbers = [seq for seq, _ in self._held]
        assert numbers == sorted(set(numbers)), "held messages are in order"
        assert len(numbers) <= self._max_held, "held messages are bounded"
        assert not numbers or self._pending is not None, "messages are held for a replay only"
        assert (self._pending is None) == (self._deadline == math.inf), "a pending replay has a deadline"
        assert not self._verifying or (self._pending is not None and self._anchor is not None)
        assert self._anchor is None or self._anchor[0] <= self._last
        assert not self._actions, "actions are handed over"


class _Recent:
    """Timestamps of the messages applied last, by sequence number."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seqs = array("Q", [0]) * size
        self._stamps = array("d", [0.0]) * size
        self._used = bytearray(size)

    def add(self, seq: int, ts: float) -> None:
        slot = seq % self._size
        self._seqs[slot], self._stamps[slot], self._used[slot] = seq, ts, 1

    def knows(self, seq: int, ts: float) -> bool:
        slot = seq % self._size
        return bool(self._used[slot]) and self._seqs[slot] == seq and _same(self._stamps[slot], ts)


def _ts(batch: EngineBatch | None) -> float:
    return _TS_UNKNOWN if batch is None else batch.ts


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _check_seq(seq: int) -> None:
    if not 0 <= seq < 1 << 64:
        raise UsageError(f"a sequence number is an unsigned 64-bit int, not {seq}")
