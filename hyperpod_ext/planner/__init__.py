"""What a job will weigh, cost and lose, before it runs: sizes, intervals, goodput. Pure arithmetic, no torch."""
