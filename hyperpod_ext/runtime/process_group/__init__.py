"""Process groups of gloo: opened, aborted and closed; and the key-value store that ranks meet in."""
