"""Tenants through the sidecar: who shares with whom, what a client cannot claim, and turns before the engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import pytest
from prefixroute_serving.callers import MAX_SALT_CHARS, UNTRUSTED_SALT, CallerRefused, Callers, with_salt
from prefixroute_serving.headers import TENANT_HEADER
from prefixroute_serving.prompts import read_body
from prefixroute_serving.sidecar_config import SidecarConfig, TenantsConfig
from prefixroute_serving.turns import Turns
from sidecar_pair import DEADLINE_S, MODEL, PREFIX, NodeUnderTest, Pair, run_pair, until

from prefixroute import Domain, Node, Outcome, Tenants
from prefixroute.errors import UsageError
from prefixroute.events import Namespace

SECRET = "of the cluster"
DOMAIN = Domain(MODEL, "emulator", secret=SECRET.encode())
GROUPS = {"research": ("acme", "umbrella")}
TENANTS = TenantsConfig(header="x-tenant", groups=GROUPS, required=True)
HOP = {"x-prefixroute-hop": "1"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets."""
    with TemporaryDirectory(prefix="pr") as path:
        yield Path(path)


async def ask(
    pair: Pair, node: NodeUnderTest, tenant: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    """A completion of PREFIX by a tenant's trusted caller."""
    body = {"model": MODEL, "prompt": PREFIX, "max_tokens": 2, **fields}
    told = {**({"x-tenant": tenant} if tenant else {}), **(headers or {})}
    return await pair.client.post(f"{node.url}/v1/completions", json=body, headers=told, timeout=DEADLINE_S)


def cached(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


# --- through the sidecar -----------------------------------------------------------------------------------


def test_tenants_share_nothing_groups_share_and_nobody_gains_by_a_claim(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        theirs = Tenants(DOMAIN, GROUPS).namespace("acme")
        # A hop that nobody proves is a client's: served where it lands, for the tenant that the caller names.
        assert cached(await ask(pair, pair.two, "acme", HOP)) == 0
        await pair.known(PREFIX, theirs)

        for tenant in ("acme", "umbrella"):
            shared = await ask(pair, pair.one, tenant)
            assert shared.headers["x-prefixroute-target"] == "node-2/0"
            assert cached(shared) > 200
        forwarded = pair.two.sidecar_faults.calls[-1]
        proof = forwarded[TENANT_HEADER]
        assert TENANT_HEADER not in pair.two.engine_faults.calls[-1]

        globex = await ask(pair, pair.one, "globex")
        assert cached(globex) == 0
        assert globex.headers["x-prefixroute-matched"] == "0"

        claims: list[tuple[dict[str, str], dict[str, Any]]] = [
            ({}, {"cache_salt": theirs.salt}),
            (HOP, {"cache_salt": theirs.salt}),
            ({**HOP, TENANT_HEADER: proof}, {"cache_salt": theirs.salt, "max_tokens": 3}),
            ({**HOP, TENANT_HEADER: f"{'0' * 32}-{b'acme'.hex()}"}, {"cache_salt": theirs.salt}),
            ({TENANT_HEADER: proof}, {}),
            ({**HOP, TENANT_HEADER: "nonsense"}, {"extra_key": "x"}),
        ]
        for number, (headers, fields) in enumerate(claims):
            # Each is a tenant of its own, so that none finds what the one before it left.
            reply = await ask(pair, pair.two, f"curious-{number}", headers, **fields)
            assert cached(reply) == 0, (headers, fields)

        nobody = await ask(pair, pair.two, "", {**HOP, TENANT_HEADER: proof}, cache_salt=theirs.salt, max_tokens=3)
        assert nobody.status_code == 403
        assert nobody.json()["error"] == {
            "message": "the header x-tenant must name the tenant",
            "type": "permission_error",
            "code": 403,
        }
        await _told(pair)

    run_pair(test, folder, secret=SECRET, tenants=TENANTS, patience_s=DEADLINE_S)


async def _told(pair: Pair) -> None:
    """What statistics and metrics tell of it, and what is not passed on."""
    stats = (await pair.client.get(f"{pair.one.url}/prefixroute/stats")).json()
    mine = {row["tenant"]: row for row in stats["state"]["tenants"]}
    assert mine.keys() >= {"acme", "umbrella", "globex"}
    assert (mine["acme"]["requests"], mine["acme"]["forwards"]) == (1, 1)
    assert mine["acme"]["cached_tokens"] > 200
    assert mine["globex"]["cached_tokens"] == 0
    two = (await pair.client.get(f"{pair.two.url}/prefixroute/stats")).json()
    assert two["requests"]["refused: tenant"] == 1
    (fair,) = two["fairness"].values()
    assert {"acme", "umbrella", "curious-0"} <= {row["tenant"] for row in fair["tenants"]}
    assert (fair["held"], fair["ahead_tokens"]) == (0, 0)
    explained = (await pair.client.get(f"{pair.two.url}/prefixroute/explain")).json()
    assert explained["fairness"].keys() == {"node-2/0"}
    text = (await pair.client.get(f"{pair.two.url}/metrics")).text
    assert 'prefixroute_fair_released_total{endpoint="node-2/0",node="node-2",tenant="acme"}' in text
    assert 'prefixroute_tenant_received_total{node="node-2",tenant="umbrella"} 1.0' in text
    for path, status in (("/v1/embeddings", 403), ("/generate", 403), ("/tokenize", 200), ("/reset_prefix_cache", 200)):
        reply = await pair.client.post(f"{pair.two.url}{path}", json={"model": MODEL, "prompt": "x"})
        assert reply.status_code == status, path
    assert (await pair.client.get(f"{pair.two.url}/v1/models")).status_code == 200


def test_a_salt_of_the_clients_own_reaches_the_engine_and_stays_where_it_lands(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await ask(pair, pair.two, "", HOP, cache_salt="mine")
        await pair.known(PREFIX, Namespace(salt="mine"))
        first = await ask(pair, pair.one, "", cache_salt="mine")
        assert first.headers["x-prefixroute-target"] == "node-1/0"
        assert first.headers["x-prefixroute-reason"] == UNTRUSTED_SALT
        assert cached(first) == 0
        second = await ask(pair, pair.one, "", cache_salt="mine")
        assert cached(second) > 200
        assert cached(await ask(pair, pair.one, "", cache_salt="another")) == 0
        assert pair.one.sidecar.site.counts["untrusted salts"] == 3

    run_pair(test, folder, patience_s=DEADLINE_S)


def test_a_salt_that_is_trusted_is_routed_by(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await ask(pair, pair.two, "", HOP, cache_salt="mine")
        await pair.known(PREFIX, Namespace(salt="mine"))
        reply = await ask(pair, pair.one, "", cache_salt="mine")
        assert reply.headers["x-prefixroute-target"] == "node-2/0"
        assert cached(reply) > 200
        assert TENANT_HEADER not in pair.two.sidecar_faults.calls[-1]

    run_pair(test, folder, tenants=TenantsConfig(body_salt="trust"), patience_s=DEADLINE_S)


def test_a_greedy_tenant_lets_the_others_pass(folder: Path) -> None:
    """The greedy one's requests wait here, one is at the engine; a light one's is next, and who leaves is forgotten."""
    done: list[int] = []

    async def greedy(pair: Pair, number: int) -> None:
        reply = await ask(pair, pair.one, "greedy", HOP, prompt=f"{number} {PREFIX}", stream=number % 2 == 0)
        assert reply.status_code == 200
        done.append(number)

    async def test(pair: Pair) -> None:
        def held() -> int:
            return sum(queue.held for queue in pair.one.sidecar.site.queues.values())

        tasks = [asyncio.create_task(greedy(pair, number)) for number in range(8)]
        await until(lambda: held() == 7)
        assert pair.one.sidecar.node.load("node-1/0", pair.one.sidecar.driver.now()).queued_tokens > 1500
        # Half of the places are left to the others.
        refused = await ask(pair, pair.one, "greedy", HOP)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, 429)
        assert pair.one.sidecar.node.counters["outcomes_refused"] == 0
        tasks.pop().cancel()
        await until(lambda: held() <= 6)
        left = len(tasks)
        cached(await ask(pair, pair.one, "light", HOP))
        # One was at the engine, and perhaps one more was released before the light one came.
        assert len(done) <= left - 3
        await asyncio.gather(*tasks)
        assert len(done) == left
        assert held() == 0
        (rows,) = (queue.stats() for queue in pair.one.sidecar.site.queues.values())
        # The one that left had not been released.
        assert {row.tenant: (row.released, row.refused) for row in rows} == {"greedy": (left, 1), "light": (1, 0)}

    tenants = TenantsConfig(header="x-tenant", window_s=0, window_tokens=1, max_held=14)
    run_pair(test, folder, secret=SECRET, tenants=tenants, patience_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("outcome", "tokens"),
    [
        (Outcome.served(cached_tokens=60), 40),
        (Outcome.served(), 100),
        (Outcome.cancelled(), 100),
        (Outcome.failed("x"), 0),
        (Outcome.refused(), 0),
    ],
    ids=str,
)
def test_a_tenant_pays_for_what_was_computed_and_for_what_it_left(outcome: Outcome, tokens: int) -> None:
    node = Node("n", DOMAIN, rng=random.Random(1), now=0.0)
    node.add_endpoint("0", incarnation=1, now=0.0)
    decision = node.route(list(range(100)), 0.0)
    fixed = round(decision.candidates[0].overhead_s / decision.candidates[0].s_per_token) + 1

    async def test() -> int:
        turns = Turns(config(window_tokens=1, window_s=0), lambda: 0.0)
        first, second = turns.turn("n/0", True), turns.turn("n/0", True)
        first.enter("acme", decision, "n/0", 0)
        second.enter("acme", decision, "elsewhere", 0)
        await first.come()
        second.over(Outcome.cancelled())
        first.over(outcome)
        (row,) = turns.queues["n/0"].stats()
        assert (row.held, row.released, turns.slack_s("globex")) == (0, 1, 0.0)
        return row.tokens

    assert asyncio.run(test()) == (tokens + fixed if tokens else 0)


# --- callers -----------------------------------------------------------------------------------------------


def caller(config: TenantsConfig | None, tenant: str | None = "acme", domain: Domain = DOMAIN, **fields: Any) -> Any:
    body = msgspec.json.encode({"model": MODEL, **fields})
    headers = [("x-tenant", tenant)] if tenant is not None else []
    return Callers(domain, config).identify(headers, False, body, read_body(body))


def config(body_salt: str = "ignore", **more: Any) -> TenantsConfig:
    return TenantsConfig(header="X-Tenant", groups=GROUPS, body_salt=body_salt, **more)


def body_of(found: Any) -> dict[str, Any]:
    return dict(msgspec.json.decode(found.body))


@pytest.mark.parametrize("given", [{}, {"cache_salt": "s"}, {"cache_salt": 5}, {"cache_salt": ["a", "b"]}], ids=str)
def test_a_bodys_salt_is_replaced(given: dict[str, Any]) -> None:
    found = caller(config(), **given)
    assert (found.tenant, found.stays, found.matches) == ("acme", False, True)
    assert found.salt == Tenants(DOMAIN, GROUPS).namespace("umbrella").salt
    assert body_of(found) == {"model": MODEL, "cache_salt": found.salt}


def test_a_salt_narrows_where_that_is_said() -> None:
    plain, narrowed = caller(config("narrow")), caller(config("narrow"), cache_salt="s")
    assert plain.salt == caller(config()).salt
    assert narrowed.salt == Tenants(DOMAIN, GROUPS).namespace("acme", salt="s").salt == body_of(narrowed)["cache_salt"]
    for odd in (5, "s" * (MAX_SALT_CHARS + 1)):
        with pytest.raises(CallerRefused) as caught:
            caller(config("narrow"), cache_salt=odd)
        assert caught.value.reply.status == 400


def test_a_salt_is_taken_as_it_is_where_it_is_trusted() -> None:
    found = caller(config("trust"), cache_salt="s")
    assert (found.salt, found.stays, body_of(found)["cache_salt"]) == ("s", False, "s")
    assert caller(config("trust")).salt == caller(config()).salt
    odd = caller(config("trust"), cache_salt=["a"])
    assert (odd.salt, odd.stays, odd.matches, body_of(odd)["cache_salt"]) == ("", True, False, ["a"])


@pytest.mark.parametrize(
    ("fields", "salt", "stays", "matches"),
    [
        ({}, "", False, True),
        ({"cache_salt": ""}, "", False, True),
        ({"cache_salt": None}, "", False, True),
        ({"cache_salt": "s"}, "s", True, True),
        ({"cache_salt": 5}, "", True, False),
        ({"cache_salt": "s" * (MAX_SALT_CHARS + 1)}, "", True, False),
        ({"extra_key": "x"}, "", True, False),
        ({"extra_key": "x", "cache_salt": "s"}, "s", True, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("domain", [DOMAIN, Domain(MODEL, "emulator")], ids=["secret", "none"])
def test_without_tenants_a_salted_body_stays_and_is_not_touched(
    fields: dict[str, Any], salt: str, stays: bool, matches: bool, domain: Domain
) -> None:
    found = caller(None, domain=domain, **fields)
    assert (found.tenant, found.salt, found.stays, found.matches) == ("", salt, stays, matches)
    assert body_of(found) == {"model": MODEL, **fields}


def test_an_extra_key_stays_whatever_the_tenant() -> None:
    found = caller(config(), extra_key="x")
    assert (found.stays, found.matches, body_of(found)["extra_key"]) == (True, False, "x")
    assert found.salt == caller(config()).salt


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 403),
        ([("x-tenant", " ")], 403),
        ([("x-tenant", "a"), ("x-tenant", "b")], 400),
        ([("x-tenant", "a" * 129)], 400),
    ],
    ids=["none", "blank", "two", "long"],
)
@pytest.mark.parametrize("mode", ["ignore", "narrow", "trust"])
def test_who_is_not_named_well_is_refused(headers: list[tuple[str, str]], status: int, mode: str) -> None:
    body = b'{"cache_salt": "s"}'
    with pytest.raises(CallerRefused) as caught:
        Callers(DOMAIN, config(mode, required=True)).identify(headers, False, body, read_body(body))
    assert caught.value.reply.status == status
    assert msgspec.json.decode(caught.value.reply.body)["error"]["code"] == status


def test_the_nameless_are_a_tenant_of_their_own_where_no_name_is_required() -> None:
    found = caller(config(), None)
    assert (found.tenant, found.salt) == ("", Tenants(DOMAIN).namespace("").salt)
    twice = Callers(DOMAIN, config()).identify([("x-tenant", "a"), ("x-tenant", "a")], False, b"{}", read_body(b"{}"))
    assert twice.tenant == "a"


def test_proofs_rotate_with_the_secrets() -> None:
    body = b'{"prompt":"p","cache_salt":"s"}'

    def read(peer: Callers, proof: str) -> str:
        return peer.identify([(TENANT_HEADER, proof)], True, body, read_body(body)).tenant

    old, new = b"old", b"new"
    origin, peer = Callers(DOMAIN, None, (old,)), Callers(DOMAIN, None, (old,))
    assert read(peer, origin.prove("acme", body)) == "acme"
    for secrets in ((old, new), (new, old), (new,)):
        before = origin.prove("acme", body)
        for callers in (peer, origin):
            callers.seals.set_secrets(secrets)
            assert read(peer, origin.prove("acme", body)) == "acme"
    assert read(peer, before) == "acme", "it was proved with the new one already"
    assert read(peer, Callers(DOMAIN, None, (old,)).prove("acme", body)) == ""


def test_a_forward_is_believed_with_its_proof_and_with_nothing_else() -> None:
    origin, peer, other = (
        Callers(DOMAIN, config()),
        Callers(DOMAIN, None),
        Callers(Domain(MODEL, "x", secret=b"o"), None),
    )
    body = with_salt(b'{"prompt": "p"}', "derived")
    proof = origin.prove("acme \u00e9", body)

    def read(callers: Callers, header: str, body: bytes = body, forwarded: bool = True) -> tuple[str, str, bool]:
        found = callers.identify([(TENANT_HEADER, header)], forwarded, body, read_body(body))
        return found.tenant, found.salt, found.stays

    assert read(peer, proof) == ("acme \u00e9", "derived", False)
    assert read(origin, proof)[:2] == ("acme \u00e9", "derived")
    untrusted = ("", "derived", True)
    assert read(peer, proof, forwarded=False) == untrusted
    assert read(other, proof) == untrusted
    assert read(peer, origin.prove("globex", body)[:32] + proof[32:]) == untrusted
    assert read(peer, proof, with_salt(body, "derived") + b" ") == untrusted
    for header in ("", "-", "x-y", proof[:-2], proof + "00", proof.partition("-")[0]):
        assert read(peer, header) == untrusted
    assert Callers(Domain(MODEL, "x"), None).prove("acme", body) == ""


BODIES = (
    b'{"model":"m","prompt":"p","cache_salt":"s"}',
    b'{"cache_salt":"\\ud800","x\\ud800":1}',
    b'{"a":"\xff","cache_salt":"s"}',
    b'{"cache_salt":"s","cache_salt":{"a":[1,2]}}',
    b'{"extra_key":[],"x":1e999,"cache_salt":null}',
)


@pytest.mark.parametrize("mode", [None, "ignore", "narrow", "trust"])
def test_whatever_comes_is_somebodys_or_refused(mode: str | None) -> None:
    rng, callers = random.Random(str(mode)), Callers(DOMAIN, config(mode) if mode else None)
    for _ in range(500):
        body = bytearray(rng.choice(BODIES))
        for _ in range(rng.randrange(3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        told = bytes(body[:20]).decode("latin-1")
        headers = [("x-tenant", rng.choice(("a", "\xe9"))), (TENANT_HEADER, rng.choice(("", "zz-zz", told)))]
        with contextlib.suppress(CallerRefused, ValueError):
            request = read_body(bytes(body))
            found = callers.identify(headers, rng.random() < 0.5, bytes(body), request)
            if mode in ("ignore", "narrow"):
                fields = msgspec.json.decode(found.body, type=dict[str, msgspec.Raw])
                assert bytes(fields["cache_salt"]) == msgspec.json.encode(found.salt)


def test_a_salt_is_put_without_disturbing_the_rest() -> None:
    body = b'{"a":1.0, "cache\\u005fsalt":"x","b":{"cache_salt":"y", "n":1e3},"cache_salt":"z"}'
    assert with_salt(body, "s") == b'{"a":1.0,"cache_salt":"s","b":{"cache_salt":"y", "n":1e3}}'


@pytest.mark.parametrize(
    ("tenants", "secret", "match"),
    [
        ({"header": "x-tenant"}, "", "secret"),
        ({}, SECRET, "need a header"),
        ({"body_salt": "ignore", "groups": GROUPS}, SECRET, "need a header"),
        ({"body_salt": "trust", "required": True}, SECRET, "need a header"),
        ({"header": "x-tenant", "body_salt": "maybe"}, SECRET, "body_salt"),
        ({"header": "X-Prefixroute-Tenant"}, SECRET, "own"),
        ({"header": "x-tenant", "groups": {"a": ["x"], "b": ["x"]}}, SECRET, "one at most"),
        ({"header": "x-tenant", "window_tokens": 0}, SECRET, "window"),
        ({"header": "x-tenant", "max_held": 1}, SECRET, "max_held"),
        ({"header": "x-tenant", "weights": {"a": 0}}, SECRET, "weights"),
        ({"header": "x-tenant", "fairness": True}, SECRET, "unknown field"),
    ],
    ids=str,
)
def test_tenants_that_cannot_be_are_refused_by_name(tenants: dict[str, Any], secret: str, match: str) -> None:
    given = {
        "node": "n",
        "http": {"port": 1},
        "gossip": {"port": 2},
        "engine": {"url": "http://e"},
        "domain": {"model": MODEL, "tokenizer": "t", "secret": secret},
        "tenants": tenants,
    }
    with pytest.raises((msgspec.ValidationError, UsageError), match=match):
        msgspec.convert(given, SidecarConfig)
    with contextlib.suppress(KeyError):
        del given["tenants"]
    assert not msgspec.convert(given, SidecarConfig).tells_tenants


def test_the_example_of_the_documentation_is_a_configuration() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    read = msgspec.json.decode(example, type=SidecarConfig)
    assert read.tells_tenants
    assert read.tenants is not None
    assert read.tenants.groups == GROUPS
