"""What targets hyperpod-eks and kubeflow share: pods, their sizes and text, and a client of the Kubernetes API."""
