"""Makes token stores from datasets: reads, tokenizes and checks the data, in this process or in the background."""
