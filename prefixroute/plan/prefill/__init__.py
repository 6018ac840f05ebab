"""When the prefill of a prompt should go to another cluster.

division       requests a second of two clusters; the best threshold and the best division of nodes; start here
lengths        distributions of prompt lengths, cut by a threshold
costs          bytes of KV, seconds of prefill, rate of decode
offload        whether one prompt should be prefilled in the pool
remote_pool    the policy of a node that has a pool behind it
congestion     following a link that fills and clears
calibrate      a latency model from measurements
traces         traces of requests with their cached tokens
cluster_file   CLUSTER.toml, the file of ``prefixroute plan prefill``
"""
