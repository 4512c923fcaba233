"""Requests to memory servers: from processes of the same node, from other nodes, and to the NIXL process."""
