"""Commands that report on a job, while the job runs and after it has ended."""
