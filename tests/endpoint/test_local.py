"""The owner's side of an endpoint: what it advertises, what it learns, and history in place of a silent engine."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from prefixroute import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    Domain,
    EngineBatch,
    LoadReport,
    Namespace,
    NodeEvent,
    PushBackChanged,
    PushBackSettings,
    PushBackState,
    Residency,
    ResidencyChanged,
    StreamGap,
    StreamRestarted,
    TokenChain,
)
from prefixroute.endpoint.history import DEFAULT_CAPACITY_BLOCKS, RoutingHistory
from prefixroute.endpoint.local import SILENT_AFTER, LocalEndpoint, OwnSettings
from prefixroute.events import Journal
from prefixroute.keys.chain import ChainSpec
from prefixroute.replication.copies import Copy
from prefixroute.routing.standing import LocalStanding
from prefixroute.testing import stored

DOMAIN = Domain("m", "t")
BLOCK = DOMAIN.block_size


def prompt(seed: int, blocks: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(blocks * BLOCK)]


def chain(tokens: list[int], namespace: Namespace | None = None, contents: tuple[ContentSpan, ...] = ()) -> TokenChain:
    namespace = namespace or Namespace()
    return TokenChain(ChainSpec(BLOCK, DOMAIN.mix), DOMAIN.root_key(namespace), tokens, contents, namespace)


def endpoint(push_back: PushBackSettings | None = None) -> tuple[LocalEndpoint, LocalStanding]:
    copy = Copy("a/0", True, 1, 0.0)
    own = OwnSettings(DOMAIN, push_back or PushBackSettings(), 2.0, 49152)
    local = LocalEndpoint(copy, 1, 0.0, own, ("gpu", "cpu"), lambda key: False, Journal())
    return local, local.standing


def news(one: LocalEndpoint) -> list[NodeEvent]:
    """What the endpoint has told since the last time."""
    return one._journal.take_events()


def advertised(one: LocalEndpoint, now: float) -> list[NodeEvent]:
    one.advertise(now)
    return news(one)


def held(one: LocalEndpoint, tokens: list[int]) -> int:
    """How many leading blocks of a prompt the endpoint's residency holds."""
    keys, query = set(one.residency.keys()), chain(tokens)
    return next((d for d in range(query.depth) if query.key(d + 1) not in keys), query.depth)


# --- what it advertises ------------------------------------------------------------------------------------


def test_a_new_endpoint_advertises_no_pace_that_it_does_not_know() -> None:
    one, _ = endpoint()
    assert advertised(one, 0.0) == []
    advert = one.copy.advert
    assert advert.state is PushBackState.OPEN
    assert advert.ttl_s == 0.0
    assert (advert.report.prefill_tokens_per_s, advert.report.queued_tokens) == (0.0, 0)
    assert (advert.confidence, advert.hit_unit) == (1.0, 0)


@pytest.mark.parametrize(("probed", "booked", "advertised"), [(500, 0, 500), (500, 2000, 2000), (5000, 2000, 5000)])
def test_the_worse_of_probe_and_bookings_is_advertised(probed: int, booked: int, advertised: int) -> None:
    one, standing = endpoint(PushBackSettings(enter_s=100.0))
    one.report = LoadReport(queued_tokens=probed, prefill_tokens_per_s=1000)
    standing.ledger.book(1, booked / 1000, 0.0, 99.0)
    one.advertise(0.0)
    assert one.copy.advert.report.queued_tokens == advertised


def test_a_released_booking_counts_no_more_at_once() -> None:
    one, standing = endpoint()
    one.report = LoadReport(queued_tokens=100, prefill_tokens_per_s=1000)
    standing.ledger.book(1, 2.0, 0.0, 99.0)
    one.advertise(0.0)
    standing.ledger.release(1, 0.0)
    standing.refresh(0.0)
    assert standing.wait_s(0.0) == pytest.approx(0.1)


def test_push_back_is_told_once_and_carries_reason_and_time_to_live() -> None:
    one, _ = endpoint(PushBackSettings(enter_s=4.0, leave_s=2.0))
    one.report = LoadReport(queued_tokens=5000, prefill_tokens_per_s=1000)
    assert advertised(one, 0.0) == [PushBackChanged("a/0", "overloaded", "queue of 5.0 s")]
    assert advertised(one, 1.0) == []
    advert = one.copy.advert
    assert (advert.state, advert.ttl_s, advert.report.reason) == (PushBackState.OVERLOADED, 2.0, "queue of 5.0 s")
    assert not advert.report.refusing
    one.report = LoadReport()
    assert advertised(one, 2.0) == [PushBackChanged("a/0", "open", "")]
    assert one.copy.advert.ttl_s == 0.0


def test_a_refusing_engine_is_advertised_as_such_until_it_refuses_no_more() -> None:
    one, _ = endpoint(PushBackSettings(ttl_s=2.0))
    one.report = LoadReport(refusing=True, reason="draining")
    assert advertised(one, 0.0) == [PushBackChanged("a/0", "refusing", "draining")]
    assert advertised(one, 9.0) == []
    assert one.copy.advert.report.refusing
    one.probed(LoadReport(), 9.0)
    assert advertised(one, 9.0) == [PushBackChanged("a/0", "open", "")]
    assert not one.copy.advert.report.refusing


def test_a_request_that_the_engine_turned_away_is_advertised_as_refusal() -> None:
    one, standing = endpoint(PushBackSettings(ttl_s=2.0))
    standing.refused_until, standing.refusal = 2.0, "503"
    assert advertised(one, 1.0) == [PushBackChanged("a/0", "refusing", "503")]
    assert one.copy.advert.state is PushBackState.REFUSING
    one.probed(LoadReport(), 1.0)
    assert advertised(one, 1.0) == [], "a probe that never said so knows nothing of it"
    assert advertised(one, 2.0) == [PushBackChanged("a/0", "open", "")]


def test_who_drained_and_says_that_it_is_over_has_turned_nothing_away() -> None:
    one, standing = endpoint(PushBackSettings(ttl_s=2.0))
    standing.refused_until, standing.refusal = 2.0, "503"
    one.probed(LoadReport(refusing=True), 0.5)
    assert advertised(one, 0.5) == [PushBackChanged("a/0", "refusing", "the engine refuses")]
    one.probed(LoadReport(), 0.6)
    assert advertised(one, 0.6) == [PushBackChanged("a/0", "open", "")]


def test_rate_and_fixed_time_come_from_outcomes_when_no_probe_tells() -> None:
    one, standing = endpoint()
    for _ in range(4):
        standing.estimate.add(1000, 2.02, False)
        standing.estimate.add(0, 0.02, False)
    one.advertise(0.0)
    assert one.copy.advert.report.overhead_s == 0.02
    assert one.copy.advert.report.prefill_tokens_per_s == pytest.approx(500, rel=0.02)


def test_a_gap_lowers_the_confidence_that_is_advertised_and_is_told() -> None:
    one, _ = endpoint()
    one.apply(stored(prompt(1, 8)), 0.0)
    _, told = one.apply(EngineBatch((StreamGap(3),)), 0.0), news(one)
    assert told == [ResidencyChanged("a/0", "partial", "events were lost")]
    one.advertise(0.0)
    assert one.copy.advert.confidence == 0.5
    _, told = one.apply(EngineBatch((StreamRestarted(),)), 0.0), news(one)
    assert [event.state for event in told if isinstance(event, ResidencyChanged)] == ["restarted", "exact"]
    one.advertise(0.0)
    assert one.copy.advert.confidence == 1.0


# --- the hit unit ------------------------------------------------------------------------------------------


def test_the_hit_unit_is_the_engines_block_where_it_is_known() -> None:
    one, _ = endpoint()
    one.apply(stored(prompt(1, 8), block_size=32), 0.0)
    one.served(chain(prompt(2, 8)), 48, 0.0)
    one.advertise(0.0)
    assert one.copy.advert.hit_unit == 32


def test_an_unknown_hit_unit_is_learnt_from_cached_tokens() -> None:
    one, _ = endpoint()
    units = []
    for cached in (None, 0, 192, 128, 0, 320):
        one.served(chain(prompt(1, 30)), cached, 0.0)
        one.advertise(0.0)
        units.append(one.copy.advert.hit_unit)
    assert units == [0, 0, 192, 64, 64, 64]


# --- a silent engine ---------------------------------------------------------------------------------------


def test_history_stands_in_for_an_engine_that_never_speaks() -> None:
    one, _ = endpoint()
    for i in range(SILENT_AFTER - 1):
        assert (one.served(chain(prompt(i, 4)), None, 0.0), news(one)) == (_nothing(), [])
    changes, told = one.served(chain(prompt(99, 4)), None, 0.0), news(one)
    assert len(changes.added) == 4
    assert [(event.endpoint, event.state) for event in told] == [("a/0", "silent")]  # type: ignore[union-attr]
    assert "no engine event" in told[0].reason  # type: ignore[union-attr]
    assert held(one, prompt(99, 4)) == 4
    assert held(one, prompt(0, 4)) == 0, "what was served before is not made up"
    _, told = one.served(chain(prompt(100, 6)), None, 0.0), news(one)
    assert told == [], "it is told once"
    assert held(one, prompt(100, 6)) == 6


def test_an_engine_that_spoke_is_never_taken_for_silent() -> None:
    one, _ = endpoint()
    one.apply(stored(prompt(1, 2)), 0.0)
    for i in range(3 * SILENT_AFTER):
        assert (one.served(chain(prompt(i, 4)), 0, 0.0), news(one)) == (_nothing(), [])


@pytest.mark.parametrize("blocks", [0, 1])
def test_prompts_too_short_to_be_cached_say_nothing_of_the_stream(blocks: int) -> None:
    one, _ = endpoint()
    for i in range(3 * SILENT_AFTER):
        assert (one.served(chain(prompt(i, blocks)), 0, 0.0), news(one)) == (_nothing(), [])


def test_batches_without_events_are_no_sign_of_life() -> None:
    """A follower that reports an empty step for each message of an engine whose events are off."""
    one, _ = endpoint()
    told = []
    for i in range(SILENT_AFTER):
        one.apply(EngineBatch(()), 0.0)
        one.served(chain(prompt(i, 4)), 0, 0.0)
        told += news(one)
    assert [event.state for event in told] == ["silent"]  # type: ignore[union-attr]


def test_what_the_engine_says_replaces_what_was_guessed() -> None:
    one, _ = endpoint()
    for i in range(SILENT_AFTER + 1):
        one.served(chain(prompt(i, 4)), None, 0.0)
    assert held(one, prompt(SILENT_AFTER, 4)) == 4
    one.apply(EngineBatch(()), 0.0)
    assert one.history is not None, "an empty batch says nothing"
    changes = one.apply(stored(prompt(777, 3)), 0.0)
    assert one.history is None
    assert held(one, prompt(777, 3)) == 3
    assert held(one, prompt(SILENT_AFTER, 4)) == 0
    assert (len(changes.added), len(changes.removed)) == (3, 8)
    assert [event.state for event in news(one)] == ["silent", "restarted"]  # type: ignore[union-attr]
    for i in range(3 * SILENT_AFTER):
        assert (one.served(chain(prompt(i, 4)), None, 0.0), news(one)) == (_nothing(), [])
    one.residency._check()


def test_history_keeps_to_the_engines_capacity_where_it_is_known() -> None:
    one, _ = endpoint()
    one.report = LoadReport(capacity_tokens=6 * BLOCK)
    for i in range(SILENT_AFTER + 5):
        one.served(chain(prompt(i, 4)), None, 0.0)
    assert one.residency.canonical_blocks == 6
    assert held(one, prompt(SILENT_AFTER + 4, 4)) == 4


def silent(one: LocalEndpoint) -> list[str]:
    changes, told = one.go_by_history("events are off: pass --kv-events-config", 0.0), news(one)
    assert not changes.added
    return [event.state for event in told if isinstance(event, ResidencyChanged)]


def test_history_begins_at_the_callers_word_and_is_told_once_with_the_reason() -> None:
    one, _ = endpoint()
    _, told = one.go_by_history("events are off", 0.0), news(one)
    assert told == [ResidencyChanged("a/0", "silent", "events are off")]
    assert one.state == "silent"
    assert silent(one) == []
    assert len(one.served(chain(prompt(1, 4)), None, 0.0).added) == 4, "the first prompt counts already"
    assert held(one, prompt(1, 4)) == 4
    one.apply(stored(prompt(2, 3)), 0.0)
    assert one.state == "exact"
    assert (held(one, prompt(1, 4)), held(one, prompt(2, 3))) == (0, 3)


def test_what_a_past_life_told_is_not_history() -> None:
    one, _ = endpoint()
    one.apply(stored(prompt(1, 4)), 0.0)
    changes, told = one.go_by_history("started without events", 0.0), news(one)
    assert len(changes.removed) == 4
    assert [event.state for event in told if isinstance(event, ResidencyChanged)] == ["silent", "restarted"]
    assert held(one, prompt(1, 4)) == 0


def test_marks_and_clears_are_no_blocks_and_do_not_end_history() -> None:
    one, _ = endpoint()
    silent(one)
    one.served(chain(prompt(1, 4)), None, 0.0)
    one.apply(EngineBatch((StreamGap(0),)), 0.0)
    one.apply(EngineBatch((BlocksCleared("cpu"),)), 0.0)
    assert (one.state, held(one, prompt(1, 4))) == ("silent", 4)
    assert not one.residency.partial, "a gap says nothing of what came from no stream"
    for clear in (BlocksCleared("gpu"), BlocksCleared(None), StreamRestarted()):
        one.apply(EngineBatch((clear,)), 0.0)
        assert (one.state, held(one, prompt(1, 4))) == ("silent", 0)
        one.served(chain(prompt(1, 4)), None, 0.0)
        assert held(one, prompt(1, 4)) == 4, "what was cleared can be held again"
    one.residency._check()


def test_history_learns_the_capacity_from_a_later_probe() -> None:
    one, _ = endpoint()
    silent(one)
    one.served(chain(prompt(1, 40)), None, 0.0)
    one.probed(LoadReport(capacity_tokens=6 * BLOCK), 0.0)
    one.served(chain(prompt(2, 4)), None, 0.0)
    assert one.residency.canonical_blocks == 6


# --- an engine that sleeps, or loses removals -------------------------------------------------------------


def test_an_engine_that_sleeps_holds_nothing_whenever_it_told_of_it() -> None:
    one, _ = endpoint()
    one.apply(stored(prompt(1, 4)), 0.0)
    asleep = LoadReport(refusing=True, reason="asleep", asleep=True)
    assert len(one.probed(asleep, 0.0).removed) == 4
    one.apply(stored(prompt(2, 3)), 0.0)  # a replay of what came before
    assert len(one.probed(asleep, 1.0).removed) == 3
    clears = one.residency.counts.clears
    one.probed(asleep, 2.0)
    assert one.residency.counts.clears == clears
    one.probed(LoadReport(), 3.0)
    one.apply(stored(prompt(1, 4)), 3.0)
    assert held(one, prompt(1, 4)) == 4


def test_a_paused_engine_keeps_its_cache() -> None:
    one, _ = endpoint()
    one.apply(stored(prompt(1, 4)), 0.0)
    one.probed(LoadReport(refusing=True, reason="asleep (paused)"), 0.0)
    assert held(one, prompt(1, 4)) == 4


def test_more_live_blocks_than_the_engine_has_are_told_and_lower_the_confidence() -> None:
    one, _ = endpoint()
    one.probed(LoadReport(capacity_tokens=8 * BLOCK), 0.0)
    _, told = one.apply(stored(prompt(1, 8)), 0.0), news(one)
    assert told == []
    _, told = one.apply(stored(prompt(2, 1)), 0.0), news(one)
    assert [event.state for event in told if isinstance(event, ResidencyChanged)] == ["inflated", "partial"]
    one.advertise(0.0)
    assert one.copy.advert.confidence < 1.0
    one.apply(stored(prompt(3, 1)), 0.0)
    assert news(one) == [], "it is told once"


def _nothing() -> object:
    one, _ = endpoint()
    return one.residency.take_changes()


# --- history by itself -------------------------------------------------------------------------------------


class PlainLru:
    """An LRU of prefixes, touched deepest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[str, tuple[int, ...]], None] = OrderedDict()

    def served(self, namespace: Namespace, tokens: list[int]) -> None:
        depth = min(len(tokens) // BLOCK, self.capacity)
        for d in range(depth, 0, -1):
            self.blocks[namespace.salt, tuple(tokens[: d * BLOCK])] = None
            self.blocks.move_to_end((namespace.salt, tuple(tokens[: d * BLOCK])))
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)

    def keys(self) -> set[int]:
        return {chain(list(tokens), Namespace(salt=salt)).key(len(tokens) // BLOCK) for salt, tokens in self.blocks}


@pytest.mark.parametrize("seed", range(8))
def test_history_is_an_lru_cache_of_what_was_served(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randint(1, 30)
    history, plain, residency = RoutingHistory(capacity), PlainLru(capacity), Residency(DOMAIN)
    trunks = [prompt(i, 12) for i in range(4)]
    for _ in range(150):
        namespace = Namespace(salt=rng.choice(("", "", "tenant")))
        tokens = rng.choice(trunks)[: rng.randint(0, 12) * BLOCK] + prompt(rng.randint(100, 110), rng.randint(0, 5))
        tokens = tokens[: len(tokens) - rng.randint(0, min(5, len(tokens)))]
        plain.served(namespace, tokens)
        residency.apply(history.served(chain(tokens, namespace)))
        assert set(residency.keys()) == plain.keys(), f"seed {seed}"
        assert len(history._blocks) == len(plain.blocks) <= capacity
        residency._check()
    assert residency.counts.unknown_removals == residency.counts.orphans == 0


def test_history_tells_only_what_changed() -> None:
    history = RoutingHistory(8)
    assert history.capacity_blocks == 8
    assert RoutingHistory().capacity_blocks == DEFAULT_CAPACITY_BLOCKS
    (event,) = history.served(chain(prompt(1, 4))).events
    assert isinstance(event, BlocksStored)
    assert len(event.handles) == 4
    assert history.served(chain(prompt(1, 4))).events == ()
    longer = history.served(chain(prompt(1, 4) + prompt(2, 1))).events
    assert [len(event.handles) for event in longer if isinstance(event, BlocksStored)] == [1]
    removed, added = history.served(chain(prompt(3, 6))).events
    assert isinstance(removed, BlocksRemoved)
    assert isinstance(added, BlocksStored)
    assert len(removed.handles) == 3


def test_history_leaves_images_out() -> None:
    history = RoutingHistory()
    assert history.served(chain(prompt(1, 4), contents=(ContentSpan("cat", 3),))).events == ()
    assert len(history._blocks) == 0


# --- answers that refute the guess -----------------------------------------------------------------------------


def reasons(one: LocalEndpoint) -> list[tuple[str, str]]:
    return [(event.state, event.reason) for event in news(one) if isinstance(event, ResidencyChanged)]


@pytest.mark.parametrize("prompts", [1, 4])
def test_an_engine_whose_unit_is_above_every_prompt_is_guessed_to_hold_nothing(prompts: int) -> None:
    one, _ = endpoint()
    for i in range(3 * SILENT_AFTER):
        one.served(chain(prompt(i % prompts, 40)), 0, 0.0)
        assert held(one, prompt(i % prompts, 40)) == 0
    ((state, reason),) = reasons(one)
    assert state == "unused"
    assert "up to 639 tokens" in reason
    assert "hit unit" in reason
    assert "stream" not in reason
    assert one.state == "exact"


def test_the_unit_that_a_probe_told_is_named_and_short_prompts_do_not_blame_the_stream() -> None:
    one, _ = endpoint()
    one.probed(LoadReport(block_tokens=8320), 0.0)
    one.advertise(0.0)
    assert one.copy.advert.hit_unit == 8320
    for i in range(3 * SILENT_AFTER):
        one.served(chain(prompt(i, 40)), None if i % 2 else 0, 0.0)
    ((state, reason),) = reasons(one)
    assert state == "unused"
    assert "8320 tokens" in reason
    for i in range(SILENT_AFTER):
        one.served(chain(prompt(i, 600)), None, 0.0)
    assert [state for state, _ in reasons(one)] == ["silent"], "prompts of more than a unit should have left events"


@pytest.mark.parametrize("asked", [True, False])
def test_a_guess_that_is_refuted_twice_is_given_up_and_taken_up_with_the_next_hit(asked: bool) -> None:
    one, _ = endpoint()
    if asked:
        one.go_by_history("started without events", 0.0)
    for i in range(SILENT_AFTER):
        one.served(chain(prompt(i, 4)), 0, 0.0)
    news(one)
    assert held(one, prompt(SILENT_AFTER - 1, 4)) == 4
    first = SILENT_AFTER - 1
    one.served(chain(prompt(first, 4)), 0, 0.0)
    assert held(one, prompt(first, 4)) == 4, "once may be an eviction"
    one.served(chain(prompt(first, 4)), 0, 0.0)
    assert held(one, prompt(first, 4)) == 0
    assert [state for state, _ in reasons(one)] == ["unused"]
    one.go_by_history("started without events", 0.0)
    one.served(chain(prompt(77, 4)), 0, 0.0)
    one.served(chain(prompt(77, 4)), 0, 0.0)
    assert (held(one, prompt(77, 4)), reasons(one)) == (0, [])
    one.served(chain(prompt(77, 4)), 48, 0.0)
    assert [state for state, _ in reasons(one)] == ["silent"]
    assert held(one, prompt(77, 4)) == 4


def test_an_engine_that_speaks_ends_all_guessing() -> None:
    one, _ = endpoint()
    for _ in range(2 * SILENT_AFTER):
        one.served(chain(prompt(1, 4)), 0, 0.0)
    one.apply(stored(prompt(1, 4)), 0.0)
    assert (one.state, held(one, prompt(1, 4))) == ("exact", 4)
    for _ in range(SILENT_AFTER):
        one.served(chain(prompt(2, 4)), 0, 0.0)
    assert held(one, prompt(2, 4)) == 0
    assert one.state == "exact"
