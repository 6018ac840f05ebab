"""What `compare.py` and `bench.py` are made of: ours, the rivals and the C floor on the same prompts.

worlds           what endpoints hold and what is asked
contest          contestants timed in turns, disturbed runs left out
ours             this library's side
rivals           the table of rivals; rivals_dynamo and rivals_python adapt them
floors           the C floor (floor.c) and hashing in plain Python
compare_upkeep   prompts that come and go, and memory
compare_report   rows, bars and JSON; compare_tables prints them for the documents
"""
