"""Four-node LAN example."""
