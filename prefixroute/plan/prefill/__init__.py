"""When the prefill of a prompt should go to another cluster."""
