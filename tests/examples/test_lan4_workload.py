"""The demo's trace: deterministic, shaped as promised, and read from real files when asked."""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
from prefixroute_lan4.workload import (
    SUBJECTS,
    DemoTrace,
    WorkloadSettings,
    format_question,
    made_up_subjects,
    make_trace,
    read_mmlu,
)

from prefixroute.emulator.tokenizer import encode
from prefixroute.errors import UsageError

SETTINGS = WorkloadSettings(requests=400, seed=7)


@pytest.fixture(scope="module")
def trace() -> DemoTrace:
    return make_trace(SETTINGS)


def test_same_settings_give_the_same_trace(trace: DemoTrace) -> None:
    assert make_trace(SETTINGS) == trace


def test_another_seed_gives_other_prompts_times_and_origins(trace: DemoTrace) -> None:
    other = make_trace(WorkloadSettings(requests=400, seed=8))
    pairs = list(zip(trace.requests, other.requests, strict=True))
    assert all(mine.prompt != theirs.prompt for mine, theirs in pairs)
    assert [mine.at_s for mine, _ in pairs] != [theirs.at_s for _, theirs in pairs]
    assert [mine.origin for mine, _ in pairs] != [theirs.origin for _, theirs in pairs]


def test_a_longer_trace_begins_with_the_shorter_one(trace: DemoTrace) -> None:
    longer = make_trace(WorkloadSettings(requests=500, seed=7))
    assert longer.requests[:400] == trace.requests


def test_there_are_57_subjects_with_prefixes_of_their_own() -> None:
    subjects = made_up_subjects(SETTINGS)
    assert len(subjects) == len(SUBJECTS) == len(set(SUBJECTS)) == 57
    assert len({subject.prefix for subject in subjects}) == 57


def test_prefix_lengths_in_tokens_follow_the_settings() -> None:
    lengths = sorted(len(encode(subject.prefix)) for subject in made_up_subjects(SETTINGS))
    shortest, longest = SETTINGS.prefix_tokens
    assert lengths[0] >= 0.95 * shortest
    assert lengths[-1] <= 1.05 * longest
    assert 0.8 * SETTINGS.prefix_median_tokens <= lengths[len(lengths) // 2] <= 1.25 * SETTINGS.prefix_median_tokens
    assert lengths[-1] > 2 * lengths[0]


def test_prompts_of_a_subject_share_its_prefix_and_differ_in_their_tail(trace: DemoTrace) -> None:
    prefixes = {subject.name: subject.prefix for subject in made_up_subjects(SETTINGS)}
    assert all(request.prompt.startswith(prefixes[request.subject]) for request in trace.requests)
    tails = [request.prompt.removeprefix(prefixes[request.subject]) for request in trace.requests]
    assert len(set(tails)) == len(tails)
    assert all(tail.endswith("Answer:") for tail in tails)
    shortest, longest = SETTINGS.tail_tokens
    assert all(0.9 * shortest <= len(encode(tail)) <= 1.15 * longest for tail in tails)


def test_five_solved_examples_come_before_the_question(trace: DemoTrace) -> None:
    prompt = trace.requests[0].prompt
    assert prompt.count("Answer: ") == 5
    assert prompt.count("Answer:") == 6


def test_popularity_is_skewed_as_the_exponent_says() -> None:
    requests = 3000
    skewed = Counter(r.subject for r in make_trace(WorkloadSettings(requests=requests, zipf=1.1)).requests)
    flat = Counter(r.subject for r in make_trace(WorkloadSettings(requests=requests, zipf=0.0)).requests)
    expected = 1 / sum(rank**-1.1 for rank in range(1, 58))
    share = max(skewed.values()) / requests
    # six standard deviations of a binomial share
    assert abs(share - expected) < 6 * math.sqrt(expected * (1 - expected) / requests)
    assert max(flat.values()) < 3 * requests / 57


def test_the_most_popular_subject_depends_on_the_seed() -> None:
    favourites = {
        Counter(r.subject for r in make_trace(WorkloadSettings(requests=200, seed=seed)).requests).most_common(1)[0][0]
        for seed in range(6)
    }
    assert len(favourites) > 1


def test_arrivals_are_ordered_and_as_dense_as_the_rate(trace: DemoTrace) -> None:
    times = [request.at_s for request in trace.requests]
    assert all(earlier < later for earlier, later in itertools.pairwise(times))
    # the sum of n exponential gaps has a relative deviation of n ** -0.5
    assert abs(trace.duration_s * SETTINGS.rate / 400 - 1) < 6 / math.sqrt(400)


def test_every_node_is_an_origin_about_equally_often(trace: DemoTrace) -> None:
    origins = Counter(request.origin for request in trace.requests)
    assert sorted(origins) == [0, 1, 2, 3]
    assert min(origins.values()) > 60


@pytest.mark.parametrize(
    ("field", "value"),
    [("requests", 0), ("nodes", 0), ("rate", 0.0), ("rate", math.nan), ("rate", math.inf), ("zipf", -1.0)],
)
def test_impossible_settings_are_refused_by_name(field: str, value: float) -> None:
    word = "exponent" if field == "zipf" else field
    with pytest.raises(UsageError, match=word):
        WorkloadSettings(**{field: value})  # type: ignore[arg-type]


# --- MMLU's files ------------------------------------------------------------------------------------------

HEADING = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]


def write_csv(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


@pytest.fixture
def mmlu(tmp_path: Path) -> Path:
    """Two subjects: one with a heading and numbers as answers, one without and with letters."""
    shots = [[f"shot {n}, with a comma", "a", "b", "c", "d", str(n % 4)] for n in range(6)]
    write_csv(tmp_path / "dev" / "small_talk_dev.csv", [HEADING, *shots])
    tests = [[f'ask "{n}"\non two lines', "w", "x", "y", "z", "0"] for n in range(3)]
    write_csv(tmp_path / "test" / "small_talk_test.csv", [HEADING, *tests])
    write_csv(tmp_path / "dev" / "tea_dev.csv", [[f"tea {n}", "1", "2", "3", "4", "D"] for n in range(5)])
    write_csv(tmp_path / "test" / "tea_test.csv", [["more tea", "1", "2", "3", "4", "A"]])
    return tmp_path


def test_mmlu_files_give_five_solved_examples_and_their_questions(mmlu: Path) -> None:
    talk, tea = read_mmlu(mmlu, seed=1)
    assert (talk.name, tea.name) == ("small talk", "tea")
    assert talk.prefix.count("Answer:") == 5
    assert "shot 5" not in talk.prefix
    assert "shot 1, with a comma\nA. a\nB. b\nC. c\nD. d\nAnswer: B\n\n" in talk.prefix
    assert "Answer: D\n\n" in tea.prefix
    expected = {format_question(f'ask "{n}"\non two lines', ["w", "x", "y", "z"]) for n in range(3)}
    assert {next(talk.questions) for _ in range(3)} == expected


def test_mmlu_questions_begin_again_when_they_run_out(mmlu: Path) -> None:
    tea = read_mmlu(mmlu, seed=1)[1]
    assert next(tea.questions) == next(tea.questions)


def test_a_trace_over_mmlu_files_is_deterministic(mmlu: Path) -> None:
    settings = WorkloadSettings(requests=20)
    trace = make_trace(settings, mmlu)
    assert trace == make_trace(settings, mmlu)
    assert trace.subjects == 2
    assert {request.subject for request in trace.requests} == {"small talk", "tea"}


def test_a_folder_without_mmlu_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dev/\*_dev\.csv"):
        make_trace(SETTINGS, tmp_path)


def test_a_missing_test_file_is_named(mmlu: Path) -> None:
    (mmlu / "test" / "tea_test.csv").unlink()
    with pytest.raises(UsageError, match=r"tea_test\.csv is missing"):
        read_mmlu(mmlu, seed=1)


@pytest.mark.parametrize(
    "row",
    [["too", "short"], ["q", "a", "b", "c", "d", "E"], ["q", "a", "b", "c", "d", ""], ["q", "a", "b", "c", "d", "AB"]],
)
def test_a_malformed_row_is_named_with_its_line(mmlu: Path, row: list[str]) -> None:
    write_csv(mmlu / "test" / "tea_test.csv", [["fine", "1", "2", "3", "4", "A"], row])
    with pytest.raises(UsageError, match=r"tea_test\.csv, line 2"):
        read_mmlu(mmlu, seed=1)


def test_files_that_hold_nothing_or_no_text_are_refused(mmlu: Path) -> None:
    (mmlu / "dev" / "tea_dev.csv").write_text("")
    with pytest.raises(UsageError, match="no questions"):
        read_mmlu(mmlu, seed=1)
    (mmlu / "dev" / "tea_dev.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        read_mmlu(mmlu, seed=1)
