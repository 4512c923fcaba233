"""Rules on what rank 0 prints: whether one is broken, and the log that is followed for it."""
