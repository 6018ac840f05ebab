#!/usr/bin/env python3
"""What the events of an engine cost: bytes of its publisher to a batch, and the batch into the residency.

    python benchmarks/ingest.py [--only vllm,sglang,shapes,memory] [--pages 1,16,32,128] [--quick] [--json [FILE]]

*vllm* and *sglang*: a full cache of prompts of 1,024 random tokens below a shared one of 128. In every step the oldest
prompt goes and a new one comes. vLLM says one BlockStored, and a BlockRemoved for each hash, children first, in one
batch; SGLang one BlockStored of many pages, and one BlockRemoved with all hashes of the node, parent first. Both as
maps of the newest versions. Removals and stores are timed apart, in microseconds per canonical block of 16 tokens, with
decoding; *together* is the mean of both, *a block in and out* their sum.

The floor is measured in the same run on the same bytes: msgspec's plain decoding, packing a store's tokens and chaining
their keys with xxh3, and an entry of a dict as large as the cache, made or deleted, for each handle and each key. *over
the floor* is the ratio; compare that, since machines differ. The bar is 2 us a block; with pages smaller than a block,
where the floor itself is about that much, it is twice the floor.

*shapes*: what else must not be slow, for pages of one token: a prompt of 8,192 tokens in one event; the same growing
by one page an event; one hash an event taken away, from either end; many prompts below one page.
*memory*: bytes that tracemalloc finds per engine block, the tree's and the handles' included.
A time is the sum of the best times of each payload, over the repetitions.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from prefixroute_sglang import decode_batch as decode_sglang
from prefixroute_vllm import decode_batch as decode_vllm
from workbench.bars import Row, chosen, json_option, publish

from prefixroute import Domain, EngineBatch, Residency
from prefixroute.keys.chain import ChainCursor, ChainSpec

BLOCK = 16
TOKENS = 1024
"""Tokens of a prompt that is stored and removed again."""

SHARED = 128
VOCABULARY = 128_000
BAR_US = 2.0
LONG = 8192
DOMAIN = Domain("bench", "bench", BLOCK)

Event = dict[str, Any]
Decode = Callable[[bytes], EngineBatch]


class Prompt(NamedTuple):
    """Its tokens and their handles, one a page."""

    tokens: list[int]
    handles: list[int]


class Form(NamedTuple):
    """How one engine speaks."""

    decode: Decode
    stored: Event
    removed: Event
    one_hash: bool
    """Whether each removal is an event of its own, children first."""
    handles: tuple[int, int]


FORMS = {
    "vllm": Form(
        decode_vllm,
        {
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"medium": "GPU", "group_idx": 0},
        True,
        (0, 2**64),
    ),
    "sglang": Form(decode_sglang, {"medium": "GPU"}, {"medium": "GPU"}, False, (-(2**63), 2**63)),
}


def prompt(form: Form, page: int, n: int, rng: random.Random) -> Prompt:
    """A prompt of `n` random tokens."""
    return Prompt(
        [rng.randrange(VOCABULARY) for _ in range(n)], [rng.randrange(*form.handles) for _ in range(n // page)]
    )


def stored(form: Form, page: int, new: Prompt, parent: int | None) -> Event:
    """The event that tells of a prompt."""
    event: Event = {
        "type": "BlockStored",
        "block_hashes": new.handles,
        "parent_block_hash": parent,
        "token_ids": new.tokens,
    }
    event |= {"block_size": page, "lora_id": None, **form.stored}
    if "extra_keys" in event:
        event["extra_keys"] = [None] * len(new.handles)
    return event


def removed(form: Form, gone: Prompt) -> list[Event]:
    """The events that take a prompt away."""
    lists = [[handle] for handle in reversed(gone.handles)] if form.one_hash else [gone.handles]
    return [{"type": "BlockRemoved", "block_hashes": handles, **form.removed} for handles in lists]


def payload(events: Sequence[Event]) -> bytes:
    """One message's bytes."""
    return msgspec.msgpack.encode([1_700_000_000.5, events, 0])


class Times(NamedTuple):
    """Seconds to decode payloads, and to apply what they say."""

    decode: float
    apply: float

    @property
    def both(self) -> float:
        """Seconds of both."""
        return self.decode + self.apply


def ingest(residency: Residency, decode: Decode, data: bytes) -> Times:
    """Take one payload, and the changes that a node would take."""
    clock = time.perf_counter
    start = clock()
    batch = decode(data)
    middle = clock()
    residency.apply(batch, 1.0)
    residency.take_changes()
    return Times(middle - start, clock() - middle)


def best(repeat: int, run: Callable[[], Sequence[Times]]) -> Times:
    """Repeat a run of the same payloads; return the sum of the best times of each of them.

    A payload does the same in every repetition, a dict that grows included. What differs is the rest of the machine.
    """
    steps = list(zip(*[run() for _ in range(repeat)], strict=True))
    return Times(sum(min(t.decode for t in step) for step in steps), sum(min(t.apply for t in step) for step in steps))


def in_turn(repeat: int, run: Callable[[], Sequence[Times]]) -> tuple[Times, Times]:
    """As `best`, for runs of two kinds of payload in turn: the sum of each kind."""
    runs = [run() for _ in range(repeat)]
    first, second = (iter([times[kind::2] for times in runs]).__next__ for kind in (0, 1))
    return best(repeat, first), best(repeat, second)


def least(stores: Sequence[bytes], removals: Sequence[bytes], prompts: Sequence[Prompt], cached: int) -> list[Times]:
    """What removals and stores in turn take at least: decoding, packing, chaining, and entries of a dict."""
    decode, clock = msgspec.msgpack.Decoder().decode, time.perf_counter
    spec = ChainSpec(BLOCK, DOMAIN.mix)
    entries: dict[int, None] = {}
    names: list[list[int]] = []

    def enter(one: Prompt) -> None:
        packed = array("I", one.tokens).tobytes()
        blocks = [packed[at : at + spec.block_bytes] for at in range(0, len(packed), spec.block_bytes)]
        names.append(ChainCursor(spec, 1).extend(blocks))
        entries.update(dict.fromkeys(names[-1]))
        entries.update(dict.fromkeys(one.handles))

    for one in prompts[:cached]:
        enter(one)
    times = []
    for i, (gone, new) in enumerate(zip(removals, stores[cached:], strict=False)):
        start = clock()
        decode(gone)
        middle = clock()
        for listed in (names[i], prompts[i].handles):
            for name in listed:
                del entries[name]
        times.append(Times(middle - start, clock() - middle))
        start = clock()
        decode(new)
        middle = clock()
        enter(prompts[cached + i])
        times.append(Times(middle - start, clock() - middle))
    return times


# --- a full cache ------------------------------------------------------------------------------------------


def stream(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Stores and removals of one engine at each page size."""
    form = FORMS[name]
    for page in map(int, options.pages.split(",")):
        rng = random.Random(page)
        shared = prompt(form, page, SHARED, rng)
        prompts = [prompt(form, page, TOKENS, rng) for _ in range(options.cached + options.steps)]
        stores = [payload([stored(form, page, new, shared.handles[-1])]) for new in prompts]
        removals = [payload(removed(form, gone)) for gone in prompts]
        first = payload([stored(form, page, shared, None)])

        def run(
            first: bytes = first, stores: Sequence[bytes] = stores, removals: Sequence[bytes] = removals
        ) -> list[Times]:
            residency = Residency(DOMAIN)
            for data in (first, *stores[: options.cached]):
                ingest(residency, form.decode, data)
            gc.collect()
            steps = zip(removals, stores[options.cached :], strict=False)
            times = [ingest(residency, form.decode, data) for step in steps for data in step]
            assert residency.canonical_blocks == (options.cached * TOKENS + SHARED) // BLOCK
            assert residency.counts.unknown_removals == 0
            return times

        gone, new = in_turn(options.repeat, run)
        floors = in_turn(options.repeat, lambda: least(stores, removals, prompts, options.cached))  # noqa: B023
        scale = 1e6 / (options.steps * TOKENS // BLOCK)
        title = f"{name}, pages of {page}"
        for what, times, low in (("store", new, floors[1]), ("removal", gone, floors[0])):
            yield Row(f"{title}: {what}, decoding", times.decode * scale, "us/block")
            yield Row(f"{title}: {what}, applying", times.apply * scale, "us/block")
            yield Row(f"{title}: {what}, floor", low.both * scale, "us/block")
            bar = BAR_US if page >= BLOCK else 2 * low.both * scale
            yield Row(f"{title}: {what}, all", times.both * scale, "us/block", bar)
            yield Row(f"{title}: {what}, over the floor", times.both / low.both, "times")
        both = (new.both + gone.both) * scale
        bar = BAR_US if page >= BLOCK else (floors[0].both + floors[1].both) * scale
        yield Row(f"{title}: together, a block stored or removed", both / 2, "us/block", bar)
        yield Row(f"{title}: a block in and out", both, "us/block")


# --- other shapes ------------------------------------------------------------------------------------------


def shapes(options: argparse.Namespace) -> Iterator[Row]:
    """Long prompts, growth, removals from either end, many prompts below one page; pages of one token."""
    form, rng = FORMS["sglang"], random.Random(7)
    long = prompt(form, 1, options.long, rng)
    whole = [payload([stored(form, 1, long, None)])]
    parents: list[int | None] = [None, *long.handles]
    growth = [
        payload([stored(form, 1, Prompt([token], [handle]), parent)])
        for token, handle, parent in zip(long.tokens, long.handles, parents, strict=False)
    ]
    singles = [payload([{"type": "BlockRemoved", "block_hashes": [h], **form.removed}]) for h in long.handles]
    kids = [prompt(form, 1, BLOCK, rng) for _ in range(options.long // BLOCK)]
    below = [payload([stored(form, 1, kid, long.handles[-1])]) for kid in kids]
    kids_gone = [payload(removed(form, kid)) for kid in kids]
    cases: list[tuple[str, Sequence[bytes], Sequence[bytes]]] = [
        ("stored in one event", [], whole),
        ("grown by one page an event", [], growth),
        ("removed by one hash an event, children first", whole, singles[::-1]),
        ("removed by one hash an event, parents first", whole, singles),
        ("with as many tokens in prompts of 16 below it", whole, below),
        ("and these removed", [*whole, *below], kids_gone),
    ]
    for what, before, timed in cases:

        def run(before: Sequence[bytes] = before, timed: Sequence[bytes] = timed) -> list[Times]:
            residency = Residency(DOMAIN)
            for data in before:
                ingest(residency, form.decode, data)
            gc.collect()
            return [ingest(residency, form.decode, data) for data in timed]

        times = best(options.repeat, run)
        yield Row(f"prompt of {options.long} pages of one token, {what}: in all", times.both * 1e3, "ms")
        yield Row(f"prompt of {options.long} pages of one token, {what}: an event", times.both * 1e6 / len(timed), "us")


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Bytes per engine block of a residency that holds prompts of 1,024 tokens."""
    form = FORMS["sglang"]
    for page in map(int, options.pages.split(",")):
        rng = random.Random(page)
        payloads = [payload([stored(form, page, prompt(form, page, TOKENS, rng), None)]) for _ in range(options.cached)]
        form.decode(payloads[0])
        gc.collect()
        tracemalloc.start()
        try:
            residency = Residency(DOMAIN)
            for data in payloads:
                ingest(residency, form.decode, data)
            gc.collect()
            used = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        yield Row(f"memory, pages of {page}: per engine block", used / (len(payloads) * TOKENS // page), "B")
        yield Row(f"memory, pages of {page}: per canonical block", used / (len(payloads) * TOKENS // BLOCK), "B")


# --- the program -------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "vllm": lambda options: stream("vllm", options),
    "sglang": lambda options: stream("sglang", options),
    "shapes": shapes,
    "memory": memory,
}


def main() -> int:
    """Print the table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run ({','.join(PARTS)})")
    parser.add_argument("--pages", default="1,16,32,128", help="engine page sizes in tokens (1,16,32,128)")
    parser.add_argument("--cached", type=int, default=64, help="prompts that the cache holds (64)")
    parser.add_argument("--steps", type=int, default=32, help="prompts that come and go (32)")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long prompt (8,192)")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions (7)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the prompts, two repetitions")
    json_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.cached, options.steps, options.repeat = options.cached // 4, options.steps // 4, 2
    parts = chosen(parser, options.only, PARTS)
    publish([(part, PARTS[part](options)) for part in parts], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
