"""Policies over workloads: real nodes, modelled engines, virtual time."""
