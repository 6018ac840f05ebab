"""Which server holds which blocks of a model, and which chain of servers a request takes.

problem       servers, clients, a model of equal blocks, round trips; start here
spans         the planner: one span of blocks for each server
chains        the fastest chain of servers over spans, and requests shared out over chains
design_load   requests under way at once when so many come a second
certificate   what can be proved of a plan without trusting the planner
exact, milp   the best plan by a mixed-integer solver (extra `milp`)
petals        the baseline: PETALS' placement and routing
slots         the ledger of cache slots: who has booked which, and until when
online        the planner while requests come and the fleet changes
estimates     delays, speeds and rates learnt from measurements
migration     from one placement to another without a gap
fleet_file    FLEET.toml, the file of ``prefixroute plan place``
"""
