"""Jobs that others wrote for Kubernetes, as specs of ours."""
