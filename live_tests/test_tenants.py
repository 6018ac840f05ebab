"""Tenants at a real engine: its own cache keeps apart what the sidecar salts, and the node expects what is reused."""

from __future__ import annotations

import random

from live_engines import LiveEngine
from live_oracle import EstimateTally, counted, draw
from live_shapes import each_engine
from live_sidecars import TENANT, SidecarFleet
from prefixroute_serving.sidecar_config import TenantsConfig

from prefixroute import Tenants

GROUPS: dict[str, tuple[str, ...]] = {"research": ("acme", "umbrella")}


@each_engine
def test_the_engine_keeps_tenants_apart_and_lets_a_group_share(
    fleet: SidecarFleet, engine: LiveEngine, tally: EstimateTally
) -> None:
    tenants = TenantsConfig(header=TENANT, groups=GROUPS, body_salt="narrow")
    sidecar = fleet.add(engine, tenants=tenants)
    prompt = draw(random.Random(81), 300)
    whole = (len(prompt) - 1) // engine.shape.block * engine.shape.block

    def cached(tenant: str, salt: str = "") -> int:
        sidecar.settle()
        answer = sidecar.ask(prompt, tenant=tenant, salt=salt)
        assert answer.status == 200
        row = tally.note(f"{tenant or 'nobody'} {salt}", sidecar, *counted(answer))
        assert row.right, row
        return row.actual

    assert [cached("acme"), cached("acme"), cached("umbrella")] == [0, whole, whole]
    assert [cached("globex"), cached(""), cached("globex")] == [0, 0, whole]
    # A client's own salt parts it from its own tenant, and another's salt is only a text.
    assert [cached("acme", "own"), cached("acme", "own"), cached("umbrella", "own")] == [0, whole, 0]
    assert cached("globex", Tenants(sidecar.domain, GROUPS).namespace("acme").salt) == 0
