"""The tools of the live suite that need no engine: the rule for estimates, the bad link, the memory count."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from live_memory import pss_bytes
from live_oracle import Compared, EstimateTally
from live_proxy import BadLink, bad_link

DEADLINE_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("predicted", "actual", "block", "whole", "right", "within"),
    [
        (64, 64, 32, True, True, True),
        (32, 64, 32, True, False, True),
        (96, 64, 32, True, False, True),
        (96, 64, 32, False, True, True),
        (97, 64, 32, False, False, False),
        (0, 640, 32, False, True, False),
        (32, 47, 1, True, True, True),
        (32, 48, 1, True, False, True),
        (49, 48, 1, True, False, True),
        (50, 48, 1, False, False, False),
    ],
)
def test_an_estimate_is_right_or_not(
    predicted: int, actual: int, block: int, whole: bool, right: bool, within: bool
) -> None:
    row = Compared("", "", "", predicted, actual, block, whole)
    assert (row.right, row.within_a_block) == (right, within)


def test_lossy_requests_are_counted_apart() -> None:
    tally = EstimateTally()
    assert (tally.share_within(), tally.text()) == (1.0, [])
    tally.rows += [Compared("", "", "", 0, 0, 32, True), Compared("", "", "", 0, 640, 32, False)]
    assert (tally.share_within(), tally.share_within(whole=False)) == (1.0, 0.0)
    whole, lossy = tally.text()
    assert "1 requests, 100.00 % within one block, 1 exact, worst 0 tokens high and 0 low" in whole
    assert "640 low" in lossy


class Ends:
    """An engine's publisher and a follower, with the link between them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], link: BadLink, source: zmq.Socket[bytes]) -> None:
        self.link = link
        self.source = source
        self.sink = context.socket(zmq.SUB)
        self.sink.subscribe("")
        self.sink.connect(link.address)

    def say(self, *numbers: int) -> None:
        for number in numbers:
            self.source.send_multipart([b"kv", number.to_bytes(8, "big"), b"payload"])
        until(lambda: self.link.seen == numbers[-1])

    def heard(self, count: int) -> list[int]:
        numbers = []
        for _ in range(count):
            assert self.sink.poll(int(1000 * DEADLINE_S))
            numbers.append(int.from_bytes(self.sink.recv_multipart()[1], "big"))
        assert not self.sink.poll(0)
        return numbers


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source = context.socket(zmq.XPUB)
    source.set(zmq.XPUB_VERBOSE, 1)
    source.bind(f"ipc://{tmp_path}/up")
    with bad_link(f"ipc://{tmp_path}/up") as link:
        assert source.poll(int(1000 * DEADLINE_S)), "the link has subscribed"
        source.recv()
        ends = Ends(context, link, source)
        yield ends
    context.destroy(linger=0)


def _joined(ends: Ends) -> None:
    """A subscriber misses what is sent before it has joined: say something until it is heard, and hear it all."""
    said = 100
    ends.say(said)
    while not ends.sink.poll(10):
        said += 1
        ends.say(said)
    while int.from_bytes(ends.sink.recv_multipart()[1], "big") != said:
        pass


def test_a_link_passes_loses_and_holds_back(ends: Ends) -> None:
    _joined(ends)
    ends.say(1, 2)
    assert ends.heard(2) == [1, 2]
    ends.link.loses = lambda number: number % 3 == 1
    ends.say(3, 4, 5)
    assert ends.heard(2) == [3, 5]
    assert (ends.link.lost, ends.link.passed) == (1, 5)
    ends.link.loses = lambda _: False
    ends.link.held = True
    ends.say(6, 7, 8, 9)
    assert not ends.sink.poll(0)
    ends.link.room = 2
    until(lambda: ends.link.lost == 3)
    ends.link.held = False
    assert ends.heard(2) == [8, 9]


def test_memory_is_that_of_the_groups_that_are_named() -> None:
    assert pss_bytes([os.getpgrp()]) > 1 << 20
    assert pss_bytes([]) == 0
