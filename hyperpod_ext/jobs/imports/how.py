"""Hint how to give a missing value."""

HOW = "give it with --set {name}=VALUE, or those of a file with --env-file FILE or --values FILE"
