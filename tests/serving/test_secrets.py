"""Secrets of running sidecars: changed without a restart and without a loss; and where prompts may be sent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs
from prefixroute_serving.carried_tokens import TokenCarrier
from prefixroute_serving.introspection import check
from prefixroute_serving.serve import reread_on_sighup
from prefixroute_serving.sidecar_config import dump_config
from prefixroute_serving.upstream import allowed
from sidecar_pair import PREFIX, Pair, run_pair, until

from prefixroute import Domain

OLD, NEW = b"the fleet's", b"another one of sixteen and more"
TOKENS = array("I", [1, 2, 3])
STEPS: list[Sequence[bytes]] = [(OLD, NEW), (NEW, OLD), (NEW,)]


def test_three_steps_on_running_sidecars_lose_no_datagram_and_no_carried_token(tmp_path: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        nodes = (pair.one, pair.two)
        for step in STEPS:
            for under_test in nodes:
                under_test.sidecar.site.set_secrets(step)
                reply = await pair.ask(pair.one, PREFIX + f" {step} {under_test.name}")
                assert reply.headers["x-prefixroute-target"] == "node-2/0"
                assert int(reply.headers["x-prefixroute-matched"]) > 200
                echoed = await pair.one.sidecar.site.echo.probe(
                    pair.one.sidecar.config.peers[0].gossip.pair, 100, 2, 5.0
                )
                assert echoed.answered == 2
        for under_test in nodes:
            counters = under_test.sidecar.node.counters
            assert not [name for name in counters if name.startswith("rejected")]
            told = await pair.client.get(f"{under_test.url}/prefixroute/domain", params={"challenge": "00"})
            assert told.json()["accepts"] == [check(NEW, "00")]

    run_pair(test, tmp_path, secret=OLD.decode())


def test_a_sighup_reads_the_secrets_anew_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def test(pair: Pair) -> None:
        sidecar, path = pair.one.sidecar, tmp_path / "config.json"
        dump_config(structs.replace(sidecar.config, secrets=(OLD.decode(), NEW.decode())), path)
        reread_on_sighup(sidecar.site, path)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: sidecar.site.secrets == (OLD, NEW))
        path.write_text('{"node": 7}')
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "the secrets stay as they are" in caplog.text)
        assert sidecar.site.secrets == (OLD, NEW)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    run_pair(test, tmp_path, secret=OLD.decode())


def test_carried_tokens_are_believed_under_each_secret_and_no_other() -> None:
    domain = Domain("m", "t", secret=OLD)
    from_old, from_new = (TokenCarrier(domain, [secret]).pack(b"{}", TOKENS) for secret in (OLD, NEW))
    both = TokenCarrier(domain, [NEW, OLD])
    assert both.unpack(*from_old).tokens == both.unpack(*from_new).tokens == TOKENS
    assert both.pack(b"{}", TOKENS) == from_new
    assert TokenCarrier(domain, [b"third"]).unpack(*from_old).tokens is None


@pytest.mark.parametrize(
    ("url", "hosts", "good"),
    [
        ("http://10.0.0.2:8000", (), True),
        ("https://b.internal", ("b.internal",), True),
        ("http://10.0.0.2:8000", ("10.0.0.3",), False),
        ("http://b.internal@evil.example/", ("b.internal",), False),
        ("file:///etc/passwd", (), False),
        ("gopher://10.0.0.2", (), False),
        ("", (), False),
    ],
)
def test_prompts_go_to_http_addresses_of_hosts_that_are_allowed_only(
    url: str, hosts: tuple[str, ...], good: bool
) -> None:
    if good:
        assert allowed(url, frozenset(hosts)) == url
    else:
        with pytest.raises(ValueError, match="prompts are not sent to"):
            allowed(url, frozenset(hosts))


def test_a_configuration_with_secrets_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    async def test(pair: Pair) -> None:
        config = pair.one.sidecar.config
        for secrets in (("a", "a"), ("a", "b", "c", "d", "e"), ("x" * 65,)):
            with pytest.raises(ValueError, match="secret"):
                structs.replace(config, secrets=secrets).__post_init__()

    run_pair(test, tmp_path)
