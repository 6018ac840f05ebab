"""The doctor finds each planted fault, names what to change, and is silent about a fleet in order."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
from doctor_fleet import PATIENCE_S, Fleet, Spoilt, findings_of, fleet
from msgspec import structs
from prefixroute_serving.attach import EngineConfig
from prefixroute_serving.doctor.engine_checks import EngineFacts, check_engine, check_events, read_facts
from prefixroute_serving.doctor.examination import check_packages, examine
from prefixroute_serving.doctor.findings import FAULT, OK, WARNING, Asker, Finding, HttpAnswer, Visit, failed
from prefixroute_serving.doctor.hit_checks import ServedProbe, check_tokens, judge_hits, judge_stream
from prefixroute_serving.doctor.listen import Listener
from prefixroute_serving.doctor.peer_checks import check_tenancy, check_zones
from prefixroute_serving.introspection import Echo, WallClock
from prefixroute_serving.sidecar_config import (
    DomainConfig,
    HostPort,
    SidecarConfig,
    TenantsConfig,
    ZoneRuleConfig,
    dump_config,
)
from prefixroute_zmq import EventSource
from sidecar_pair import MODEL, udp_port

from prefixroute import BlocksStored, Domain, EngineBatch
from prefixroute.aio import UdpTransport
from prefixroute.cli import main


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


def test_events_that_are_off(tmp_path: Path) -> None:
    told = only(findings_of(tmp_path, Spoilt(events={"enable_kv_cache_events": False})), "events")
    assert told.what == "the engine publishes no KV-cache events"
    assert "--kv-events-config" in told.fix


def test_an_endpoint_to_which_both_sides_connect(tmp_path: Path) -> None:
    port = udp_port()
    spoilt = Spoilt(events={"endpoint": f"tcp://127.0.0.1:{port}"}, sidecar={"events": f"tcp://*:{port}"}, deaf=True)
    found = {finding.check: finding for finding in faults(findings_of(tmp_path, spoilt))}
    assert {finding.node for finding in found.values()} == {"node-2"}
    assert found["events"].what.startswith("both sides connect")
    assert "prediction" in found


def test_an_engine_that_connects_to_what_the_sidecar_binds_is_in_order(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{udp_port()}"
    spoilt = Spoilt(events={"endpoint": endpoint}, sidecar={"events": endpoint, "replay": f"ipc://{tmp_path}/node-2r"})
    findings = findings_of(tmp_path, spoilt)
    assert [finding for finding in findings if finding.state != OK] == []
    # The sidecar has the live socket: what the probe stored was replayed.
    assert ("node-2", "block size") in {(finding.node, finding.check) for finding in findings}


def test_replay_that_the_engine_has_not(tmp_path: Path) -> None:
    told = only(findings_of(tmp_path, Spoilt(events={"replay_endpoint": None})), "replay")
    assert told.what.startswith("the engine has no replay endpoint")
    assert "replay_endpoint" in told.fix


def test_replay_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    told = only(findings_of(tmp_path, Spoilt(sidecar={"events": f"ipc://{tmp_path}/node-2e"})), "replay")
    assert told.fix == f"set engine.replay to ipc://{tmp_path}/node-2r"


def test_another_secret_is_found_though_nobody_tells_his(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, Spoilt(domain={"secret": "another one"}))
    assert only(findings, "secret").what == "the secret differs from node-1's"
    assert "another one" not in str(findings)


def test_another_revision_of_the_model_is_found_by_its_answers(tmp_path: Path) -> None:
    told = only(findings_of(tmp_path, Spoilt(engine={"weights_seed": 1})), "model")
    assert told.what == "0 of 4 greedy answers are node-1's"
    assert "--revision" in told.fix


def test_another_revision_is_found_by_its_name_where_answers_are_alike(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, Spoilt(domain={"revision": "b2"}))
    told = only(findings, "domain")
    assert told.what == f"model is '{MODEL}@b2' here and '{MODEL}' at node-1"
    assert "domain.revision" in told.fix
    assert [finding.state for finding in findings if finding.check == "model"] == [OK], "asked by the engine's own name"


def test_requests_that_somebody_salts_behind_the_sidecar(tmp_path: Path) -> None:
    def salted(body: dict[str, Any]) -> dict[str, Any]:
        return {"cache_salt": "tenant", **body}

    found = {finding.check: finding for finding in faults(findings_of(tmp_path, Spoilt(body=salted)))}
    assert {finding.node for finding in found.values()} == {"node-2"}
    assert found.keys() == {"salt", "prediction"}
    assert "sent without a salt" in found["salt"].what


def test_a_salt_that_somebody_drops_behind_the_sidecar(tmp_path: Path) -> None:
    def plain(body: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in body.items() if name != "cache_salt"}

    told = only(findings_of(tmp_path, Spoilt(body=plain)), "salt")
    assert "tenants share a cache" in told.what


def test_tenants_that_are_told_apart_raise_no_alarm_and_a_dropped_salt_does(tmp_path: Path) -> None:
    def plain(body: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in body.items() if name != "cache_salt"}

    tenants = TenantsConfig(header="x-tenant", required=True)
    findings = findings_of(tmp_path, Spoilt(tenants=tenants))
    assert [finding for finding in findings if finding.state != OK] == []
    assert "another tenant shares nothing" in str(findings)
    found = faults(findings_of(tmp_path, Spoilt(tenants=tenants, body=plain)))
    assert {finding.node for finding in found} == {"node-2"}
    assert any("tenants share a cache" in f"{finding.what}{finding.fix}" for finding in found), found


def test_tenants_that_differ_between_nodes_are_found() -> None:
    def visit(node: str, tenants: TenantsConfig | None) -> Visit:
        place = HostPort(port=1)
        config = SidecarConfig(
            node=node,
            http=place,
            gossip=place,
            engine=EngineConfig(url="http://e"),
            domain=DomainConfig(model="m", tokenizer="t", secret="s"),
            tenants=tenants,
        )
        return Visit(node, "http://n", config, {}, {})

    def differing(one: TenantsConfig | None, two: TenantsConfig | None) -> list[tuple[str, str]]:
        return [(found.state, found.what) for found in check_tenancy(visit("a", one), [visit("b", two)])]

    plain = TenantsConfig(header="x-tenant", groups={"g": ("x", "y")})
    assert differing(plain, TenantsConfig(header="X-Tenant", groups={"g": ("y", "x")}, window_s=1)) == [
        (OK, "told apart as at a")
    ]
    assert differing(plain, TenantsConfig(header="x-tenant", required=True)) == [
        (FAULT, "tenants differ from a's in groups, required")
    ]
    for pair in ((plain, None), (None, plain)):
        assert [state for state, _ in differing(*pair)] == [FAULT]
    assert differing(None, None) == check_tenancy(visit("a", plain), [visit("b", None)._replace(config=None)])[1:] == []


def test_rules_between_zones_that_do_not_say_what_they_seem_to_are_warned_of() -> None:
    def visit(node: str, forward: str, zones: dict[str, str], to: str = "cn") -> Visit:
        place = HostPort(port=1)
        config = SidecarConfig(
            node=node,
            http=place,
            gossip=place,
            engine=EngineConfig(url="http://e"),
            domain=DomainConfig(model="m", tokenizer="t"),
            zone="eu",
            zones=(ZoneRuleConfig(source="*", to=to, forward=forward),),
        )
        rows = [{"endpoint": f"{name}/0", "local": name == node, "zone": zone} for name, zone in zones.items()]
        return Visit(node, "http://n", config, {}, {"state": {"endpoints": rows}})

    def told(*visits: Visit) -> list[tuple[str, str, str]]:
        return [(found.node, found.state, found.what) for found in check_zones(visits)]

    known, unknown = {"a": "", "b": "eu"}, {"a": "eu", "b": ""}
    assert told(visit("a", "never", known)) == [("a", OK, "zone eu, rules: 1")]
    assert told(visit("a", "never", unknown)) == [("a", WARNING, "no zone is known of b, and a rule says never")]
    assert told(visit("a", "always", unknown)) == [("a", OK, "zone eu, rules: 1")]
    both = told(visit("a", "never", known), visit("b", "never", known, "us"))
    assert both[1:] == [
        ("b", WARNING, "its rules between zones are not a's"),
        ("b", WARNING, "no zone is known of a, and a rule says never"),
    ]
    bare = SidecarConfig(
        node="c",
        http=HostPort(port=1),
        gossip=HostPort(port=1),
        engine=EngineConfig(url="http://e"),
        domain=DomainConfig(model="m", tokenizer="t"),
    )
    assert told(Visit("c", "http://n", bare, {}, {})) == []


def test_a_path_too_narrow_for_gossip(tmp_path: Path) -> None:
    found = faults(findings_of(tmp_path, Spoilt(mtu=600)))
    assert {finding.check for finding in found} == {"udp"}
    passes = int(found[0].what.split("up to ")[1].split()[0])
    assert 584 <= passes <= 600
    assert all("raise the MTU" in finding.fix for finding in found)


def test_a_port_that_nothing_passes(tmp_path: Path) -> None:
    found = faults(findings_of(tmp_path, Spoilt(mtu=0)))
    assert {(finding.check, finding.what.split(" came")[0]) for finding in found} == {("udp", "no datagram of 10")}


# --- what else it sees ---------------------------------------------------------------------------------------


def examined(folder: Path, work: Callable[[Fleet], Coroutine[Any, Any, list[Finding]]], **spoilt: Any) -> list[Finding]:
    async def main() -> list[Finding]:
        async with fleet(folder, Spoilt(**spoilt)) as nodes:
            return await work(nodes)

    return asyncio.run(main())


def test_a_peer_whose_configuration_is_not_given_is_examined_as_far_as_it_tells(tmp_path: Path) -> None:
    findings = examined(tmp_path, lambda nodes: nodes.examined(nodes.one))
    assert [finding for finding in findings if finding.state != OK] == []
    assert {finding.check for finding in findings if finding.node == "node-2"} == {
        *("clock", "domain", "tokenizer", "model")
    }


def test_a_peer_that_refuses_us_cannot_be_found_without_its_configuration(tmp_path: Path) -> None:
    found = faults(examined(tmp_path, lambda nodes: nodes.examined(nodes.one), domain={"secret": "another one"}))
    assert [(finding.node, finding.check) for finding in found] == [("node-1", "peer")]
    assert found[0].what == "node-2 has not been heard of"


def test_a_file_that_changed_after_the_sidecar_had_read_it(tmp_path: Path) -> None:
    async def work(nodes: Fleet) -> list[Finding]:
        config = nodes.two.config
        changed = structs.replace(config, domain=structs.replace(config.domain, block_size=32, secret="new"))
        return await examine([nodes.one.config, changed], nodes.client, PATIENCE_S)

    told = only(examined(tmp_path, work), "domain")
    assert told.what.startswith("the running sidecar has another block_size, secret than")


def test_a_step_of_the_clock_is_told_and_is_no_fault(tmp_path: Path) -> None:
    async def work(nodes: Fleet) -> list[Finding]:
        wall = [0.0]
        nodes.two.site.wall_clock = WallClock(lambda: wall[0], lambda: 0.0)
        wall[0] = -7.5
        return await nodes.examined()

    findings = examined(tmp_path, work)
    told = [finding for finding in findings if finding.state != OK]
    assert [(finding.state, finding.node, finding.check) for finding in told] == [(WARNING, "node-2", "clock")]
    assert "-7.5 s" in told[0].what
    assert not failed(findings)


def test_pages_of_the_doctor_refuse_what_makes_no_sense(tmp_path: Path) -> None:
    async def work(nodes: Fleet) -> list[Finding]:
        url = nodes.one.config.public_url

        async def status(query: str) -> int:
            return (await nodes.client.get(f"{url}/prefixroute/{query}")).status_code

        for query in ("domain", "domain?challenge=", "domain?challenge=xyz", f"domain?challenge={'00' * 65}"):
            assert await status(query) == 400
        assert await status("udp?peer=nobody&bytes=64&count=1&patience_s=1") == 404
        for query in ("bytes=63", "bytes=9001", "count=0", "count=101", "patience_s=0", "patience_s=x", "bytes="):
            name = query.partition("=")[0]
            given = {"bytes": "64", "count": "1", "patience_s": "0.1"}
            given.pop(name)
            rest = "&".join(f"{key}={value}" for key, value in given.items())
            assert await status(f"udp?peer=node-2&{rest}&{query}") == 400
        told = (await nodes.client.get(f"{url}/prefixroute/domain?challenge=00")).text
        assert "one secret" not in told
        return []

    examined(tmp_path, work)


def test_probes_of_another_secret_get_no_echo_and_reach_no_node(tmp_path: Path) -> None:
    async def work(nodes: Fleet) -> list[Finding]:
        domain = Domain("m", "emulator", secret=b"a guess")
        stranger = Echo(await UdpTransport.open(), (domain.secret,))
        try:
            carried = await stranger.probe(("127.0.0.1", nodes.two.config.gossip.port), 100, 2, 0.05)
        finally:
            await stranger.close()
        assert carried.answered == 0
        assert not [name for name in nodes.two.node.counters if name.startswith("rejected")]
        return []

    examined(tmp_path, work)


# --- the command -------------------------------------------------------------------------------------------


def dead_config(folder: Path) -> Path:
    port = udp_port()  # nobody listens there over tcp
    engine = EngineConfig(url=f"http://127.0.0.1:{port}")
    domain = DomainConfig(model="m", tokenizer="t")
    path = folder / "node.json"
    dump_config(
        SidecarConfig(node="n", http=HostPort(port=port), gossip=HostPort(port=1), engine=engine, domain=domain), path
    )
    return path


def test_the_command_prints_a_line_a_finding_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(dead_config(tmp_path))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok       here  packages: prefixroute ")
    assert [line.split(":")[0] for line in lines[1:3]] == ["fault    n  engine", "fault    n  sidecar"]
    assert lines[3] == "2 fault, 0 warning, 1 ok"


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(dead_config(tmp_path))]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False
    assert [finding["check"] for finding in told["findings"]] == ["packages", "engine", "sidecar"]
    assert set(told["findings"][0]) == {"state", "node", "check", "what", "fix"}


def test_a_missing_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prefixroute_serving.doctor.examination", None)
    assert main(["doctor", str(dead_config(tmp_path))]) == 2
    assert "pip install 'prefixroute[demo]'" in capsys.readouterr().err


def test_what_the_command_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(dead_config(tmp_path))
    for arguments, why in (
        (["/nowhere.json"], "cannot read /nowhere.json"),
        ([path, path], "two of the configurations are of one node"),
        ([path, "--patience", "0"], "at most 10 seconds"),
        ([path, "--patience", "x"], "invalid _seconds value"),
    ):
        assert main(["doctor", *arguments]) == 2
        assert why in capsys.readouterr().err


# --- judgements that no fleet is needed for -------------------------------------------------------------------


TOKENS = list(range(100, 164))
GOOD = BlocksStored((1, 2, 3, 4), None, TOKENS, 16)


@pytest.mark.parametrize(
    ("event", "check", "what"),
    [
        (GOOD, "block size", "events, blocks and hashes agree"),
        (replace(GOOD, block_size=24), "block size", "events tell blocks of 24 tokens, the engine's own figure is 16"),
        (replace(GOOD, handles=(1, 2, 3)), "block size", "3 hashes of 16 tokens come with 64 tokens"),
        (replace(GOOD, handles=(1, 2, 2, 4)), "hashes", "different blocks have one hash"),
        (replace(GOOD, tokens=TOKENS[1:]), "tokenizer", "the engine stores other tokens than its POST /tokenize tells"),
        (None, "events", "no event came of a prompt that the engine cached"),
    ],
)
def test_a_stream_is_judged_by_what_it_tells_of_the_probe(event: BlocksStored | None, check: str, what: str) -> None:
    listener = Listener()
    listener.take(EngineBatch((event,) if event else ()))
    heard = bool(listener.stored(TOKENS))
    found = judge_stream("n", EngineFacts(True, block_size=16), listener, TOKENS, heard)
    assert (found[0].check, found[0].what) == (check, what)
    assert failed(found) == (event is not GOOD)


@pytest.mark.parametrize(
    ("stored", "first"),
    [
        ([0, 128803, *TOKENS], "at position 0 the engine stores token 0, where /tokenize has 100"),
        (TOKENS[1:], "at position 0 the engine stores token 101, where /tokenize has 100"),
        ([*TOKENS[:37], 7, *TOKENS[38:]], "at position 37 the engine stores token 7, where /tokenize has 137"),
    ],
)
def test_the_first_token_that_differs_is_named(stored: list[int], first: str) -> None:
    listener = Listener()
    other = BlocksStored((9,), None, list(range(900, 916)), 16)
    listener.take(EngineBatch((other, replace(GOOD, tokens=stored), other)))
    found = judge_stream("n", EngineFacts(True, block_size=16), listener, TOKENS, False)
    assert [finding.check for finding in found] == ["tokenizer", "tokens"]
    assert found[1].what.endswith(first)


def test_what_a_node_has_found_of_its_engine_is_a_finding() -> None:
    differs = {"position": 0, "ours": 5, "theirs": 128803}
    rows = [{"endpoint": "n/0", "differs": differs}, {"endpoint": "n/1", "differs": None}, "rubbish"]
    (found,) = check_tokens(Visit("n", "http://n", None, {}, {"state": {"endpoints": rows}}))
    assert found.state == FAULT
    assert "at position 0 the engine of n/0 stores token 128803, where the node has 5" in found.what
    assert check_tokens(Visit("n", "http://n", None, {}, {})) == []


@pytest.mark.parametrize(
    ("told", "predicted", "state", "check"),
    [
        (64, 64, OK, "prediction"),
        (64, 48, OK, "prediction"),
        (64, 32, FAULT, "prediction"),
        (64, None, FAULT, "prediction"),
        (None, 64, WARNING, "prediction"),
        (0, 0, FAULT, "prefix caching"),
    ],
)
def test_hits_are_judged_by_what_was_predicted(told: int | None, predicted: int | None, state: str, check: str) -> None:
    served = ServedProbe(HttpAnswer(200, {}, {}), predicted, told)
    (found,) = judge_hits("n", EngineConfig(url="http://e"), EngineFacts(True), served, 16)
    assert (found.state, found.check) == (state, check)


def test_an_engine_that_says_it_keeps_prefixes_may_have_evicted_the_probe() -> None:
    served = ServedProbe(HttpAnswer(200, {}, {}), 0, 0)
    facts = EngineFacts(True, prefix_caching=True)
    (found,) = judge_hits("n", EngineConfig(url="http://e"), facts, served, 16)
    assert found.state == WARNING


def test_larger_blocks_may_be_those_of_a_hybrid_model_and_its_windows_are_not_judged() -> None:
    listener = Listener()
    listener.take(
        EngineBatch((BlocksStored((1, 2), None, TOKENS, 32), replace(GOOD, handles=(1,), group_kind="mamba")))
    )
    found = judge_stream("n", EngineFacts(True, block_size=16), listener, TOKENS, True)
    assert [(finding.state, finding.check) for finding in found] == [(WARNING, "block size")]


def sglang_answers(request: httpx.Request) -> httpx.Response:
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5657, "topic": "kv", "dp_size": 1}
    told = {"version": "0.5.23", "page_size": 8, "disable_radix_cache": True, "kv_events": events}
    pages = {"/health": {}, "/server_info": told, "/v1/models": {"data": [{"max_model_len": 900}]}}
    body = pages.get(request.url.path)
    return httpx.Response(404) if body is None else httpx.Response(200, json=body)


def test_what_sglang_tells_of_itself() -> None:
    async def read() -> EngineFacts:
        async with httpx.AsyncClient(transport=httpx.MockTransport(sglang_answers)) as client:
            return await read_facts(Asker(client, 1.0), config)

    config = EngineConfig(url="http://e:1", kind="sglang")
    facts = asyncio.run(read())
    assert facts[:5] == (True, "0.5.23", 8, False, 900)
    assert facts.sources is not None
    assert facts.sources[0].endpoint == "tcp://*:5657"
    found = check_engine("n", config, facts)
    assert [(finding.state, finding.check) for finding in found] == [(OK, "engine"), (FAULT, "prefix caching")]
    assert "--disable-radix-cache" in found[1].fix


@pytest.mark.parametrize(
    ("config", "source", "stream", "what"),
    [
        ({}, None, {}, "the engine does not tell where it publishes, and the configuration does not either"),
        ({"events": "tcp://*:7"}, "tcp://*:8", {}, "the engine publishes at tcp://e:8, the sidecar looks at tcp://e:7"),
        ({"events": "tcp://h:7"}, "tcp://*:7", {}, "both sides bind: the engine tcp://*:7, the sidecar tcp://h:7"),
        ({"events": "tcp://*:7"}, None, {}, "nobody is at the other end of tcp://e:7"),
        ({"events": "tcp://h:7"}, None, {}, "nobody is at the other end of tcp://h:7, which the sidecar binds"),
        ({"events": "tap:///t"}, None, {}, "nobody serves tap:///t"),
        ({"events": "tcp://*:7"}, "tcp://*:7", None, "the sidecar does not follow rank 0, tcp://*:7"),
    ],
)
def test_where_events_get_lost(config: dict[str, str], source: str | None, stream: Any, what: str) -> None:
    sources = None if source is None else {0: EventSource(source, "tcp://*:9", host="e")}
    facts = EngineFacts(True, sources=sources)
    streams = {} if stream is None else {"0": stream}
    found = check_events("n", EngineConfig(url="http://e:1", **config), facts, streams)
    assert faults(found)[0].what == what
    assert found[0].fix


def test_topics_decoding_and_replays_that_fail() -> None:
    facts = EngineFacts(True, sources={0: EventSource("tcp://*:7", "tcp://*:9", "kv", host="e")})
    config = EngineConfig(url="http://e:1", events="tcp://*:7", replay="tcp://*:9", topic="other")
    stream = {"connected": True, "decode_errors": {"frames": 2}, "replay_timeouts": 3, "replays": 4}
    checks = [finding.check for finding in faults(check_events("n", config, facts, {"0": stream}))]
    assert checks == ["events", "events", "replay"]


def test_versions_that_are_too_old_or_not_told() -> None:
    config = EngineConfig(url="http://e")
    for version, state in (("0.8.5", FAULT), ("", WARNING), ("0.9.0", OK), ("1.0", OK)):
        assert check_engine("n", config, EngineFacts(True, version))[0].state == state


def test_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "httpx" else "99")
    (found,) = check_packages()
    assert found.state == FAULT
    assert found.what.startswith("httpx 0.1 < ")


def test_a_finding_is_one_line() -> None:
    assert Finding(FAULT, "n", "events", "a\nb", "c").line() == "fault    n  events: a b; c"
    assert Finding(OK, "n", "events", "a").line() == "ok       n  events: a"


def test_nodes_that_do_not_take_what_the_other_signs(tmp_path: Path) -> None:
    """The second one signs with a new secret before the first one has it."""

    async def work(nodes: Fleet) -> list[Finding]:
        old = nodes.one.config.domain.secret.encode()
        nodes.two.site.set_secrets([b"a new one of sixteen bytes", old])
        return await nodes.examined(nodes.one)

    told = only(examined(tmp_path, work), "secrets")
    assert told.what == "node-1 and it do not take what the other signs"
