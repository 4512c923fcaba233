"""The coordinator: receives reports from all agents, and carries out the membership's decisions."""
