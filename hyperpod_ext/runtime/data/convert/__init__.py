"""Makes stores from other data: it is read, tokenized and checked, at once or in the background."""
