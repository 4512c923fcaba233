"""Models of the spec sections with Kubernetes' own field names, which are checked by Kubernetes' published types."""
