"""Opens, aborts and closes process groups of gloo and NCCL, and implements their distributed key-value store."""
