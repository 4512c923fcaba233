"""Detection of faults: heartbeats, hangs, deaths of processes, health checks, and preemption notices."""
