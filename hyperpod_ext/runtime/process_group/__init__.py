"""Process groups of gloo and NCCL, which are opened, aborted and closed, and the store through which ranks connect."""
