"""Simulates jobs of 16 to 16,384 nodes through months of faults. Decisions are made by the code of real jobs.

The simulator needs no torch."""
