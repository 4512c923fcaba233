"""Sections in Kubernetes' own field names, checked by its published types."""
