"""What a node publishes and advertises of an engine of its own."""
