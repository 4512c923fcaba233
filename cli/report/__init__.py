"""Reports on a job, while it runs and afterwards."""
