"""The engine beside a node: its ranks, their events, their load."""
