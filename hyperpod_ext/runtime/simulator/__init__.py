"""Simulates jobs of 16 to 16,384 nodes through months of faults. The code of real jobs makes the decisions.

The simulator needs no torch."""
