"""What changes from step to step and is in no snapshot: found in all that a training function reaches, and named."""
