"""Stores made of other data: read, tokenized and checked, at once or in the background."""
