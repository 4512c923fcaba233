"""Plans a job before it runs: its cost and its best intervals."""
