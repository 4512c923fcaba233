"""A Kubernetes client that uses only the standard library and PyYAML: kubeconfig, requests, pod logs, exit causes."""
