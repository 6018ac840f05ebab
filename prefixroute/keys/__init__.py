"""From tokens to the keys of their prefixes: domains, chains, and sets of keys."""
