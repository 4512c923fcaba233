"""Requests to memory servers, from processes on the same node and from other nodes, and requests to the NIXL
process."""
