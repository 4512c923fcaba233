"""A whole cluster in one process: real agents and coordinators on simulated time and a simulated network."""
