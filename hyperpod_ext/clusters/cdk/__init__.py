"""Deploys a cluster with its network, storage and EKS, and shows costs and changes before the deployment.

The CDK app runs in a separate process, so this package does not import the CDK library.
"""
