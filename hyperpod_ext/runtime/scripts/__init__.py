"""Mode `run`: jobs whose scripts do not use `@resilient`, but save and load their own checkpoints."""
