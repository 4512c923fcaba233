"""What a job will cost, before it runs."""
