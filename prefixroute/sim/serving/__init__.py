"""Policies over workloads: real nodes, modelled engines, requests with their arrival times.

loop              one run: arrivals, decisions, forwards, service, replies, gossip; start here
serving_engine    the engine of a node: a cache of blocks and a server of prefill
workloads         traces of prompts, from a seed or a file
exact_knowledge   a run whose origins know all caches and queues: the bound of what fresher news can gain
faults            a run in which nodes crash, fall silent, refuse or lie
figures           mean, tail, hits and shares of a run
cells             one cell of a grid: a fleet, a workload and a load under several policies
grid              ``simulate grid``: every policy over many cells
paper             ``simulate paper``: the published results, row by row
stress            ``simulate stress``: fleets out of the ordinary, and guards against bad nodes
gateway_fleet     ``simulate gateways``: stateless gateways in front of many endpoints
greedy_tenant     ``simulate tenants``: a greedy tenant beside light ones
scenario          ``simulate run``: a fleet and a workload from a file
"""
