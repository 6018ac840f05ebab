"""A sidecar's configuration file, and what is said when it cannot be used."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prefixroute_serving.attach import EngineConfig
from prefixroute_serving.serve import serve
from prefixroute_serving.sidecar import Sidecar
from prefixroute_serving.sidecar_config import (
    POLICIES,
    DomainConfig,
    HostPort,
    PeerConfig,
    PushBackConfig,
    SidecarConfig,
    ZoneRuleConfig,
    dump_config,
    load_config,
    make_policy,
)

from prefixroute import ZoneRule, Zones, cli
from prefixroute.errors import UsageError


def small_config(**changes: object) -> SidecarConfig:
    plain: dict[str, Any] = {
        "node": "n",
        "http": HostPort(port=1),
        "gossip": HostPort(port=2),
        "engine": EngineConfig(url="http://e", events="ipc://e"),
        "domain": DomainConfig(model="m", tokenizer="t", secret="s"),
    }
    return SidecarConfig(**{**plain, **changes})


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = small_config(peers=(PeerConfig(node="p", gossip=HostPort(port=3)),), policy="least", url="http://x")
    dump_config(config, tmp_path / "c.json")
    assert load_config(tmp_path / "c.json") == config


def test_the_documented_configurations_are_accepted() -> None:
    readme = (Path(__file__).parents[2] / "examples" / "lan4" / "README.md").read_text()
    examples = [part.split("```")[0].encode() for part in readme.split("```json\n")[1:]]
    configs = [msgspec.json.decode(example, type=SidecarConfig) for example in examples]
    assert [config.public_url for config in configs] == ["http://127.0.0.1:9001", "http://10.0.0.1:9000"]
    assert [len(config.peers) for config in configs] == [1, 3]


def test_push_back_reaches_the_node_and_is_checked_with_the_file(tmp_path: Path) -> None:
    config = small_config(push_back=PushBackConfig(enter_s=20, leave_s=10))
    dump_config(config, tmp_path / "c.json")
    node = Sidecar(load_config(tmp_path / "c.json")).node
    assert (node.settings.push_back.enter_s, node.settings.push_back.leave_s) == (20, 10)
    (tmp_path / "c.json").write_text((tmp_path / "c.json").read_text().replace("20", "5"))
    with pytest.raises(UsageError, match="leave_s < enter_s"):
        load_config(tmp_path / "c.json")


def test_zones_reach_the_node(tmp_path: Path) -> None:
    rules = (
        ZoneRuleConfig(source="eu", to="us", forward="above", saving_ms=50),
        ZoneRuleConfig(source="*", to="eu", forward="never"),
    )
    dump_config(small_config(zone="eu", zones=rules), tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    assert '"from": "eu"' in text
    settings = Sidecar(load_config(tmp_path / "c.json")).node.settings
    assert settings.zone == "eu"
    assert settings.zones == Zones({("eu", "us"): ZoneRule("above", 0.05), ("*", "eu"): ZoneRule("never")})


RULE = '{"from": "eu", "to": "us", "forward": "never"}'


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (f'"zones": [{RULE}]', "need a zone"),
        (f'"zone": "eu", "zones": [{RULE}, {RULE}]', "two rules of zones are from 'eu' to 'us'"),
        (f'"zone": "eu", "zones": [{RULE.replace("never", "seldom")}]', "always, above, never"),
        (f'"zone": "eu", "zones": [{RULE.replace("never", "above")}]', "saving_s > 0"),
        (f'"zone": "eu", "zones": [{RULE[:-1]}, "saving_ms": 5' + "}]", "takes no saving"),
        (f'"zone": "eu", "zones": [{RULE.replace("to", "into")}]', "unknown field"),
        ('"zone": "eu", "zones": [{"from": "eu", "to": "us"}]', "missing required field `forward`"),
        (f'"zone": "{"x" * 41}"', "at most 40 bytes"),
    ],
)
def test_zones_that_cannot_be_are_refused_with_the_file(tmp_path: Path, fields: str, said: str) -> None:
    dump_config(small_config(), tmp_path / "c.json")
    told = msgspec.json.decode((tmp_path / "c.json").read_bytes())
    told = {**told, **msgspec.json.decode("{" + fields + "}")}
    (tmp_path / "c.json").write_bytes(msgspec.json.encode(told))
    with pytest.raises(UsageError, match=said):
        load_config(tmp_path / "c.json")


def test_every_word_for_a_policy_makes_one() -> None:
    assert len({type(make_policy(word)) for word in POLICIES}) >= 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "truncated"),
        ('{"node": "n"}', "missing required field"),
        ('{"nodes": "n"}', "unknown field"),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    assert cli.main(["serve", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    assert str(path) in err


def test_a_configuration_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="policy must be one of"):
        small_config(policy="best")
    with pytest.raises(ValueError, match="among its own peers"):
        small_config(peers=(PeerConfig(node="n", gossip=HostPort(port=3)),))


def test_the_sidecar_wants_one_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 2
    assert "CONFIG" in capsys.readouterr().err
    assert cli.main(["serve", "/nowhere/c.json"]) == 2
    assert "cannot read /nowhere/c.json" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_a_port_in_use_is_named(kind: str) -> None:
    types = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
    with socket.socket(socket.AF_INET, types[kind]) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == "tcp":
            taken.listen()
        address = HostPort(port=taken.getsockname()[1])
        places = {"http": HostPort(port=0), "gossip": HostPort(port=0)}
        config = small_config(**{**places, "http" if kind == "tcp" else "gossip": address})
        with pytest.raises(UsageError, match=f"cannot use {kind} 127.0.0.1:{address.port}"):
            asyncio.run(serve(config, Path("unused")))
