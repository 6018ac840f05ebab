"""Two clusters that share prefill, in virtual time."""
