"""The ranks' own store by number of ranks: what groups ask of it, and owners that are only their part of it."""
