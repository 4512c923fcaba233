"""Converts Kubernetes job files of other tools to specs of this project."""
