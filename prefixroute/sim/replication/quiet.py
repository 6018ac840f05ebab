"""Quiet: what must hold some rounds after all faults have ended and the engines rest."""

from __future__ import annotations

from .network import Network
from .oracle import InvariantError, Violation

REFIT_ROUNDS = 20
"""Rounds within which every node has a set that was published in quiet."""


def quiet_rounds(net: Network) -> float:
    """Return after how many rounds of quiet all replicas must be their owners' sets.

    A word reaches everybody in a dozen exchanges or so, though some go to peers that are dead; a large set takes as
    many exchanges as it has bursts, and each node's may have to come from the owner alone.
    """
    settings = net.settings
    sizes = [len(net.nodes[name].digests()[endpoint].keys) for name, host in net.hosts.items() for endpoint in host.own]
    bursts = sum(1 + 6 * size / min(settings.burst_bytes / 3, 60000) for size in sizes)
    return 40 + 4 * len(net.nodes) * bursts / settings.fan_out


def settle(net: Network) -> float:
    """End all faults and check what must hold then; return the rounds that it took. Raises `InvariantError`."""
    settings = net.settings
    # Nodes slow down while nothing happens: whoever was cut off may need one slow round to be heard.
    pace = max(settings.interval_s, settings.idle_interval_s)
    net.calm()
    net.run(max(net.last_arrival - net.now, 0.0))
    began = net.now
    net.run(2 * pace)
    bound = quiet_rounds(net) * pace
    while True:
        lagging = net.lagging()
        if not lagging:
            break
        if net.now - began > bound:
            name, endpoint = lagging[0]
            held = net.nodes[name].digests().get(endpoint)
            owner = net.nodes[endpoint.partition("/")[0]].digests()[endpoint]
            message = (
                f"after {net.now - began:.1f} s of quiet it holds "
                f"{(*held[:2], len(held.keys)) if held else None}, its owner {(*owner[:2], len(owner.keys))}"
            )
            raise InvariantError(Violation("quiet", name, endpoint, net.now, message))
        net.run(pace)
    took = (net.now - began) / pace
    ends = began + settings.suspect_after_s
    if net.ghosts():
        ends = began + settings.forget_after_s + 15 * pace
    net.run(max(ends, net.now + 3 * pace) - net.now)
    for _ in range(REFIT_ROUNDS):
        # An owner may choose its anchors anew long after its engine's last change.
        if not net.lagging():
            break
        net.run(pace)
    for what, found in (
        ("is alive, and no candidate", net.unheard()),
        ("is dead, and not forgotten", net.ghosts()),
        ("is not its owner's set any more", net.lagging()),
    ):
        if found:
            raise InvariantError(Violation("quiet", *found[0], net.now, f"{what}, {net.now - began:.1f} s after quiet"))
    for name, node in net.nodes.items():
        net.oracle.memory(name, node, net.now)
        try:
            node._check()
        except AssertionError as error:
            raise InvariantError(Violation("exception", name, "", net.now, f"node._check: {error}")) from error
    return took
