"""Simulated sessions over placements of a model's blocks on servers, planned by `prefixroute.plan.placement`.

sessions          arrivals, chains, cache slots and waits over a fixed placement; start here
drifting_world    the online planner while links, servers and load change
fleets            fleets drawn from a seed, as published
wan               round trips: built-in networks, topology files, measured landmarks
command           ``prefixroute simulate place``: our placements and chains against the baseline
changes_command   ``prefixroute simulate place --changes``: a placement that follows the load against a fixed one
"""
