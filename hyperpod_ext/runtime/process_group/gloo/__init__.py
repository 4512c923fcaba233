"""Parts of gloo's groups: sockets, waiting threads, and lost wake-ups."""
