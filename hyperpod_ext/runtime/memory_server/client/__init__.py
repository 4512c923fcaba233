"""Clients of memory servers, for workers and agents, and the start of a server."""
