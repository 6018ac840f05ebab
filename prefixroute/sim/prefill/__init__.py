"""Two clusters that share prefill, planned by `prefixroute.plan.prefill`.

clusters   one run: arrivals, prefill here or in the pool, KV over the link, decode slots; start here
kv_link    the link: a fluid that its transfers share evenly
loops      the fast loop: what an operator's code would do once a second
cases      what a set-up sustains, and what a link that fails for a while costs
command    ``prefixroute simulate prefill``
"""
