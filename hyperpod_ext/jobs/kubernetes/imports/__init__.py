"""Import of other tools' Kubernetes jobs as specs."""
