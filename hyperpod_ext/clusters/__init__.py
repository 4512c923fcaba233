"""Creates, updates, checks and deletes HyperPod clusters through SageMaker's API."""
