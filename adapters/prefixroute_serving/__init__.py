"""Serving: the programs between clients and engines that carry real requests.

Three parts: `attach`, which any server around a `Node` can use; the sidecar, an OpenAI-compatible server beside each
engine (``prefixroute serve CONFIG``); and the doctor, which examines running sidecars (``prefixroute doctor CONFIG``).
Each file but `command.py` imports only what stands above it.

| file | is |
|---|---|
| `command.py` | the options of both commands; imports nothing that needs an extra |
| `attach/` | the engine beside a node: ranks, events, load, restarts, repairs |
| `sidecar_config.py` | the configuration, one JSON file a node |
| `seals.py` | tags that prove that a node of the fleet wrote something |
| `answer_streams.py` | server-sent events of an answer: cutting them, and going on after an upstream died |
| `http_client.py` | the HTTP client of requests on their way |
| `headers.py` | the headers between sidecars, in one table |
| `door.py` | the HTTP server's side of the routed paths: body in, reply out |
| `local_tokenizer.py` | a copy of the engine's tokenizer in this process |
| `prompts.py` | a request's body into token ids and namespace |
| `callers.py` | whose request it is, and under which salt it is cached |
| `carried_tokens.py` | the tokens that a forward carries |
| `turns.py` | tenants take turns before the local engine |
| `sockets.py` | the sockets of a sidecar, and the error when an address is taken |
| `introspection.py` | what a sidecar does for the doctor: domain, clock, echoes over UDP |
| `site.py` | what the parts of one running sidecar share |
| `sidecar_stats.py` | the answer of ``/prefixroute/stats`` |
| `upstream.py` | a request to an engine or a peer, and its answer up to the first event |
| `cache_reads.py` | whether an engine reads its cache for a request, so that its count can be compared |
| `exchange.py` | one request, from its decision to its last byte |
| `pages.py` | all paths that are not routed |
| `sidecar.py` | the sidecar: it reads a request, has the node decide, and starts the exchange |
| `serve.py` | the sidecar as a process: signals and secrets |
| `doctor/` | what is wrong with running sidecars and their engines, and what to change |
"""
