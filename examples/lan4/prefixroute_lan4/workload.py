"""The demo's requests: multiple-choice questions, five solved examples before each, skewed over subjects.

Rules:
1. A trace is a pure function of its settings: the same seed gives the same bytes, and every run replays it.
2. All questions of one subject share their header and five examples, word for word; nothing else is shared.
3. Arrivals are open loop (Poisson), each at a node drawn uniformly: clients know nothing about caches.

Shape after MMLU: 57 subjects, prompts of a few hundred to 1,500 tokens, answers of a few tokens. The text is
made up here; `read_mmlu` takes the real CSV files instead (``dev/`` gives the examples, ``test/`` the questions).
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prefixroute.errors import UsageError

_SUBJECT_TEXT = """
    algebra anatomy archaeology architecture astronomy bacteriology banking biology botany calculus chemistry
    cinema civics combinatorics commerce cryptography dentistry drama ecology econometrics economics education
    electronics ethics finance fisheries forestry genetics geography geology geometry grammar history
    horticulture hydrology immunology journalism law linguistics logic management marketing mechanics medicine
    metallurgy meteorology music navigation nutrition optics philosophy physics poetry probability psychology
    sociology statistics
"""
SUBJECTS = tuple(_SUBJECT_TEXT.split())
"""The 57 made-up subjects."""

_WORD_TEXT = """
    about above after again air all also always among and animal answer any area around ask away back base be
    because become before begin below best better between big body book both boy build business but call can
    car care carry case center change child city class clear close cold color come common could country course
    cover cross cut day deep did different do does done door down draw drive dry during each early earth ease
    east eat end enough even ever every example eye face fact fall family far fast father feel few field
    figure fill final find fine fire first fish five fly follow food foot for force form found four free
    friend from full game gave general give go gold good got great green ground group grow had half hand
    happen hard has have he head hear heat help her here high him his hold home horse hot hour house how
    hundred idea if inch interest is island it just keep kind king know land language large last late laugh
    lead learn leave left less let letter life light like line list listen little live long look love low
    machine made make man many map mark mean measure men mile mind minute money moon more morning most mother
    mountain move much music must name near need never new next night no north note nothing notice noun now
    number object ocean of off often old on once one only open or order other our out over own page paper part
    pass pattern people perhaps person picture piece place plain plan plane plant play point port pose
    possible power press problem produce product program pull question quick rain ran reach read ready real
    red remember rest right river road rock room round rule run same saw say school science sea second see
    seem self sentence serve set several shape she ship short should show side simple since sing size sleep
    slow small snow so some song soon sound south space special spell stand star start state stay step still
    stood stop story street strong study such sun sure surface system table tail take talk teach tell ten test
    than that the their them then there these they thing think this those though thought thousand three
    through time to together told too took top toward town travel tree true try turn two under unit until up
    us use usual verb very voice vowel walk want warm was watch water way we week weight well went were west
    what wheel when where which while white who whole why will wind with wonder wood word work world would
    write year yes yet you young your
"""
_WORDS = tuple(_WORD_TEXT.split())
_LETTERS = "ABCD"
_SHOTS = 5
# Measured with the emulator's tokenizer: a word of _WORDS; what stands around a question's words (option letters,
# stops, line ends, "Answer:"); the same with the answer and the empty line after it; the header.
_TOKENS_PER_WORD = 1.07
_QUESTION_FRAME, _SHOT_FRAME, _HEADER_FRAME = 15, 18, 16


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """What a trace is made of.

    `rate` is requests a second over all nodes. Prefix lengths are log-normal with median
    `prefix_median_tokens`, cut to `prefix_tokens`; question tails are uniform in `tail_tokens`.
    """

    requests: int = 800
    nodes: int = 4
    rate: float = 14.0
    seed: int = 1
    zipf: float = 1.1
    answer_tokens: int = 8
    prefix_median_tokens: int = 600
    prefix_sigma: float = 0.45
    prefix_tokens: tuple[int, int] = (250, 1500)
    tail_tokens: tuple[int, int] = (48, 96)

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise UsageError(f"requests must be at least 1, not {self.requests}")
        if self.nodes < 1:
            raise UsageError(f"nodes must be at least 1, not {self.nodes}")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise UsageError(f"rate must be a positive number of requests a second, not {self.rate}")
        if not (self.zipf >= 0 and math.isfinite(self.zipf)):
            raise UsageError(f"the Zipf exponent must be 0 or more, not {self.zipf}")


class QuestionSubject(NamedTuple):
    """A shared prefix, and the questions that may follow it (without end when the text is made up)."""

    name: str
    prefix: str
    questions: Iterator[str]


class DemoRequest(NamedTuple):
    """One request: when it arrives (seconds from the start), at which node (from 0), and what it asks."""

    number: int
    at_s: float
    origin: int
    subject: str
    prompt: str
    answer_tokens: int


class DemoTrace(NamedTuple):
    """All requests of a run, in order of arrival."""

    requests: tuple[DemoRequest, ...]
    subjects: int

    @property
    def duration_s(self) -> float:
        """When the last request arrives."""
        return self.requests[-1].at_s


def make_trace(settings: WorkloadSettings, mmlu: Path | None = None) -> DemoTrace:
    """The trace of `settings`, over made-up subjects or, when `mmlu` is given, over the files of that folder.

    Raises UsageError when the folder does not hold MMLU's CSV files.
    """
    subjects = read_mmlu(mmlu, settings.seed) if mmlu is not None else made_up_subjects(settings)
    rng = random.Random(f"{settings.seed}/trace")
    rng.shuffle(subjects)  # so that popularity does not follow the alphabet
    weights = list(itertools.accumulate((rank + 1) ** -settings.zipf for rank in range(len(subjects))))
    requests, at_s = [], 0.0
    for number in range(settings.requests):
        at_s += rng.expovariate(settings.rate)
        subject = rng.choices(subjects, cum_weights=weights)[0]
        prompt = subject.prefix + next(subject.questions)
        origin = rng.randrange(settings.nodes)
        requests.append(DemoRequest(number, at_s, origin, subject.name, prompt, settings.answer_tokens))
    return DemoTrace(tuple(requests), len(subjects))


# --- made-up text ------------------------------------------------------------------------------------------


def made_up_subjects(settings: WorkloadSettings) -> list[QuestionSubject]:
    """The 57 subjects with made-up examples and questions without end."""
    return [_made_up_subject(name, settings) for name in SUBJECTS]


def _made_up_subject(name: str, settings: WorkloadSettings) -> QuestionSubject:
    rng = random.Random(f"{settings.seed}/{name}")
    shortest, longest = settings.prefix_tokens
    drawn = rng.lognormvariate(math.log(settings.prefix_median_tokens), settings.prefix_sigma)
    tokens = min(max(drawn, shortest), longest)
    shot_tokens = (tokens - _HEADER_FRAME) / _SHOTS - _SHOT_FRAME
    shots = [_question(rng, shot_tokens) + f" {rng.choice(_LETTERS)}\n\n" for _ in range(_SHOTS)]
    return QuestionSubject(name, header(name) + "".join(shots), _made_up_questions(rng, settings.tail_tokens))


def _made_up_questions(rng: random.Random, tail_tokens: tuple[int, int]) -> Iterator[str]:
    while True:
        yield _question(rng, rng.randint(*tail_tokens) - _QUESTION_FRAME)


def _question(rng: random.Random, word_tokens: float) -> str:
    """A question whose words take about `word_tokens` tokens, half of them in its four options."""
    words = round(word_tokens / _TOKENS_PER_WORD)
    option_words = max(1, words // 8)
    stem = rng.choices(_WORDS, k=max(1, words - 4 * option_words))
    options = [" ".join(rng.choices(_WORDS, k=option_words)) for _ in _LETTERS]
    return format_question(" ".join(stem), options)


def header(subject: str) -> str:
    """The first line of every prompt of a subject."""
    return f"Here are multiple choice questions on {subject}, each followed by its answer.\n\n"


def format_question(stem: str, options: Sequence[str]) -> str:
    """A question as the model sees it, up to and including ``Answer:``."""
    lines = [
        stem,
        *(f"{letter}. {option}" for letter, option in zip(_LETTERS, options, strict=False)),
        "Answer:",
    ]
    return "\n".join(lines)


# --- the real files ----------------------------------------------------------------------------------------


def read_mmlu(folder: Path, seed: int) -> list[QuestionSubject]:
    """The subjects of an MMLU folder: ``dev/NAME_dev.csv`` (examples) and ``test/NAME_test.csv`` (questions).

    Rows are question, four options, answer (a letter, or 0 to 3); a heading row is allowed. Questions come in
    an order drawn from `seed`, and begin again when they run out. Raises UsageError naming what is missing.
    """
    dev_files = sorted((folder / "dev").glob("*_dev.csv"))
    if not dev_files:
        raise UsageError(f"{folder} holds no dev/*_dev.csv; pass the folder that holds MMLU's dev/ and test/")
    return [_mmlu_subject(folder, path, seed) for path in dev_files]


def _mmlu_subject(folder: Path, dev_file: Path, seed: int) -> QuestionSubject:
    name = dev_file.name.removesuffix("_dev.csv")
    test_file = folder / "test" / f"{name}_test.csv"
    if not test_file.is_file():
        raise UsageError(f"{test_file} is missing; every dev file needs its test file")
    shots = _mmlu_rows(dev_file)[:_SHOTS]
    questions = [format_question(row.stem, row.options) for row in _mmlu_rows(test_file)]
    random.Random(f"{seed}/{name}").shuffle(questions)
    title = name.replace("_", " ")
    solved = "".join(f"{format_question(row.stem, row.options)} {row.answer}\n\n" for row in shots)
    return QuestionSubject(title, header(title) + solved, itertools.cycle(questions))


class _Row(NamedTuple):
    stem: str
    options: Sequence[str]
    answer: str


def _mmlu_rows(path: Path) -> list[_Row]:
    """All rows of a file, none of them empty; UsageError with the line when one is malformed."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            rows = [_mmlu_row(cells, path, reader.line_num) for cells in reader if cells and not _is_heading(cells)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not rows:
        raise UsageError(f"{path} holds no questions")
    return rows


def _is_heading(cells: Sequence[str]) -> bool:
    return cells[0] == "question" and cells[-1] == "answer"


def _mmlu_row(cells: Sequence[str], path: Path, line: int) -> _Row:
    answer = cells[-1].strip()
    if answer in ("0", "1", "2", "3"):
        answer = _LETTERS[int(answer)]
    if len(cells) != 6 or answer not in tuple(_LETTERS):
        raise UsageError(f"{path}, line {line}: expected question, four options and an answer (A to D, or 0 to 3)")
    return _Row(cells[0], cells[1:5], answer)
