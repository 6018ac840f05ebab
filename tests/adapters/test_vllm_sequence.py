"""Order and lives of a vLLM stream: a table of scenarios, then a model engine with every fault.

Words of the table. In: `C` new connection, `L3` live message 3, `R3` replayed message 3, `E` end marker, `T` time
runs out, `Z` begin anew; a letter after a number is the engine's life, `!` a message that cannot be decoded. Out: `3`
applied, `?3` replay asked from 3, `G2` a gap of 2, `X` the view is cleared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefixroute_vllm import ReplayRequest, Sequencer, SequencerStats, decode_batch

from prefixroute.errors import UsageError
from prefixroute.events import BlocksStored, EngineBatch, StreamGap, StreamRestarted, UnknownEvent


def message(life: int, seq: int, ts: float) -> EngineBatch:
    return EngineBatch((UnknownEvent(f"{life}:{seq}"),), rank=3, ts=ts)


# --- scenarios ---------------------------------------------------------------------------------------------

WITH_REPLAY = {
    "in order": ("L0 L1 L2", "0 1 2"),
    "join before the first message": ("C E L0 L1", "?0 0 1"),
    "join late, whole history": ("C R0 R1 E L2", "?0 0 1 2"),
    "join late, live first": ("C L2 L3 R0 R1 R2 R3 E L4", "?0 0 1 2 3 4"),
    "join late without a sign of the connection": ("L2 R0 R1 R2 E L3", "?0 0 1 2 3"),
    "join late, truncated history": ("C R16 R17 E L18", "?0 G16 16 17 18"),
    "join late, engine keeps nothing": ("C L7 E L8", "?0 G7 7 8"),
    "engine not up yet": ("C T L0 L1", "?0 0 1"),
    "no answer to the joiner": ("C L5 T L6", "?0 G5 5 6"),
    "gap": ("L0 L1 L4 R1 R2 R3 R4 E L5", "0 1 ?1 2 3 4 5"),
    "gap, live messages held": ("L0 L3 L4 R0 R1 L5 R2 R3 E", "0 ?0 1 2 3 4 5"),
    "gap, held messages close a hole in the replay": ("L0 L2 L3 R0 R1 R4 E", "0 ?0 1 2 3 4"),
    "gap, replay passes the live stream": ("L0 L2 R0 R1 R2 R3 R4 L3 E L4 L5", "0 ?0 1 2 3 4 5"),
    "gap, no answer": ("L0 L3 T L4", "0 ?0 G2 3 4"),
    "two gaps, no answer": ("L0 L3 L6 L7 T", "0 ?0 G2 3 G2 6 7"),
    "gap, end marker lost": ("L0 L2 R0 R1 R2 T L3", "0 ?0 1 2 3"),
    "gap, tail lost": ("L0 L5 R0 R1 R2 E R2 R3 R4 R5 E", "0 ?0 1 2 ?2 3 4 5"),
    "gap, tail and end lost": ("L0 L5 R0 R1 R2 T R2 R3 R4 R5 E", "0 ?0 1 2 ?2 3 4 5"),
    "gap, tail lost for good": ("L0 L5 R0 R1 R2 E R2 E", "0 ?0 1 2 ?2 G2 5"),
    "hole in the replay": ("L0 L6 R0 R1 R4 R1 R2 R3 R4 R5 R6 E", "0 ?0 1 ?1 2 3 4 5 6"),
    "hole in the replay for good": ("L0 L6 R0 R4 R5 R6 E", "0 ?0 G3 4 5 6"),
    "second gap during a replay": ("L0 L2 L5 R0 R1 R2 E R2 R3 R4 R5 E", "0 ?0 1 2 ?2 3 4 5"),
    "last message evicted from the buffer": ("L0 L9 R6 R7 R8 R9 E L10", "0 ?0 X G6 6 7 8 9 10"),
    "late duplicates": ("L0 L1 L1 L0 L2 L1", "0 1 2"),
    "duplicates among held": ("L0 L2 L3 L2 L3 R0 R1 R2 R3 E", "0 ?0 1 2 3"),
    "restart": ("L0 L1 L0b L1b", "0 1 X 0b 1b"),
    "restart at the same number": ("L0 L0b L1b", "0 X 0b 1b"),
    "restart, first messages missed": ("L0 L1 L2 L1b R0b R1b E L2b", "0 1 2 X ?0 0b 1b 2b"),
    "restart that looks like a gap": ("L0 L1 L4b R1b R0b R1b R2b R3b R4b E L5b", "0 1 ?1 X ?0 0b 1b 2b 3b 4b 5b"),
    "restart behind the next number": ("L0 L1 C L2b R1b R0b R1b R2b E", "0 1 ?1 X ?0 0b 1b 2b"),
    "restart, shorter life": ("L0 L1 L2 C E R0b E L1b", "0 1 2 ?2 X ?0 0b 1b"),
    "restart, truncated new life": ("L0 C R7b R8b E", "0 ?0 X G7 7b 8b"),
    "restart during a replay": ("L0 L3 R0 R1 L0b L1b R0b R1b E", "0 ?0 1 X 0b ?0 1b"),
    "restart during a replay, first missed": ("L0 L5 L2b R0b R1b R2b E", "0 ?0 X ?0 0b 1b 2b"),
    "restart twice": ("L0 L0b L0c", "0 X 0b X 0c"),
    "held message of a past life": ("C L3 R0b R1b R2b E L3b", "?0 0b 1b 2b 3b"),
    "held message of a past life before a truncated one": ("C L0 R1b R2b E", "?0 G1 1b 2b"),
    "held message of a past connection": ("C L0 C E L0b L1b", "?0 ?0 0b 1b"),
    "held message that the replay knows better": ("C L0! R0b R1b E", "?0 0b 1b"),
    "network blip": ("L0 L1 C R1 E L2", "0 1 ?1 2"),
    "network blip, messages lost": ("L0 L1 C R1 R2 E L3", "0 1 ?1 2 3"),
    "network blip, no answer": ("L0 L1 C T L2", "0 1 ?1 G0 2"),
    "network blip, no answer, next message": ("L0 L1 C L2 T L3", "0 1 ?1 G0 2 3"),
    "network blip, no answer, gap": ("L0 L1 C L4 T L5", "0 1 ?1 G2 4 5"),
    "blip during a replay": ("L0 L2 R0 C R0 R1 R2 E L3", "0 ?0 ?0 1 2 3"),
    "undecodable": ("L0 L1! L2", "0 G1 2"),
    "undecodable, then a gap": ("L0 L1! L3 R0 R1! R2 R3 E", "0 G1 ?0 2 3"),
    "undecodable in the replay": ("C R0 R1! R2 E L3", "?0 0 G1 2 3"),
    "undecodable duplicate": ("L0 L1! L1! L2", "0 G1 2"),
    "nothing was ever decodable": ("L0! L1! L3 R0! R1! R2 R3 E", "G1 G1 X ?0 G1 G1 2 3"),
    "nothing was ever decodable, restart": ("L0! C R0b R1b E", "G1 X ?0 0b 1b"),
    "first message again, undecodable": ("L0 L3 R0! R0! R1b E", "0 ?0 X ?0 G1 1b"),
    "begin anew": ("L0 L1 Z R0 R1 E L2", "0 1 X ?0 0 1 2"),
    "begin anew, truncated history": ("L0 L1 Z R1 E L2", "0 1 X ?0 G1 1 2"),
    "begin anew, live meanwhile": ("L0 L1 Z L2 R0 R1 R2 E L3", "0 1 X ?0 0 1 2 3"),
    "begin anew during a replay": ("L0 L3 R0 R1 Z R0 R1 R2 R3 E L4", "0 ?0 1 X ?0 0 1 2 3 4"),
    "begin anew, no answer": ("L0 L1 Z L2 T L3", "0 1 X ?0 G2 2 3"),
    "begin anew twice": ("L0 Z Z R0 E L1", "0 X ?0 X ?0 0 1"),
    "answers before what was asked": ("L0 L1 L3 R0 R1 R2 R3 E", "0 1 ?1 2 3"),
}

WITHOUT_REPLAY = {
    "in order": ("C L0 L1", "0 1"),
    "join late": ("C L7 L8", "G7 7 8"),
    "gap": ("L0 L3 L4", "0 G2 3 4"),
    "restart": ("L0 L1 L0b", "0 1 X 0b"),
    "restart, first messages missed": ("L0 L1 L2 L1b", "0 1 2 X G1 1b"),
    "new connection": ("L0 L1 C L2", "0 1 G0 2"),
    "new connection before the first message": ("C C L0 L1", "G0 0 1"),
    "duplicates": ("L0 L1 L0 L1 L2", "0 1 2"),
    "undecodable": ("L0 L1! L2", "0 G1 2"),
    "begin anew": ("L0 L1 Z L2", "0 1 2"),
}


def play(sequencer: Sequencer, script: str) -> str:
    now, out = 0.0, []
    for word in script.split():
        kind, rest = word[0], word[1:]
        request = sequencer.pending or ReplayRequest(0, -1)
        if kind == "C":
            actions = sequencer.connected(now)
        elif kind == "E":
            actions = sequencer.receive_replay_end(request, now)
        elif kind == "Z":
            actions = sequencer.resync(now)
        elif kind == "T":
            now = sequencer.next_timer()
            actions = sequencer.handle_timer(now)
        else:
            life = "abc".index(rest.rstrip("!")[-1]) if rest.rstrip("!")[-1].isalpha() else 0
            seq = int(rest.rstrip("!abc"))
            batch = None if rest.endswith("!") else message(life, seq, 1000.0 * life + seq)
            if kind == "L":
                actions = sequencer.receive_live(seq, batch, now)
            else:
                actions = sequencer.receive_replayed(request, seq, batch, now)
        sequencer._check()
        out += [told(action) for action in actions]
    return " ".join(out)


def told(action: EngineBatch | ReplayRequest) -> str:
    if isinstance(action, ReplayRequest):
        return f"?{action.start_seq}"
    (event,) = action.events
    if isinstance(event, StreamGap):
        return f"G{event.missing}"
    if isinstance(event, StreamRestarted):
        return "X"
    assert isinstance(event, UnknownEvent)
    life, seq = event.tag.split(":")
    return seq + ("", "b", "c")[int(life)]


@pytest.mark.parametrize("name", WITH_REPLAY)
def test_scenario_with_a_replay_endpoint(name: str) -> None:
    script, expected = WITH_REPLAY[name]
    sequencer = Sequencer()
    assert play(sequencer, script) == expected
    assert sequencer.pending is None
    stats = sequencer.stats
    assert stats.gaps == expected.count("G")
    assert stats.missing == sum(int(word[1:]) for word in expected.split() if word[0] == "G")
    assert stats.restarts + stats.resyncs == expected.count("X")
    assert stats.replays == expected.count("?")
    assert stats.replay_timeouts == script.count("T")


@pytest.mark.parametrize("name", WITHOUT_REPLAY)
def test_scenario_without_a_replay_endpoint(name: str) -> None:
    script, expected = WITHOUT_REPLAY[name]
    sequencer = Sequencer(replay=False)
    assert play(sequencer, script) == expected
    assert sequencer.stats.replays == 0
    assert sequencer.next_timer() == float("inf")


def test_answers_to_an_older_request_are_ignored() -> None:
    sequencer = Sequencer()
    (old,) = sequencer.connected(0.0)
    (new,) = sequencer.connected(0.0)
    assert isinstance(old, ReplayRequest) and isinstance(new, ReplayRequest)
    assert sequencer.receive_replayed(old, 0, message(0, 0, 0.0), 0.0) == []
    assert sequencer.receive_replay_end(old, 0.0) == []
    assert sequencer.pending == new
    assert sequencer.receive_replayed(new, 0, message(0, 0, 0.0), 0.0) == [message(0, 0, 0.0)]


def test_each_answer_puts_the_timeout_off() -> None:
    sequencer = Sequencer(replay_timeout_s=2.0)
    (request,) = sequencer.connected(10.0)
    assert isinstance(request, ReplayRequest)
    assert sequencer.next_timer() == 12.0
    sequencer.receive_replayed(request, 0, message(0, 0, 0.0), 11.5)
    assert sequencer.next_timer() == 13.5
    assert sequencer.handle_timer(13.4) == []
    assert sequencer.pending == request
    sequencer.handle_timer(13.5)
    assert sequencer.pending is None


def test_held_messages_are_bounded_and_what_exceeds_is_replayed_later() -> None:
    sequencer = Sequencer(max_held=3)
    live = " ".join(f"L{seq}" for seq in range(2, 10))
    assert play(sequencer, f"L0 {live} R0 R1 E") == "0 ?0 1 2 3 4"
    assert sequencer.stats.overflowed == 5
    assert play(sequencer, "L10 R4 R5 R6 R7 R8 R9 R10 E") == "?4 5 6 7 8 9 10"


def test_a_live_stream_far_behind_the_replay_is_no_restart() -> None:
    steps = 10_000
    sequencer = Sequencer(buffer_steps=steps)
    (request,) = sequencer.connected(0.0)
    assert isinstance(request, ReplayRequest)
    for seq in range(steps):
        sequencer.receive_replayed(request, seq, message(0, seq, float(seq)), 0.0)
    sequencer.receive_replay_end(request, 0.0)
    for seq in range(steps):
        assert sequencer.receive_live(seq, message(0, seq, float(seq)), 0.0) == []
    assert sequencer.stats == SequencerStats(replays=1, duplicates=steps)


def test_a_long_history_is_fetched_in_parts_but_not_for_ever() -> None:
    sequencer = Sequencer()
    play(sequencer, "L0 L9000")
    parts = 0
    while (request := sequencer.pending) is not None:
        parts += 1
        start = sequencer.last_seq
        assert start is not None
        for seq in (start, start + 1, start + 3):
            sequencer.receive_replayed(request, seq, message(0, seq, float(seq)), 0.0)
        if sequencer.pending == request:
            sequencer.receive_replay_end(request, 0.0)
        sequencer._check()
    assert parts == 16
    assert sequencer.last_seq == 9000
    assert sequencer.stats.gaps == 2


def test_marks_carry_the_rank_of_the_stream() -> None:
    sequencer = Sequencer()
    sequencer.receive_live(0, message(0, 0, 0.0), 0.0)
    mark, _ = sequencer.receive_live(0, message(1, 0, 9.0), 0.0)
    assert mark == EngineBatch((StreamRestarted(),), rank=3)


@pytest.mark.parametrize("seq", [-1, 1 << 64])
def test_numbers_beyond_64_bits_are_the_callers_fault(seq: int) -> None:
    with pytest.raises(UsageError, match="64-bit"):
        Sequencer().receive_live(seq, None, 0.0)


@pytest.mark.parametrize("settings", [{"replay_timeout_s": 0.0}, {"max_held": 0}, {"buffer_steps": -1}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="pass"):
        Sequencer(**settings)  # type: ignore[arg-type]


def test_a_number_near_the_end_of_the_range_does_not_stop_the_stream() -> None:
    assert play(Sequencer(), f"L0 L{(1 << 64) - 1} T L0b L1b") == f"0 ?0 G{(1 << 64) - 2} {(1 << 64) - 1} X 0b 1b"


# --- bytes to batches: three streams that mirrors are known to get wrong -----------------------------------


def chain(digests: list[bytes] | list[int], ts: float, first: int = 0) -> bytes:
    tokens = list(range(first, first + 16 * len(digests)))
    event = {"type": "BlockStored", "block_hashes": digests, "token_ids": tokens, "block_size": 16, "medium": "GPU"}
    return msgspec.msgpack.encode([ts, [event], 0])


def feed(sequencer: Sequencer, *messages: tuple[int, bytes]) -> list[object]:
    events: list[object] = []
    for seq, payload in messages:
        for action in sequencer.receive_live(seq, decode_batch(payload), 0.0):
            events += action.events if isinstance(action, EngineBatch) else [action]
    return events


def test_hashes_of_32_bytes_are_one_batch_and_no_gap() -> None:
    digests = [bytes([block]) * 32 for block in range(1, 5)]
    (stored,) = feed(Sequencer(replay=False), (0, chain(digests, 1.0)))
    assert isinstance(stored, BlocksStored)
    assert stored.handles == tuple(int.from_bytes(digest[-8:], "big") for digest in digests)
    assert len(stored.tokens) == 64


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_restarted_empty_with_its_sequence_at_0_is_cleared_first(replay: bool) -> None:
    events = feed(Sequencer(replay=replay), (0, chain([1, 2], 1.0)), (1, chain([3], 2.0)), (0, chain([9], 3.0, 500)))
    assert [type(event) for event in events] == [BlocksStored, BlocksStored, StreamRestarted, BlocksStored]


def test_five_lost_batches_without_replay_are_declared_before_the_next() -> None:
    events = feed(Sequencer(replay=False), (0, chain([1, 2], 1.0)), (6, chain([9], 7.0, 500)))
    assert [type(event) for event in events] == [BlocksStored, StreamGap, BlocksStored]
    assert events[1] == StreamGap(5)


# --- a model engine ----------------------------------------------------------------------------------------


@dataclass
class Engine:
    """What an engine and the wire do: lives, a finite replay buffer, a clock that never runs back."""

    buffer_steps: int
    life: int = 0
    ts: float = 0.0
    log: list[EngineBatch | None] = field(default_factory=list)
    connected: bool = True

    def publish(self, *, decodable: bool) -> tuple[int, EngineBatch | None]:
        self.ts += 1.0
        seq = len(self.log)
        self.log.append(message(self.life, seq, self.ts) if decodable else None)
        return seq, self.log[-1]

    def restart(self) -> None:
        self.life += 1
        self.log = []
        self.connected = False

    def replay(self, start: int) -> list[tuple[int, EngineBatch | None]]:
        first = max(start, len(self.log) - self.buffer_steps)
        return [(seq, self.log[seq]) for seq in range(first, len(self.log))]


class StreamMachine(RuleBasedStateMachine):
    """What is applied is the engine's true history since the last mark, or a mark says that it is not."""

    replay = True

    @initialize(buffer_steps=st.sampled_from([0, 2, 5, 10_000]), max_held=st.sampled_from([2, 4096]))
    def start(self, buffer_steps: int, max_held: int) -> None:
        self.engine = Engine(buffer_steps)
        self.sequencer = Sequencer(replay=self.replay, max_held=max_held)
        self.now = 0.0
        self.view: list[tuple[int, int]] = []
        self.doubt = False
        self.live: deque[tuple[int, EngineBatch | None]] = deque()
        self.requests: list[ReplayRequest] = []
        self.answers: deque[tuple[ReplayRequest, int, EngineBatch | None] | ReplayRequest] = deque()
        self.act(self.sequencer.connected(self.now))

    def act(self, actions: list[EngineBatch | ReplayRequest]) -> None:
        for action in actions:
            if isinstance(action, ReplayRequest):
                self.requests.append(action)
                continue
            (event,) = action.events
            if isinstance(event, StreamGap):
                self.doubt = True
            elif isinstance(event, StreamRestarted):
                self.view, self.doubt = [], False
            else:
                assert isinstance(event, UnknownEvent)
                life, seq = map(int, event.tag.split(":"))
                self.view.append((life, seq))

    @rule(fates=st.lists(st.sampled_from(["sent", "sent", "sent", "lost", "twice", "garbled"]), max_size=6))
    def publish(self, fates: list[str]) -> None:
        for fate in fates:
            sent = self.engine.publish(decodable=fate != "garbled")
            if self.engine.connected and fate != "lost":
                self.live.extend([sent] * (2 if fate == "twice" else 1))

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 8), again=st.booleans())
    def deliver(self, count: int, again: bool) -> None:
        for _ in range(min(count, len(self.live))):
            seq, batch = self.live.popleft()
            self.act(self.sequencer.receive_live(seq, batch, self.now))
            self.sequencer._check()
        if again:
            self.act(self.sequencer.receive_live(seq, batch, self.now))

    @rule()
    def restart(self) -> None:
        self.engine.restart()

    @precondition(lambda self: not self.engine.connected or len(self.view) % 3 == 0)
    @rule()
    def connect(self) -> None:
        if self.live:
            self.deliver(len(self.live), False)
        self.engine.connected = True
        self.act(self.sequencer.connected(self.now))

    @precondition(lambda self: self.requests)
    @rule(lost=st.tuples(st.integers(0, 9), st.integers(0, 3)), lose_end=st.booleans())
    def answer(self, lost: tuple[int, int], lose_end: bool) -> None:
        request = self.requests.pop(0)
        answers = self.engine.replay(request.start_seq)
        first = lost[0] + 1  # a full socket loses what comes later, never the first answer
        del answers[first : first + lost[1]]
        self.answers.extend((request, seq, batch) for seq, batch in answers)
        if not lose_end:
            self.answers.append(request)

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 12))
    def deliver_answers(self, count: int) -> None:
        for _ in range(min(count, len(self.answers))):
            answer = self.answers.popleft()
            if isinstance(answer, ReplayRequest):
                self.act(self.sequencer.receive_replay_end(answer, self.now))
            else:
                self.act(self.sequencer.receive_replayed(*answer, self.now))
            self.sequencer._check()

    @rule(step=st.sampled_from([0.5, 3.0]))
    def wait(self, step: float) -> None:
        self.now += step
        self.act(self.sequencer.handle_timer(self.now))

    @invariant()
    def view_is_true_or_doubted(self) -> None:
        if not hasattr(self, "view"):
            return
        assert self.view == sorted(set(self.view)), "nothing twice, nothing out of order"
        if self.view and not self.doubt:
            life = self.view[0][0]
            assert self.view == [(life, seq) for seq in range(len(self.view))], "one life, from its beginning"
        assert self.now < self.sequencer.next_timer() or self.sequencer.pending

    def teardown(self) -> None:
        """When faults cease, the view reaches the engine's present."""
        if not hasattr(self, "view"):
            return
        self.connect()
        while self.live or self.requests or self.answers:
            if self.live:
                self.deliver(100, False)
            if self.requests:
                self.answer((0, 0), False)
            if self.answers:
                self.deliver_answers(100)
            self.view_is_true_or_doubted()
        assert self.sequencer.pending is None
        log = self.engine.log
        if not self.replay or self.engine.buffer_steps == 0 or not log or None in log:
            return
        assert self.view[-1] == (self.engine.life, len(log) - 1)
        if len(log) <= self.engine.buffer_steps and not self.doubt:
            assert len(self.view) == len(log)


class StreamMachineWithoutReplay(StreamMachine):
    replay = False


_SETTINGS = settings(max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestStream = StreamMachine.TestCase
TestStream.settings = _SETTINGS
TestStreamWithoutReplay = StreamMachineWithoutReplay.TestCase
TestStreamWithoutReplay.settings = _SETTINGS
