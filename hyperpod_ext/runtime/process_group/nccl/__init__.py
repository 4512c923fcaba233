"""Requirements for aborting NCCL's groups: environment variables and versions of libraries."""
