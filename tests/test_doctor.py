"""The doctor finds each planted fault, names what to change, and is silent about a fleet in order."""

from __future__ import annotations

from pathlib import Path

from doctor_fleet import Spoilt, findings_of
from prefixroute_lan4.doctor_findings import FAULT, OK, Finding, failed


def faults(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state == FAULT]


def test_a_fleet_in_order_raises_no_alarm(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, Spoilt())
    assert [finding for finding in findings if finding.state != OK] == []
    checked = {finding.check for finding in findings if finding.node == "node-2"}
    assert checked == {
        *("engine", "prediction", "block size", "salt", "events", "replay"),
        *("clock", "domain", "tokenizer", "model", "udp"),
    }


def only(findings: list[Finding], check: str) -> Finding:
    """The one fault, which is of the second node."""
    found = faults(findings)
    assert [(finding.node, finding.check) for finding in found] == [("node-2", check)], findings
    assert failed(findings)
    return found[0]


def test_another_block_size_is_named_with_both_values(tmp_path: Path) -> None:
    told = only(findings_of(tmp_path, Spoilt(domain={"block_size": 32})), "domain")
    assert told.what == "block_size is '32' here and '16' at node-1"


def test_another_tokenizer_is_found_by_a_text_though_its_name_is_equal(tmp_path: Path) -> None:
    told = only(findings_of(tmp_path, Spoilt(engine={"tokenizer_seed": 7})), "tokenizer")
    assert "from token 0 on" in told.what


def test_prefix_caching_that_is_off_is_told_once(tmp_path: Path) -> None:
    told = only(findings_of(tmp_path, Spoilt(engine={"prefix_caching": False})), "prefix caching")
    assert "--enable-prefix-caching" in told.fix
