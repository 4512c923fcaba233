"""A client of the Kubernetes API on the standard library: kubeconfig, answers, logs of pods."""
