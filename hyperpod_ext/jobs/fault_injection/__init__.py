"""Faults that are ordered in a job that runs, on the targets where that can be done."""
