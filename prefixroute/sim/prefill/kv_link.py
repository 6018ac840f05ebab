"""A link that carries KV from a pool, modelled as a fluid: the transfers under way share it evenly.

Rules:
1. A transfer begins with its prefill. While the prompt is computed, only KV that exists can be sent. The last layer is
   computed at the end, so at least that layer's share is left to send then.
2. Bandwidth is shared evenly among transfers that could take more, up to what the connections of one transfer carry.
3. Between two events rates do not change, so only straight lines are integrated. O(transfers) an event.
"""

from __future__ import annotations

from math import inf

from prefixroute import UsageError


class Transfer:
    """One prompt's KV: the bytes left to send, and the bytes a second at which they may be sent."""

    __slots__ = ("bound", "left", "rate", "request")

    def __init__(self, request: int, left: float, bound: float) -> None:
        self.request = request
        self.left = left
        self.bound = bound
        self.rate = 0.0


class SharedLink:
    """The link; `bytes_per_s` may change at any time, but `advance` must be called before a change."""

    def __init__(self, bytes_per_s: float, layers: int, transfer_bytes_per_s: float = inf) -> None:
        if not bytes_per_s > 0 or layers < 1 or not transfer_bytes_per_s > 0:
            raise UsageError("a link needs bytes_per_s > 0, layers >= 1 and transfer_bytes_per_s > 0")
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0.0
        """Bytes sent so far."""
        self.limited_s = 0.0
        """Seconds in which the link alone limited transfers."""
        self._layers = layers
        self._most = transfer_bytes_per_s
        self._open: dict[int, Transfer] = {}
        self._at = 0.0
        self._limited = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def left_bytes(self) -> float:
        """Bytes that the transfers under way still have to send."""
        return sum(transfer.left for transfer in self._open.values())

    def begin(self, request: int, kv_bytes: float, prefill_s: float, now: float) -> None:
        """Begin a transfer with its prefill."""
        self.advance(now)
        made_per_s = kv_bytes * (1 - 1 / self._layers) / prefill_s if prefill_s > 0 else inf
        self._open[request] = Transfer(request, kv_bytes, min(made_per_s, self._most))
        self._share()

    def computed(self, request: int, now: float) -> None:
        """Note that a prefill is over: from now on all of its KV can be sent."""
        self.advance(now)
        self._open[request].bound = self._most
        self._share()

    def resize(self, bytes_per_s: float, now: float) -> None:
        """Change the bandwidth."""
        self.advance(now)
        self.bytes_per_s = bytes_per_s
        self._share()

    def next_end(self) -> float:
        """Return the second at which the next transfer ends if nothing else happens; infinite without a transfer."""
        ends = (t.left / t.rate for t in self._open.values() if t.rate > 0)
        return self._at + min(ends, default=inf)

    def advance(self, now: float) -> None:
        """Send until `now`."""
        passed = now - self._at
        if passed <= 0:
            return
        self._at = now
        for transfer in self._open.values():
            sent = min(transfer.left, transfer.rate * passed)
            transfer.left -= sent
            self.sent_bytes += sent
        if self._limited:
            self.limited_s += passed

    def ended(self, now: float) -> list[int]:
        """Take out the transfers that have nothing left; return their requests in the order of their beginning."""
        self.advance(now)
        done = [request for request, transfer in self._open.items() if transfer.left <= max(1.0, transfer.rate * 1e-9)]
        for request in done:
            del self._open[request]
        if done:
            self._share()
        return done

    def _share(self) -> None:
        """Share the bandwidth, smallest bound first: a transfer bounded below an even share leaves more to others."""
        left, waiting = self.bytes_per_s, sorted(self._open.values(), key=lambda transfer: transfer.bound)
        self._limited = False
        for i, transfer in enumerate(waiting):
            even = left / (len(waiting) - i)
            transfer.rate = min(transfer.bound, even)
            self._limited |= transfer.bound > even
            left -= transfer.rate
