"""``prefixroute plan place FLEET``: which server holds which blocks, the chains, and how good that is at worst."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from prefixroute.sim.parallel import add_json_option, check_writable, write_json

from ..plan.placement.certificate import Certificate, certify
from ..plan.placement.chains import Assignment, Links, Shared, assign
from ..plan.placement.exact import Exact, solve_exact
from ..plan.placement.fleet_file import GB, Fleet, read_fleet
from ..plan.placement.spans import Adaptive, Placement, adaptive

SHOWN_CHAINS = 6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("fleet", type=Path, metavar="FLEET", help="a TOML or JSON file; see examples/plan/fleet.toml")
    add_json_option(parser, "plan")
    add("--exact", type=float, metavar="S", help="look for a better plan for so many seconds (needs the extra milp)")
    add("--plot", metavar="FILE", help="draw the span of each server, as PNG")


def run_options(options: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError` for a file that cannot be used, or a model or load that does not fit."""
    fleet = read_fleet(options.fleet)
    check_writable(options.json)
    check_writable(options.plot)
    plan = adaptive(fleet.problem)
    found = None
    if options.exact is not None:
        found = solve_exact(fleet.problem, time_limit_s=options.exact, start=plan)
        plan = _better(fleet, plan, found)
    placement, assignment = plan
    certificate = certify(fleet.problem, placement)
    if options.json != "-":
        print(table(fleet, placement, assignment, certificate))
        if found:
            print(
                f"exact ({found.solver}, {found.status}): {found.ms_per_token:.1f} ms a token with the best routing, "
                f"no placement below {found.bound:.1f} (gap {found.gap:.1%})"
            )
    if options.plot:
        plot(options.plot, fleet, placement)
    result = as_json(fleet, placement, assignment, certificate)
    if found:
        result["exact"] = {
            "ms_per_token": round(found.ms_per_token, 3),
            "bound": round(found.bound, 3),
            "status": found.status,
            "solver": found.solver,
        }
    write_json(options.json, result)
    return 0


def _better(fleet: Fleet, plan: Adaptive, found: Exact) -> Adaptive:
    """The solver's placement if requests that are routed one after the other are served better on it."""
    links = Links(fleet.problem, found.placement.spans)
    assignment = assign(fleet.problem, links, fleet.problem.slots(found.placement.spans))
    if assignment is None or assignment.ms_per_token >= plan.assignment.ms_per_token:
        return plan
    return Adaptive(found.placement, assignment)


def as_json(fleet: Fleet, placement: Placement, assignment: Assignment, certificate: Certificate) -> dict[str, Any]:
    """Return a plan as plain JSON values."""
    bound = certificate.theorem2_bound
    return {
        "servers": [
            {"name": name, "first_block": span.first if span else 0, "blocks": span.blocks if span else 0}
            for name, span in zip(fleet.servers, placement.spans, strict=True)
        ],
        "ms_per_token": round(certificate.ms_per_token, 3),
        "lower_bound": round(certificate.lower_bound, 3),
        "theorem2_bound": None if bound is None else round(bound, 3),
        "gap": round(certificate.gap, 5),
        "covered": certificate.covered,
        "fits": certificate.fits,
        "requests": fleet.problem.concurrent,
        "reserved_sessions": placement.design,
        "chains": [
            {
                "client": fleet.clients[shared.client],
                "requests": shared.requests,
                "ms_per_token": round(shared.chain.ms, 3),
                "servers": [{"name": fleet.servers[hop.server], "blocks": hop.blocks} for hop in shared.chain.hops],
            }
            for shared in assignment.chains
        ],
    }


def table(fleet: Fleet, placement: Placement, assignment: Assignment, certificate: Certificate) -> str:
    """Return a plan as text."""
    problem = fleet.problem
    slots = problem.slots(placement.spans)
    used = [0] * problem.servers
    for shared in assignment.chains:
        for hop in shared.chain.hops:
            used[hop.server] += hop.blocks * shared.requests
    width = max(len(name) for name in fleet.servers)
    lines = [
        fleet.file.title or fleet.file.model.name or "placement",
        f"{'server':<{width}}{'blocks':>12}{'weights':>12}{'cache slots':>13}{'used':>7}",
    ]
    for j, (name, span) in enumerate(zip(fleet.servers, placement.spans, strict=True)):
        held = f"{span.first}-{span.end - 1}" if span else "none"
        weights = problem.block_bytes * (span.blocks if span else 0) / GB
        lines.append(f"{name:<{width}}{held:>12}{weights:>9.2f} GB{slots[j]:>13,}{used[j]:>7,}")
    load = fleet.load
    lines.append(
        f"planned for {problem.concurrent} requests under way at once"
        + (f" ({load.offered:.1f} on average, each {load.single_s:.1f} s alone)" if load.single_s else "")
    )
    if load.capped:
        lines.append("more are offered than certainly fit: requests will queue; add memory, or expect fewer")
    lines += [_chain(fleet, shared) for shared in assignment.chains[:SHOWN_CHAINS]]
    if len(assignment.chains) > SHOWN_CHAINS:
        lines.append(f"  and {len(assignment.chains) - SHOWN_CHAINS} more chains, see --json")
    bound = certificate.theorem2_bound
    lines.append(
        f"{certificate.ms_per_token:.1f} ms a token on average; no placement is below {certificate.lower_bound:.1f} "
        f"(gap {certificate.gap:.1%})"
        + (f"; at worst {bound:.1f}" if bound is not None and math.isfinite(bound) else "")
    )
    lines.append(
        "certificate: every block is held, and weights and caches fit every server"
        if certificate.covered and certificate.fits
        else "certificate: BROKEN, please report this plan"
    )
    return "\n".join(lines)


def _chain(fleet: Fleet, shared: Shared) -> str:
    hops = " > ".join(f"{fleet.servers[hop.server]} ({hop.blocks})" for hop in shared.chain.hops)
    return f"  {shared.requests:>4} of {fleet.clients[shared.client]}: {shared.chain.ms:8.1f} ms a token, {hops}"


def plot(path: str, fleet: Fleet, placement: Placement) -> None:
    """Draw the span of each server. Raises `UsageError` without matplotlib."""
    from prefixroute.sim.plots import plot_spans

    rows = [(name, span.first, span.blocks) for name, span in zip(fleet.servers, placement.spans, strict=True) if span]
    plot_spans(path, fleet.file.title or "placement", rows, fleet.problem.blocks)
