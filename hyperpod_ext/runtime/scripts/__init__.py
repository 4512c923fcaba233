"""Mode `run`: scripts without `@resilient`, which save and resume by themselves."""
