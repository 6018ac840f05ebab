"""`prefixroute doctor`: what is wrong with running nodes, and what to change."""
