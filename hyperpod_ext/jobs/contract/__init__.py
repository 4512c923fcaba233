"""Contract of all targets: their capabilities, handles and statuses of jobs, and rendered files."""
