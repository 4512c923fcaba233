"""HyperPod clusters: CreateCluster and UpdateCluster requests, and changes by an update."""
