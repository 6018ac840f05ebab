"""Weigh the endpoints, book the work, follow each decision to its outcome."""
