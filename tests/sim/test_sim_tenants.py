"""A greedy tenant beside light ones, in a small fleet: the guard's bars, and that a run is the same from its seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prefixroute import UsageError, cli
from prefixroute.sim.serving import greedy_tenant
from prefixroute.sim.serving.greedy_tenant import GREEDY, Bar, TenantsSettings

SMALL = TenantsSettings(nodes=2, light=3, prefixes=3, greedy=3.0, light_load=0.4, seconds=16.0)


def test_the_guard_holds_its_bars_and_without_it_light_tenants_starve() -> None:
    result = greedy_tenant.run(SMALL, (1, 2), 1)
    assert result["ok"], result["bars"]
    alone, greedy, guarded = result["rows"]
    assert [row["case"] for row in result["rows"]] == ["alone", "greedy", "guarded"]
    assert alone["greedy"]["requests"] == alone["most_held"] == greedy["most_held"] == 0
    assert alone["light"]["requests"] == greedy["light"]["requests"] == guarded["light"]["requests"] > 60
    # The starvation that the guard is against is there without it.
    assert greedy["light"]["p50_s"] > 10 * guarded["light"]["p50_s"]
    assert greedy["light"]["p99_s"] > 4 * guarded["light"]["p99_s"]
    assert guarded["most_held"] > 20
    assert guarded["greedy"]["token_hit"] > 0.8


def test_a_window_as_long_as_the_queue_is_no_guard() -> None:
    settings = replace(SMALL, seconds=8.0)
    alone, guarded = (
        greedy_tenant.run_case(replace(settings, window_s=1000.0), case, 1) for case in ("alone", "guarded")
    )
    assert guarded.most_held == 0
    found, theirs = greedy_tenant.part_of([guarded.light]), greedy_tenant.part_of([alone.light])
    assert found.p99_s > 2 * (theirs.p99_s + settings.full_window_s)
    assert guarded == greedy_tenant.run_case(replace(settings, window_s=1000.0), "guarded", 1)


def test_prompts_of_two_tenants_share_no_key_and_the_greedy_one_is_everywhere() -> None:
    trace = greedy_tenant.trace_of(SMALL, 1)
    roots: dict[int, set[int]] = {}
    for arrival in trace.arrivals:
        roots.setdefault(arrival.topic, set()).add(arrival.prompt.chain.key(0))
    assert sorted(roots) == [0, 1, 2, 3]
    assert len(set.union(*roots.values())) == 4
    assert {arrival.origin for arrival in trace.arrivals if arrival.topic == GREEDY} == {0, 1}
    assert [arrival.at for arrival in trace.arrivals] == sorted(arrival.at for arrival in trace.arrivals)


def test_the_command_writes_json_and_tells_what_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.json"
    small = ["--nodes", "2", "--light", "2", "--greedy", "3", "--seconds", "3", "--seeds", "1", "--workers", "1"]
    code = cli.main(["simulate", "tenants", *small, "--json", str(file)])
    result = json.loads(file.read_text())
    text = capsys.readouterr().out
    assert code == (0 if result["ok"] else 1)
    assert result["seeds"] == [1]
    assert all(bar["what"] in text for bar in result["bars"])
    assert ("MISSED" in text) is not result["ok"]
    assert [Bar("", 1.0, 1.0).ok, Bar("", 1.1, 1.0).ok, Bar("", 1.1, 1.0, True).ok] == [True, False, True]


@pytest.mark.parametrize("settings", [{"light": 0}, {"window_s": 0.0}, {"greedy": 0.0}, {"light_load": 1.0}], ids=str)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        TenantsSettings(**settings)  # type: ignore[arg-type]
    assert cli.main(["simulate", "tenants", "--seeds", "0"]) == 2
