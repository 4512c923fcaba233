"""How a fault is found: heartbeats, hangs, deaths, health, and notices of preemption."""
