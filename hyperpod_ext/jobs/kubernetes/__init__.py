"""Targets hyperpod-eks and kubeflow, and what they share: pods, their sizes, and what an operator defines."""
