"""Hint that explains how to set a missing value."""

HOW = "set it with --set {name}=VALUE, or several values with --env-file FILE or --values FILE"
