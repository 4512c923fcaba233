"""The log of a job's events, and its evaluation: phases, capacity, and the report."""
