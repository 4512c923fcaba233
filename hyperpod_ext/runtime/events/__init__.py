"""The log of a job's events, and what is computed from it: phases of each rank, number of nodes, and the report."""
