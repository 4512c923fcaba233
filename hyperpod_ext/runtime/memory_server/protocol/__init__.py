"""Requests to memory servers, from the same node and from other nodes, and requests to the NIXL process."""
