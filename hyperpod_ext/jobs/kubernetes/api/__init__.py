"""A client of the Kubernetes API on the standard library: kubeconfig, answers, what pods print and how they ended."""
