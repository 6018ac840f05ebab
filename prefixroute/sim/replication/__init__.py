"""Replication under faults: real nodes over a network in virtual time, and an oracle that checks every rule.

network       nodes, their engines, datagrams under way, partitions, pauses, restarts; start here
links         what a link does to a datagram: delay, loss, repetition
chain_engine  the engine of an endpoint: chains of blocks that come and go
oracle        the rules of replication, checked after everything that a node does
quiet         what must hold some rounds after the last fault
actions       what a schedule can do to a fleet, and how often it is drawn
schedule      schedules: drawn from a seed, played, printed, read back
shrink        the shortest schedule that still breaks the same rule
command       ``prefixroute simulate replication``
"""
