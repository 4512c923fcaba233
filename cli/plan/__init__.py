"""Commands that plan a job before it runs: its cost, its best save intervals, and its division among nodes."""
