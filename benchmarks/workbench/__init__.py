"""What the benchmarks are made of, beside the comparison with rivals.

bars             rows of figures with their bars, printed and written as JSON
gossip_fleet     many gossiping nodes on virtual time, for `gossip.py`
request_logs     made-up request logs, for `analyze.py`
engine_traces    traces of prompts for real engines, for `engines.py`
gateway_setups   sidecars and other gateways as processes, for `gateways.py`
stub_worker      a worker that answers at once, for `gateways.py`
"""
