"""The coordinator: receives the reports of all agents, and carries out the membership's decisions."""
