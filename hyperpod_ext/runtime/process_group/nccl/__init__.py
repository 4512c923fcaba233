"""Requirements for aborting NCCL's groups: environment variables and library versions."""
