"""JSON files that a job leaves on a machine, and the checks before they are used."""
