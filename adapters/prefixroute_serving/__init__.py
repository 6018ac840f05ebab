"""Serving: the way of a real request, from a client to the engine that holds its prefix."""
