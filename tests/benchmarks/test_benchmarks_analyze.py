"""The analyser's benchmark, at sizes that say nothing: its logs are as they say, and its bars can be missed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import analyze as bench_analyze
import pytest
from workbench import request_logs
from workbench.bars import Row

from prefixroute.analyze import Collector, Limits, PromptReader
from prefixroute.analyze.sample import Sampled
from prefixroute.analyze.stack import ExactCurve


def test_a_chat_log_has_the_lines_that_it_says_and_conversations_that_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_logs, "BROKEN", 50)
    lines, broken = request_logs.write_chats(tmp_path / "log", 2_000_000)
    log = Collector(PromptReader(), Limits()).read([tmp_path / "log"])
    assert (log.lines, sum(log.bad.values())) == (lines, broken)
    assert broken > 1
    assert 0.3 < log.models["llama-8b"].shared.curve().rates[-1] < 0.95
    report = {"requests": log.requests, "bad": {"count": broken}}
    assert bench_analyze.wrong(report, lines, broken) == 0
    assert bench_analyze.wrong(report, lines + 1, broken) == 1


def test_logs_are_the_same_for_the_same_arguments() -> None:
    for paths in (lambda: request_logs.mixed_paths(50), lambda: request_logs.talk_paths(50)):
        assert [keys.tolist() for keys in paths()] == [keys.tolist() for keys in paths()]


def test_a_curve_that_is_off_is_seen() -> None:
    exact, sampled = ExactCurve(), Sampled(256)
    for i, keys in enumerate(request_logs.talk_paths(200)):
        listed = keys.tolist()
        exact.access(listed, "")
        if i % 2:
            sampled.access(keys, listed, "")
    assert bench_analyze.apart(exact, sampled) > bench_analyze.POINT


def test_a_bar_may_be_a_least_or_a_most() -> None:
    assert [Row("x", 2.0, "s", 1.0).met, Row("x", 2.0, "s", 1.0, least=True).met] == [False, True]


def test_memory_is_of_all_processes() -> None:
    assert bench_analyze.family(os.getpid())[0] == os.getpid()
    assert bench_analyze.proportional_mb(os.getpid()) > 1
    assert bench_analyze.proportional_mb(2**30) == 0.0


def test_the_command_is_run_and_its_report_read(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"prompt": "hi"}) + "\n")
    ran = bench_analyze.analyze(tmp_path / "log.jsonl", "--requests", "0")
    assert ran.report["requests"] == 1
    assert ran.worked_s > 0
    assert ran.memory_mb > 1
