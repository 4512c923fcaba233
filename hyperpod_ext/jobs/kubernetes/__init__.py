"""Targets hyperpod-eks and kubeflow, and the parts that both share: pods, their sizes, and kinds of job objects."""
