"""What NCCL must be told and must be, so that its groups can be aborted: environment variables and versions."""
