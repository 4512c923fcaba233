"""Hint for users that explains how to set a value that an imported file does not contain."""

HOW = "set it with --set {name}=VALUE, or several values with --env-file FILE or --values FILE"
