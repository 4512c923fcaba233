"""Imports Kubernetes job files that other tools wrote as specs."""
