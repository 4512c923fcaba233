"""Requests for faults in running jobs, on targets that support them."""
