"""Two clusters that share prefill, planned by `prefixroute.plan.prefill`.

clusters   one run: arrivals, local or pool prefill, KV over the link, decode slots; start here
kv_link    the link: a fluid that its transfers share evenly
loops      the fast loop: what an operator's code would do once a second
cases      the rate that a set-up sustains, and what a link costs that loses bandwidth for a while
command    ``prefixroute simulate prefill``
"""
