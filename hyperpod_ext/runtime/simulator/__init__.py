"""Simulates jobs of 16 to 16,384 nodes through months of faults. The code of a real job makes the decisions. Needs no
torch."""
