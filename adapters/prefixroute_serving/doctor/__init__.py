"""``prefixroute doctor``: what is wrong with running sidecars and their engines, and what to change.

| file | is |
|---|---|
| `findings.py` | one finding, and HTTP questions that never raise |
| `engine_checks.py` | version, flags, and where the events go |
| `listen.py` | hears the engine's events of the doctor's own prompts |
| `hit_checks.py` | whether the node predicts the tokens that its engine reuses |
| `peer_checks.py` | what must be equal on two nodes, and what UDP carries between them |
| `examination.py` | all checks in order, for the nodes of some configurations |
"""
