"""Replication under faults: real nodes over a network in virtual time, and an oracle that looks on."""
