"""HyperPod clusters: CreateCluster and UpdateCluster requests, and what an update would change."""
