"""Real engines as one prefix cache: the traces of `engine_traces`, with routing, without, and with an oracle.

    python benchmarks/engines.py [--engines vllm,vllm,sglang,sglang] [--json [FILE]]

Each node is an engine and a sidecar on loopback; `prefixroute demo --help` says how the engines are found. Everybody
gets the same requests, in turns, from empty caches.

| contender | is |
|---|---|
| alone | no routing: a request is served where it enters |
| sticky | an oracle in the client: it knows the topic, and always sends it to the same node; it ignores load |
| routed | the default policy, entering at the same nodes as `alone` |

Engines share this machine's cores, so a wait for a core is part of every time: compare hits first, then times.
`--engines emulated,emulated` tries the command without an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prefixroute_lan4.cluster import Cluster, ClusterSettings
from prefixroute_lan4.loadgen import AnswerError, NodeAddress, ask, new_client
from prefixroute_launch.launcher import LAUNCHERS, TOKENIZERS, launcher_for
from prefixroute_serving.sidecar_stats import quantile
from workbench.engine_traces import ANSWER_TOKENS, TRACES, Ask, closed_loop, dialogues, open_loop

from prefixroute.errors import UsageError

CONTENDERS = ("alone", "sticky", "routed")
POLICIES = {"alone": "none", "sticky": "none", "routed": "default"}

CAPACITY_TOKENS = 3808
"""Of each engine: three prefixes of W1 and their tails; no cache holds all topics of W2, four of them do."""

CAPACITY_CLIENTS, LOAD = 4, 0.6
"""W2 comes at this share of what four clients in a closed loop get out of the engines alone."""

_COLD = 0.1  # a request with a smaller share of its prompt cached was cold
_COLUMNS = (
    "trace contender   runs  wall s  ttft mean (runs)           p50     p90  cached  cold  hottest forwards errors"
)


class Row(NamedTuple):
    """One request: seconds to the first token since it was due, and what it found."""

    topic: int
    origin: str
    served_by: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    error: str = ""


@dataclass(slots=True)
class Bench:
    """A fleet that is up, and what to send it."""

    cluster: Cluster
    client: httpx.AsyncClient
    rate: float = 0.0
    done: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, trace: str, contender: str, seed: int) -> tuple[list[Row], float]:
        """Send a trace on empty caches; return its rows and the seconds it took."""
        await self.cluster.prepare(POLICIES[contender])
        asks, rows = TRACES[trace](seed), list[Row]()
        send = partial(self._send, contender, rows)
        began = time.monotonic()
        if trace == "W2":
            await open_loop(asks, send, self.rate)
        else:
            await (dialogues if trace == "W3" else closed_loop)(asks, send)
        return rows, time.monotonic() - began

    async def capacity(self, seed: int) -> float:
        """Return how many requests of W2 a second the engines serve without routing."""
        await self.cluster.prepare("none")
        asks, rows = TRACES["W2"](seed), list[Row]()
        began = time.monotonic()
        await closed_loop(asks, partial(self._send, "alone", rows), CAPACITY_CLIENTS)
        return len(asks) / (time.monotonic() - began)

    async def _send(self, contender: str, rows: list[Row], request: Ask, due: float) -> None:
        nodes = self.cluster.addresses
        origin = nodes[(request.topic if contender == "sticky" else request.arrival) % len(nodes)]
        rows.append(await _row(self.client, origin, self.cluster.model, request, due))


async def _row(client: httpx.AsyncClient, origin: NodeAddress, model: str, request: Ask, due: float) -> Row:
    try:
        answer = await ask(client, origin, model, request.prompt, ANSWER_TOKENS)
    except (httpx.HTTPError, AnswerError) as error:
        return Row(request.topic, origin.node, "", 0.0, 0, 0, str(error) or type(error).__name__)
    assert answer.first_token_at is not None
    served_by = answer.served_by.partition("/")[0] or origin.node
    return Row(
        request.topic,
        origin.node,
        served_by,
        answer.first_token_at - due,
        answer.prompt_tokens,
        answer.cached_tokens,
    )


def figures(
    trace: str, contender: str, runs: Sequence[tuple[list[Row], float]], nodes: Sequence[str]
) -> dict[str, Any]:
    """Return what a contender's runs of a trace came to; times pooled over the runs, shares averaged."""
    good = [[row for row in rows if not row.error] for rows, _ in runs]
    ttft = [1e3 * row.ttft_s for rows in good for row in rows]
    splits = [[sum(row.served_by == node for row in rows) for node in nodes] for rows in good]
    return {
        "trace": trace,
        "contender": contender,
        "runs": len(runs),
        "wall_s": round(statistics.fmean(wall for _, wall in runs), 2),
        "ttft_mean_ms": round(statistics.fmean(ttft), 1) if ttft else None,
        "ttft_mean_of_runs_ms": [round(statistics.fmean(1e3 * r.ttft_s for r in rows), 1) for rows in good if rows],
        **{f"ttft_p{q}_ms": round(quantile(ttft, q / 100), 1) for q in (50, 90, 99)},
        "cached_share": round(statistics.fmean(_cached(rows) for rows in good), 4),
        "cold": [sum(row.cached_tokens < _COLD * row.prompt_tokens for row in rows) for rows in good],
        "splits": splits,
        "hottest_share": round(max(max(split) / max(1, sum(split)) for split in splits), 3),
        "forwards": [sum(row.served_by != row.origin for row in rows) for rows in good],
        "errors": sum(bool(row.error) for rows, _ in runs for row in rows),
        "error_texts": sorted({row.error for rows, _ in runs for row in rows if row.error})[:3],
    }


def _cached(rows: Sequence[Row]) -> float:
    return sum(row.cached_tokens for row in rows) / max(1, sum(row.prompt_tokens for row in rows))


def line(figure: dict[str, Any]) -> str:
    """Return a contender's figures as one line of the table."""
    means = figure["ttft_mean_of_runs_ms"]
    told = f"{figure['ttft_mean_ms'] or 0:,.0f} ({min(means, default=0):,.0f}-{max(means, default=0):,.0f})"
    cold, forwards = (statistics.fmean(figure[name]) for name in ("cold", "forwards"))
    return (
        f"{figure['trace']:<6}{figure['contender']:<12}{figure['runs']:>4}{figure['wall_s']:>8.1f}  {told:<20}"
        f"{figure['ttft_p50_ms']:>8,.0f}{figure['ttft_p90_ms']:>8,.0f}{figure['cached_share']:>8.3f}{cold:>6.1f}"
        f"{figure['hottest_share']:>9.3f}{forwards:>9.1f}{figure['errors']:>7}"
    )


async def measure(options: argparse.Namespace, kinds: Sequence[str]) -> dict[str, Any]:
    """Start the fleet, run everything in turns, and return settings and figures."""
    settings = ClusterSettings(nodes=len(kinds), block_size=16, capacity_blocks=CAPACITY_TOKENS // 16)
    launchers = [launcher_for(kind) for kind in kinds]
    runs: dict[tuple[str, str], list[tuple[list[Row], float]]] = {}
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        async with Cluster.open(settings, launchers, Path(folder)) as cluster, new_client() as client:
            say("starting the engines")
            await cluster.prepare("none")
            bench = Bench(cluster, client, options.rate)
            await _warm_up(bench)
            if "W2" in options.traces and not bench.rate:
                bench.rate = LOAD * await bench.capacity(options.seed)
                say(f"W2 comes at {bench.rate:.2f} requests a second")
            for repetition in range(options.repetitions):
                for number, trace in enumerate(options.traces):
                    turn = (repetition + number) % len(options.contenders)
                    for contender in (*options.contenders[turn:], *options.contenders[:turn]):
                        rows, wall_s = await bench.run(trace, contender, options.seed)
                        runs.setdefault((trace, contender), []).append((rows, wall_s))
                        say(f"{trace} #{repetition + 1} {contender}: cached {_cached(rows):.3f}, {wall_s:.1f} s")
            nodes, rate = [address.node for address in cluster.addresses], bench.rate
    rows_ = [figures(t, c, runs[t, c], nodes) for t in options.traces for c in options.contenders]
    return {
        "engines": list(kinds),
        "capacity_tokens": CAPACITY_TOKENS,
        "seed": options.seed,
        "w2_rate": rate,
        "rows": rows_,
    }


async def _warm_up(bench: Bench) -> None:
    """Let every engine pay what it pays once, for short prompts and for long ones."""
    for n in (100, 700):
        for i, node in enumerate(bench.cluster.addresses):
            request = Ask(i, tuple(range(16, 16 + n)), i)
            await _row(bench.client, node, bench.cluster.model, request, time.monotonic())


def say(text: str) -> None:
    """Tell how far it is, on standard error."""
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """Read the command line; exits with 2 when it cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="vllm,vllm,vllm,vllm", help="each node's engine (vllm,vllm,vllm,vllm)")
    parser.add_argument("--traces", default=",".join(TRACES), help="of W1,W2,W3")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="of alone,sticky,routed")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--seed", type=int, default=1, help="of the traces (1)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests of W2 a second (measured first)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON (no FILE: standard output)")
    options = parser.parse_args()
    for name, known in (("traces", tuple(TRACES)), ("contenders", CONTENDERS), ("engines", tuple(LAUNCHERS))):
        words = getattr(options, name).split(",")
        if not set(words) <= set(known):
            parser.error(f"--{name} takes {','.join(known)}, not {getattr(options, name)!r}")
        setattr(options, name, words)
    if len({TOKENIZERS[kind] for kind in options.engines}) > 1:
        parser.error("emulated engines have a tokenizer of their own: they cannot be mixed with others")
    if options.repetitions < 1 or options.rate < 0:
        parser.error("--repetitions must be at least 1, and --rate positive")
    return options


def main() -> int:
    """Run, print the table, and write it as JSON when asked; 1 when a request failed."""
    options = parse()
    try:
        result = asyncio.run(measure(options, options.engines))
    except UsageError as error:
        print(f"engines.py: {error}", file=sys.stderr)
        return 2
    result["machine"] = {"python": platform.python_version(), "processor": platform.machine()}
    text = json.dumps(result, indent=1)
    if options.json == "-":
        print(text)
    else:
        print(_COLUMNS)
        for figure in result["rows"]:
            print(line(figure))
        if options.json:
            Path(options.json).write_text(text + "\n")
    return int(any(figure["errors"] for figure in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
