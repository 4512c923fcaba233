"""The log of a job's events, and what can be told from it: phases, capacity, the report."""
