"""Serves the five HTTP requests by which AWS's operator for HyperPod on EKS controls the agent in a pod."""
