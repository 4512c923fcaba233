"""Deployment of a cluster with its network, storage and EKS: templates, costs and replaced resources.

The CDK app runs in a separate process: this package does not import CDK.
"""
