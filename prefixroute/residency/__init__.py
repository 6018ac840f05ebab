"""What an endpoint's engine really holds: its events, turned into changes of a radix tree. Start at `Residency`."""

from __future__ import annotations

from .live import Live, StreamCounts
from .mirror import Residency

__all__ = ["Live", "Residency", "StreamCounts"]
