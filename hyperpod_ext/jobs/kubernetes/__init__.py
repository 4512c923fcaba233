"""Targets hyperpod-eks and kubeflow, and their shared parts: pods, sizes, and kinds of jobs."""
