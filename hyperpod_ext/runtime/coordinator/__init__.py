"""The coordinator of a job: receives reports of all agents, and carries out the actions that `Membership` returns."""
