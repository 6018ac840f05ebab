"""Load: reports, adverts on the wire, push-back, booked work, rates and suspension, each against a plain model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import LoadReport, PushBackSettings, PushBackState, UsageError
from prefixroute.endpoint.local import PushBack
from prefixroute.load import Advert
from prefixroute.replication.wire import LoadWire, load_from_wire, load_to_wire
from prefixroute.routing.ledger import ARRIVALS_S, ArrivalRate, Ledger, RateEstimate
from prefixroute.routing.trust import SILENT, Suspension

exact = settings(derandomize=True, deadline=None, max_examples=150)


# --- reports and adverts -----------------------------------------------------------------------------------

NUMBERS = ("running", "waiting", "queued_tokens", "prefill_tokens_per_s", "overhead_s", "capacity_tokens")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, -1e-9, float("nan"), float("inf"), float("-inf"), 2**63, 10**400])
def test_a_report_takes_no_number_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"LoadReport.{name}"):
        LoadReport(**{name: value})


@pytest.mark.parametrize("share", [-0.01, 1.01, float("nan"), 99])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(UsageError, match="kv_used is a share"):
        LoadReport(kv_used=share)


@st.composite
def adverts(draw: st.DrawFn) -> Advert:
    whole = st.integers(0, 2**63 - 1) | st.integers(0, 1000)
    real = st.floats(0, 2**62) | st.floats(0, 100)
    report = LoadReport(
        draw(whole),
        draw(whole),
        draw(whole),
        draw(real),
        draw(real),
        draw(st.floats(0, 1)),
        draw(whole),
        draw(st.booleans()),
        draw(st.text(st.characters(), max_size=100)),
    )
    state = draw(st.sampled_from(PushBackState))
    return Advert(report, state, draw(st.floats(0, 1e12)), draw(whole), draw(st.floats(0, 1)))


def over_the_wire(advert: Advert) -> Advert:
    data = msgspec.msgpack.encode(load_to_wire(advert))
    return load_from_wire(msgspec.msgpack.decode(data, type=LoadWire))


@given(adverts())
@exact
def test_every_advert_survives_the_wire_as_far_as_its_units_go(advert: Advert) -> None:
    back, sent, got = over_the_wire(advert), advert.report, over_the_wire(advert).report
    assert got.running == min(sent.running, 2**32 - 1)
    assert got.waiting == min(sent.waiting, 2**32 - 1)
    assert got.queued_tokens == sent.queued_tokens
    assert got.capacity_tokens == sent.capacity_tokens
    assert abs(got.prefill_tokens_per_s - min(sent.prefill_tokens_per_s, 2**32 - 1)) <= 0.5
    assert got.overhead_s == pytest.approx(min(sent.overhead_s, (2**32 - 1) / 1e6), abs=1e-6)
    assert got.kv_used == pytest.approx(sent.kv_used, abs=0.0051)
    assert back.state is advert.state
    assert got.refusing is (advert.state is PushBackState.REFUSING)
    assert back.ttl_s == pytest.approx(min(advert.ttl_s, (2**32 - 1) / 1000), abs=0.0006)
    assert back.hit_unit == min(advert.hit_unit, 2**32 - 1)
    assert back.confidence == pytest.approx(advert.confidence, abs=0.0051)
    assert over_the_wire(back) == back, "what came over the wire stays as it is when relayed"


@pytest.mark.parametrize(("reason", "travels"), [("draining", "draining"), ("x" * 99, "x" * 64), ("a\ud83d", "a?")])
def test_a_reason_travels_cut_and_encodable(reason: str, travels: str) -> None:
    assert over_the_wire(Advert(LoadReport(reason=reason))).report.reason == travels


def test_what_outcomes_show_counts_more_than_what_a_report_says() -> None:
    told = LoadReport(prefill_tokens_per_s=10.0, overhead_s=3.0, waiting=3, queued_tokens=70)
    estimate = RateEstimate()
    assert estimate.corrected(told) == told, "an estimate of nothing changes nothing"
    for _ in range(8):
        estimate.add(0, 0.02, False)
        estimate.add(1000, 0.27, False)
    report = estimate.corrected(told)
    assert report.overhead_s == 0.02
    assert report.prefill_tokens_per_s == pytest.approx(4000)
    assert (report.waiting, report.queued_tokens) == (3, 70)


# --- push-back ---------------------------------------------------------------------------------------------

IDLE = LoadReport()
SETTINGS = PushBackSettings(enter_s=4.0, leave_s=2.0, ttl_s=3.0)


def test_push_back_enters_high_and_leaves_low() -> None:
    push_back = PushBack(SETTINGS)
    steps = [
        (0.0, PushBackState.OPEN, False),
        (3.9, PushBackState.OPEN, False),
        (4.0, PushBackState.OVERLOADED, True),
        (3.9, PushBackState.OVERLOADED, False),
        (2.1, PushBackState.OVERLOADED, False),
        (9.0, PushBackState.OVERLOADED, False),
        (2.0, PushBackState.OPEN, True),
        (3.9, PushBackState.OPEN, False),
        (2.1, PushBackState.OPEN, False),
    ]
    for step, (work_s, state, changed) in enumerate(steps):
        assert push_back.update(work_s, IDLE, float(step)) is changed, steps[step]
        assert push_back.state is state, steps[step]


@given(st.lists(st.floats(0, 8), min_size=2, max_size=60))
@exact
def test_push_back_changes_only_at_its_two_thresholds(works: list[float]) -> None:
    push_back = PushBack(SETTINGS)
    for step, work_s in enumerate(works):
        before = push_back.state
        if push_back.update(work_s, IDLE, float(step)):
            entered = push_back.state is PushBackState.OVERLOADED
            assert work_s >= SETTINGS.enter_s if entered else work_s <= SETTINGS.leave_s
        else:
            assert push_back.state is before


def test_push_back_says_why_while_it_lasts() -> None:
    push_back = PushBack(SETTINGS)
    push_back.update(5.25, IDLE, 0.0)
    assert push_back.reason == "queue of 5.2 s"
    push_back.update(0.0, IDLE, 1.0)
    assert push_back.reason == ""
    push_back.update(0.0, LoadReport(refusing=True, reason="draining"), 2.0)
    assert (push_back.state, push_back.reason) == (PushBackState.REFUSING, "draining")
    push_back.update(0.0, LoadReport(refusing=True), 3.0)
    assert push_back.reason == "the engine refuses"


@pytest.mark.parametrize(
    ("work_s", "after"), [(0.0, PushBackState.OPEN), (3.0, PushBackState.OPEN), (4.0, PushBackState.OVERLOADED)]
)
def test_a_report_of_refusal_counts_until_the_next_one(work_s: float, after: PushBackState) -> None:
    push_back = PushBack(SETTINGS)
    push_back.update(0.0, LoadReport(refusing=True), 10.0)
    assert not push_back.update(work_s, LoadReport(refusing=True), 99.0)
    assert push_back.state is PushBackState.REFUSING
    assert push_back.update(work_s, IDLE, 99.0)
    assert push_back.state is after


@pytest.mark.parametrize(
    ("work_s", "after"), [(0.0, PushBackState.OPEN), (3.0, PushBackState.OPEN), (4.0, PushBackState.OVERLOADED)]
)
def test_a_refused_request_counts_for_its_time_to_live_and_no_longer(work_s: float, after: PushBackState) -> None:
    push_back = PushBack(SETTINGS)
    push_back.refuse("503", 13.0)
    assert push_back.update(work_s, IDLE, 12.9)
    assert push_back.state is PushBackState.REFUSING
    assert push_back.update(work_s, IDLE, 13.0)
    assert push_back.state is after


def test_a_refusal_that_is_renewed_lasts() -> None:
    push_back = PushBack(SETTINGS)
    for now in range(20):
        push_back.update(0.0, LoadReport(refusing=True), float(now))
        assert push_back.state is PushBackState.REFUSING


def test_a_noted_refusal_never_shortens_one_that_lasts_longer() -> None:
    push_back = PushBack(SETTINGS)
    push_back.refuse("503", 9.0)
    push_back.refuse("503 again", 4.0)
    push_back.update(0.0, IDLE, 8.9)
    assert (push_back.state, push_back.reason) == (PushBackState.REFUSING, "503 again")
    push_back.update(0.0, IDLE, 9.0)
    assert push_back.state is PushBackState.OPEN


@pytest.mark.parametrize(
    "wrong",
    [{"enter_s": 1.0, "leave_s": 1.0}, {"enter_s": 1.0, "leave_s": 2.0}, {"leave_s": -1.0}, {"ttl_s": 0.0}],
)
def test_push_back_needs_room_between_its_thresholds(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="push-back needs"):
        PushBackSettings(**wrong)


# --- booked work -------------------------------------------------------------------------------------------


@dataclass
class PlainQueue:
    """The ledger as one would write it on paper: who is first works at rate 1, the others wait."""

    items: list[tuple[int, float, float]] = field(default_factory=list)
    head_at: float = 0.0

    def book(self, ticket: int, work_s: float, now: float, expires_at: float) -> None:
        self.release(ticket, now)
        if not self.items:
            self.head_at = now
        self.items.append((ticket, work_s, expires_at))

    def release(self, ticket: int, now: float) -> bool:
        if self.items and self.items[0][0] == ticket:
            self.head_at = now
        before = len(self.items)
        self.items = [item for item in self.items if item[0] != ticket]
        return len(self.items) < before

    def wait_s(self, now: float) -> float:
        while self.items and self.items[0][2] <= now:
            self.release(self.items[0][0], now)
        if not self.items:
            return 0.0
        done = min(now - self.head_at, self.items[0][1])
        return sum(item[1] for item in self.items) - done


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("book", "book", "release", "pass")),
        st.integers(0, 7),
        st.floats(0, 5),
        st.floats(0.01, 20),
        st.floats(0, 3),
    ),
    max_size=60,
)


@given(OPERATIONS)
@exact
def test_the_ledger_is_a_queue_drained_at_rate_1(operations: list[tuple[str, int, float, float, float]]) -> None:
    ledger, plain, now = Ledger(), PlainQueue(), 100.0
    for kind, ticket, work_s, lasts_s, dt in operations:
        now += dt
        if kind == "book":
            ledger.book(ticket, work_s, now, now + lasts_s)
            plain.book(ticket, work_s, now, now + lasts_s)
        elif kind == "release":
            assert ledger.release(ticket, now) is plain.release(ticket, now)
        assert ledger.wait_s(now) == pytest.approx(plain.wait_s(now), abs=1e-9)
        assert len(ledger) == len(plain.items)
        ledger._check()


def test_the_wait_falls_as_time_passes_but_the_first_in_line_is_not_overtaken() -> None:
    ledger = Ledger()
    ledger.book(1, 2.0, 0.0, 99.0)
    ledger.book(2, 3.0, 0.0, 99.0)
    assert [ledger.wait_s(t) for t in (0.0, 1.0, 2.0, 50.0)] == [5.0, 4.0, 3.0, 3.0]
    ledger.release(1, 50.0)
    assert [ledger.wait_s(t) for t in (50.0, 51.0)] == [3.0, 2.0]


def test_a_request_that_leaves_from_behind_takes_only_its_own_work() -> None:
    ledger = Ledger()
    ledger.book(1, 5.0, 0.0, 99.0)
    ledger.book(2, 1.0, 0.0, 99.0)
    assert ledger.wait_s(4.0) == 2.0
    ledger.release(2, 4.0)
    assert ledger.wait_s(4.0) == 1.0


def test_unknown_and_repeated_tickets_are_harmless() -> None:
    ledger = Ledger()
    assert not ledger.release(7, 0.0)
    ledger.book(7, 1.0, 0.0, 99.0)
    assert ledger.release(7, 0.5)
    assert not ledger.release(7, 0.6)
    ledger.book(8, 1.0, 1.0, 99.0)
    ledger.book(8, 2.0, 2.0, 99.0)
    assert (len(ledger), ledger.wait_s(2.0)) == (1, 2.0)


def test_released_work_leaves_no_residue() -> None:
    ledger, rng = Ledger(), random.Random(1)
    tickets = list(range(2000))
    for ticket in tickets:
        ledger.book(ticket, rng.random(), 0.0, 99.0)
    rng.shuffle(tickets)
    for ticket in tickets:
        ledger.release(ticket, 1.0)
    assert (len(ledger), ledger.wait_s(1.0)) == (0, 0.0)


def test_outcomes_that_never_come_expire_however_many_they_are() -> None:
    ledger = Ledger()
    for ticket in range(5000):
        ledger.book(ticket, 1.0, 0.0, 10.0)
    assert ledger.wait_s(9.9) == pytest.approx(4999.0)
    assert ledger.wait_s(10.0) == 0.0
    assert len(ledger) == 0


def test_a_clock_that_steps_back_makes_no_wait_out_of_nothing() -> None:
    ledger = Ledger()
    ledger.book(1, 2.0, 100.0, 200.0)
    assert ledger.wait_s(50.0) == 2.0


# --- rates -------------------------------------------------------------------------------------------------


def fed(samples: list[tuple[int, float]]) -> RateEstimate:
    estimate = RateEstimate()
    for uncached_tokens, ttft_s in samples:
        estimate.add(uncached_tokens, ttft_s, False)
    return estimate


def test_the_rate_is_unknown_before_four_samples() -> None:
    estimate = RateEstimate()
    for n in range(4):
        assert (estimate.prefill_tokens_per_s, estimate.overhead_s) == (0.0, 0.0), f"after {n} samples"
        estimate.add(1000, 1.0, False)
        estimate.add(10, 0.05, False)
    assert estimate.overhead_s == 0.05
    assert estimate.prefill_tokens_per_s > 0


def test_the_fixed_time_is_that_of_the_quicker_ones() -> None:
    """Some nearly cached requests shared a core with others' prefill: that is no fixed part of anything."""
    assert fed([(10, t) for t in (0.06, 0.3, 0.25, 0.07, 0.4, 0.2, 0.5, 0.3)]).overhead_s == 0.07


# --- arrivals ----------------------------------------------------------------------------------------------


def test_a_steady_stream_is_counted_at_its_rate() -> None:
    rate = ArrivalRate()
    assert rate.per_s(0.0) == 0.0
    for i in range(2000):
        rate.arrived(1e6 + i / 4)
    assert rate.per_s(1e6 + 1999 / 4) == pytest.approx(4.0, rel=0.01)


def test_arrivals_fade_with_time_alone() -> None:
    rate = ArrivalRate()
    for _ in range(3):
        rate.arrived(5.0)
    assert rate.per_s(5.0) == pytest.approx(3 / ARRIVALS_S)
    assert rate.per_s(5.0 + ARRIVALS_S) == pytest.approx(3 / ARRIVALS_S / math.e)


@pytest.mark.parametrize("outliers", [[10.0] * 12, [0.01] * 7, [10.0] * 6 + [0.01] * 6])
def test_the_rate_shrugs_off_outliers(outliers: list[float]) -> None:
    """Of 32 samples of a 1,000 tokens/s engine: a third that were slow for other reasons, a few impossibly fast."""
    times = [1.0] * (32 - len(outliers)) + outliers
    random.Random(1).shuffle(times)
    assert fed([(1000, t) for t in times]).prefill_tokens_per_s == pytest.approx(1000)


def test_one_impossibly_fast_sample_of_four_does_not_count() -> None:
    assert fed([(1000, 1.0)] * 3 + [(1000, 1e-6)]).prefill_tokens_per_s == pytest.approx(1000)


@pytest.mark.parametrize("seed", range(20))
def test_the_cost_of_prefill_is_estimated_low(seed: int) -> None:
    rng = random.Random(seed)
    estimate = fed([(n, n / 1000 * rng.uniform(0.8, 1.2)) for n in (rng.randint(256, 4000) for _ in range(200))])
    assert 1000 <= estimate.prefill_tokens_per_s <= 1000 / 0.8 + 1


def test_the_rate_follows_an_engine_that_changed() -> None:
    estimate = fed([(1000, 1.0)] * 100 + [(1000, 0.25)] * 32)
    assert estimate.prefill_tokens_per_s == pytest.approx(4000)


def test_the_fixed_time_is_taken_off_but_never_more_than_half() -> None:
    assert fed([(0, 0.2)] * 4 + [(1000, 1.2)] * 4).prefill_tokens_per_s == pytest.approx(1000)
    assert fed([(0, 9.0)] * 4 + [(1000, 1.0)] * 4).prefill_tokens_per_s == pytest.approx(2000)


def test_requests_that_say_nothing_about_the_rate_are_left_out() -> None:
    estimate = RateEstimate()
    for _ in range(8):
        estimate.add(1000, 1.0, True)
        estimate.add(1000, 0.0, False)
        estimate.add(128, 1.0, False)
    assert (estimate.prefill_tokens_per_s, estimate.overhead_s) == (0.0, 0.0)


# --- suspension --------------------------------------------------------------------------------------------


def test_a_failure_suspends_at_once() -> None:
    suspension = Suspension()
    assert not suspension.blocks(0.0)
    assert suspension.failed(sent_at=0.0, now=0.5)
    assert suspension.blocks(0.5)
    assert suspension.blocks(1.4)
    assert not suspension.blocks(1.5)


def test_what_was_under_way_when_a_node_died_counts_once() -> None:
    suspension = Suspension()
    sent = [0.1 * i for i in range(50)]
    assert suspension.failed(sent[0], now=5.0)
    assert not any(suspension.failed(sent_at, now=5.0 + 0.01 * i) for i, sent_at in enumerate(sent))
    assert suspension.failures == 1
    assert not suspension.blocks(6.0)


def test_the_pause_grows_to_its_bound() -> None:
    suspension, now, pauses = Suspension(), 0.0, []
    for ticket in range(9):
        suspension.failed(sent_at=now, now=now + 0.5)
        suspension.ended(ticket - 1)
        began = now = now + 0.5
        while suspension.blocks(now):
            now += 0.5
        pauses.append(now - began)
        suspension.sent(ticket)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_silence_counts_twice() -> None:
    suspension, now, pauses = Suspension(), 0.0, []
    for _ in range(5):
        assert suspension.failed(sent_at=now, now=now + 0.5, weight=SILENT) >= 1
        pauses.append(suspension.trial_at - now - 0.5)
        now = suspension.trial_at
    assert pauses == [2.0, 8.0, 32.0, 60.0, 60.0]


def test_an_endpoint_that_fails_for_ever_is_still_tried() -> None:
    suspension = Suspension()
    for n in range(3000):
        assert suspension.failed(sent_at=100.0 * n, now=100.0 * n + 1)
    assert suspension.blocks(now=300_000.0 - 99.0)
    assert not suspension.blocks(now=300_000.0)


def test_one_trial_at_a_time_until_it_ends() -> None:
    suspension = Suspension()
    suspension.failed(0.0, 0.0)
    assert not suspension.blocks(1.0)
    suspension.sent(7)
    assert suspension.blocks(1.0)
    assert suspension.blocks(1e6)
    suspension.ended(8)
    assert suspension.blocks(1e6)
    suspension.ended(7)
    assert not suspension.blocks(1.0)


def test_after_a_trial_that_succeeds_twice_as_many_go_there_with_each_answer() -> None:
    suspension = Suspension()
    suspension.failed(0.0, 0.0)
    for answers in (0, 1, 2, 3):
        for ticket in range(2**answers):
            assert not suspension.blocks(1.0)
            suspension.sent(ticket)
        assert suspension.blocks(1.0)
        for ticket in range(2**answers):
            suspension.ended(ticket)
        assert suspension.served() is (answers == 0), "the first one ends it"
    assert not suspension.on_trial


def test_a_trial_that_fails_lengthens_the_pause_and_answers_in_a_row_shorten_it_step_by_step() -> None:
    suspension = Suspension()
    suspension.failed(0.0, 0.0)
    suspension.sent(1)
    assert suspension.failed(sent_at=1.0, now=1.5)
    suspension.ended(1)
    assert suspension.blocks(3.4)
    assert not suspension.blocks(3.5)
    assert suspension.served()
    assert suspension.failures == 2, "one answer is not enough"
    assert [suspension.served() for _ in range(3)] == [False] * 3
    assert suspension.failures == 1
    for _ in range(4):
        suspension.served()
    assert suspension.failures == 0
    assert not suspension.served(), "nothing was suspended any more"
    assert suspension.failed(4.0, 4.5)
    assert not suspension.blocks(5.5), "the next suspension starts small again"


def test_one_that_fails_every_second_time_is_driven_out() -> None:
    suspension = Suspension()
    for n in range(20):
        suspension.failed(100.0 * n, 100.0 * n + 1)
        suspension.served()
    assert suspension.failed(5000.0, 5001.0)
    assert suspension.trial_at == 5061.0


def test_short_answers_make_up_little_for_a_long_prompt_that_failed() -> None:
    suspension = Suspension()
    suspension.failed(0.0, 0.0, tokens=10_000)
    for _ in range(39):
        suspension.served(tokens=1000)
    assert suspension.failures == 1
    suspension.served(tokens=1000)
    suspension.served(tokens=1000)
    assert suspension.failures == 0


def test_a_failure_that_was_none_is_taken_back() -> None:
    suspension = Suspension()
    charged = suspension.failed(0.0, 3.0, weight=SILENT)
    assert charged == 2
    assert suspension.served(forgiven=charged)
    assert suspension.failures == 0
    assert not suspension.blocks(3.0)
    assert not suspension.failed(2.9, 4.0), "what was sent before is no news"
