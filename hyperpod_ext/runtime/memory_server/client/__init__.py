"""What workers and agents import to speak to a memory server, or to start one."""
