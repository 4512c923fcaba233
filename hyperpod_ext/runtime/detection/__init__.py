"""How faults are found: heartbeats, hangs, deaths of processes, health checks, and preemption notices."""
