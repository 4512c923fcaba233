"""Process groups of gloo and NCCL: opened, aborted and closed; and the key-value store that ranks meet in."""
