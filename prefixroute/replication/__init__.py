"""What the other nodes hold: the wire, single-writer sets, gossip."""
