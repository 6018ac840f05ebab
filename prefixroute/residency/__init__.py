"""What an endpoint's engine really holds: its events, turned into changes of a radix tree. Start at `Residency`."""

from __future__ import annotations

from .mirror import Live, Residency, StreamCounts

__all__ = ["Live", "Residency", "StreamCounts"]
