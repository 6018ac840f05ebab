"""The emulated engine's answers: words that depend on the prompt's tokens and on nothing else.

Rules:
1. Same prompt, same answer, on every node, in every cache state, for every sampling parameter. So a test
   can prove that routing never changes an answer.
2. A word is one token and text continues with " word", so a prompt followed by its answer encodes to the
   prompt's tokens followed by the answer's: the next turn of a conversation finds both in the cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from prefixroute.emulator.tokenizer import piece_id

_LIST = """
amber anchor apple arrow aspen autumn badge basil beacon birch bloom border branch breeze bridge bright
brook candle canyon cedar chalk circle clay cliff clover cobalt copper coral cotton creek cress dawn
delta desert dew drift dune dusk eagle early east echo ember falcon fern field flint flora forest fossil
frost garden garnet ginger glade glass granit grove gulf harbor hazel heron hill honey horn indigo inlet
iris island ivory jade jasper jungle june kelp kernel kite lagoon lake lark laurel lava leaf lemon
lichen light lily linen lotus lunar maple marble marsh meadow mesa mint mist moon moss nectar nest north
oak oasis ocean olive onyx opal orbit orchid otter palm pearl pebble petal pine plain planet plum pollen
pond poplar prism quartz quill rain raven reed reef ridge river robin root rose rowan ruby sable sage
salt sand sorrel season shell shore silk silver sky slate slope snow solar south spark spring spruce
star stone storm stream summer summit sun surf swan terra thorn thyme tide timber topaz trail tulip
tundra twig valley velvet violet walnut wave west wheat willow wind winter wood wren yarrow zenith
zephyr
"""

WORDS = tuple(_LIST.split())
"""Every word is one piece of the tokenizer."""


class Answer:
    """The endless answer to one prompt by a model of these `weights`; about a microsecond a token, in any order."""

    def __init__(self, prompt: Sequence[int], weights: int = 0) -> None:
        salt = weights.to_bytes(8, "little")
        self._seed = hashlib.blake2b(array("I", prompt).tobytes(), digest_size=16, salt=salt).digest()
        self._page: tuple[int, bytes] = (-1, b"")

    def word(self, index: int) -> str:
        """Output word number `index`, counted from 0."""
        page, place = divmod(index, 32)
        if self._page[0] != page:
            block = hashlib.blake2b(page.to_bytes(8, "little"), digest_size=64, key=self._seed).digest()
            self._page = (page, block)
        pair = self._page[1][2 * place : 2 * place + 2]
        return WORDS[int.from_bytes(pair, "little") % len(WORDS)]

    def token(self, index: int) -> int:
        """Token id of output word number `index`."""
        return piece_id(self.word(index))

    def text(self, start: int, stop: int) -> str:
        """Output text of the tokens from `start` to `stop`: each word with a space before it."""
        return "".join(f" {self.word(index)}" for index in range(start, stop))
