"""The spec of a cluster: its groups of machines, network and storage."""
