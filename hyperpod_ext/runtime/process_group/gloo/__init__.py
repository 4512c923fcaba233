"""Helpers to abort gloo's groups: sockets, waiting threads, and lost wake-ups."""
