"""Commands for jobs, from the spec of a job to its end."""
