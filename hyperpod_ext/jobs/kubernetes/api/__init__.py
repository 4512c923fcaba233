"""A client of the Kubernetes API on the standard library: kubeconfig, responses, logs of pods, and their exit
causes."""
