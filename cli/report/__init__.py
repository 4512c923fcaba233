"""What happened to a job, while it runs and afterwards."""
