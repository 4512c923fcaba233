"""Commands that create, change and show clusters."""
