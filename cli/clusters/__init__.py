"""Commands that make, change and show clusters."""
